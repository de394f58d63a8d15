"""The eight rotary modules that nvFuser benchmarks, written from their definitions, with the bytes they must move.

Two layouts: `Separate` takes q, k, v as three projections leave them (transformers), `Packed` one projection of all
three.  Angles come either as cos and sin tables or from position ids by a matrix product whose inner dimension is 1.
All tensors are bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.suite import Problem

BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Module:
    """One module's shape.  `sequence` is the length that nvFuser's benchmark uses.

    layout: "separate", "packed" ([q | k | v], transformers' Phi-3) or "grouped" (per key/value head its query heads,
    then its key and its value, as litgpt packs them).  `values`: whether v is part of the result.
    """

    name: str
    queries: int
    keys: int
    head: int
    layout: str
    sequence: int
    batch: int = 1
    product: bool = False
    values: bool = True

    @property
    def repeats(self) -> int:
        return self.queries // self.keys

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """(q, k, v, ...) or (qkv, ...), then (cos, sin) or (inverse frequencies, position ids) -> q, k(, v)."""
        split = {"separate": self._separate, "packed": self._packed, "grouped": self._grouped}[self.layout]
        angles = product_angles if self.product else table_angles
        count = 3 if self.layout == "separate" else 1

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            q, k, v = split(*inputs[:count])
            cos, sin = angles(*inputs[count:], q.dtype)
            q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
            k, v = repeat(k, self.repeats), repeat(v, self.repeats)
            return (q, k, v) if self.values else (q, k)

        return forward

    def inputs(self, sequence: int, device: torch.device, grad: bool) -> tuple[Tensor, ...]:
        widths = (self.queries, self.keys, self.keys)
        if self.layout != "separate":
            widths = (sum(widths),)
        projections = [torch.randn(self.batch, sequence, w * self.head, device=device, dtype=BFLOAT16)
                       .requires_grad_(grad) for w in widths]
        frequencies = 10000.0 ** -(torch.arange(0, self.head, 2, device=device).float() / self.head)
        positions = torch.arange(sequence, device=device)[None].expand(self.batch, -1)
        if self.product:
            return *projections, frequencies, positions.contiguous()
        angle = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
        return *projections, angle.cos().to(BFLOAT16), angle.sin().to(BFLOAT16)

    def bytes(self, sequence: int, backward: bool) -> int:
        """What must move: each element that is needed read once, each that is new written once.

        v costs nothing forward where it is a view of its input; backward its tangent is copied.  An unused v of a
        packed projection is still a gradient of zeros that has to be written.
        """
        tokens = self.batch * sequence
        angles = tokens * 8 + self.head * 2 if self.product else 2 * tokens * self.head * 2
        results = 3 if self.values else 2
        if backward:
            moved = results * self.queries + self.queries + 2 * self.keys
        else:
            moved = self.queries + self.keys + 2 * self.queries
            if self.values and self.repeats > 1:
                moved += self.keys + self.queries
        return moved * tokens * self.head * 2 + angles

    def _separate(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.unflatten(-1, (-1, self.head)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _packed(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._separate(*qkv.split([n * self.head for n in (self.queries, self.keys, self.keys)], dim=-1))

    def _grouped(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = qkv.shape
        x = qkv.view(batch, length, self.keys, self.repeats + 2, self.head).permute(0, 2, 3, 1, 4)
        q, k, v = x.split((self.repeats, 1, 1), dim=2)
        return (q.reshape(batch, self.queries, length, self.head), k.squeeze(2), v.squeeze(2))


def table_angles(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cos.unsqueeze(1).to(dtype), sin.unsqueeze(1).to(dtype)


def product_angles(frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    columns = frequencies[None, :, None].float().expand(positions.shape[0], -1, 1)
    angle = (columns @ positions[:, None, :].float()).transpose(1, 2)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype).unsqueeze(1), angle.sin().to(dtype).unsqueeze(1)


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def repeat(x: Tensor, times: int) -> Tensor:
    if times == 1:
        return x
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


MODULES = (
    Module("llama2_7b", 32, 32, 128, "grouped", 4096, batch=2, values=False),
    Module("llama3_8b", 32, 8, 128, "grouped", 8192, batch=2, values=False),
    Module("qwen2", 28, 4, 128, "separate", 4096),
    Module("phi3", 32, 32, 96, "packed", 8192, product=True),
    Module("mistral_nemo", 32, 8, 128, "separate", 4096, product=True),
    Module("litgpt_gemma2_9b", 16, 8, 256, "grouped", 4096),
    Module("litgpt_llama3_8b", 32, 8, 128, "grouped", 4096),  # litgpt's Mistral 7B has the same shape
    Module("litgpt_phi35_mini", 32, 32, 96, "grouped", 4096),
)


def problem(module: Module, sequence: int, backward: bool, device: torch.device) -> Problem:
    return Problem(module.function(), module.inputs(sequence, device, backward), backward,
                   module.bytes(sequence, backward))
