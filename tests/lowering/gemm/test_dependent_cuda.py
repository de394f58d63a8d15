"""Pairs whose second kernel starts early, on a GPU: chains of them, in which each reads what the one before it has
written, on concurrent streams, plainly and from graphs, with everything that is no longer needed destroyed right behind
each; not one bit may differ from kernels that start one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fxfuser.lowering.kernel import Dependence, Program
from fxfuser.runtime.launcher import Launch
from fxfuser.runtime.programs import Arity, cuda_program

from .harness import Blocks, Made, made

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]
Tensor = torch.Tensor
B = torch.bfloat16
WIDTH, LAYERS, STREAMS, ROUNDS = 1024, 12, 4, 60
# rows of a product by rows of the matrix, by tiles in one part, and by tiles in several
SHAPES = {"rows": (1, None), "tiles": (4, Blocks(16, 64, 64, splits=1, warps=4, stages=2)),
          "parts": (16, Blocks(16, 64, 64, splits=7, warps=4, stages=2))}
NAN = float("nan")


def layer(x: Tensor, w: Tensor, residual: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, (f * torch.rsqrt((f * f).mean(1, keepdim=True) + 1e-6)).to(h.dtype) * gain


def refuse(error: Exception) -> bool:
    raise error


def one_after_the_other(program: Program) -> Program:
    return replace(program, launches=tuple(
        replace(x, kernel=replace(x.kernel, dependence=Dependence.ALONE)) for x in program.launches))


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers, of which each reads the results of the one before it.  `scratch` elements are what a pair hands over."""

    launch: Launch
    order: tuple[int, ...]  # of a layer's arguments, in the launch
    weights: Sequence[tuple[Tensor, Tensor]]
    x: Tensor
    residual: Tensor
    scratch: int

    def outputs(self) -> list[tuple[Tensor, Tensor]]:
        return [(torch.full_like(self.x, NAN), torch.full_like(self.x, NAN)) for _ in self.weights]

    def __call__(self, outputs: Sequence[tuple[Tensor, Tensor]], destroy: bool = True) -> None:
        """What a layer has read is overwritten right behind it, and so is the memory in which its parts were."""
        x, residual = self.x.clone(), self.residual.clone()
        for (w, gain), (h, y) in zip(self.weights, outputs):
            given = (x, w, residual, gain)
            assert self.launch(*(given[i] for i in self.order), h, y)
            if destroy:
                torch.full((self.scratch,), NAN, device=x.device)
                x.fill_(NAN)
                residual.fill_(NAN)
            x, residual = y, h


def last(outputs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results that no layer has destroyed."""
    return outputs[-1]


def chains(name: str, bind: Callable[[Program, Arity], Launch], device: str) -> tuple[Chain, Chain]:
    """The same chain of dependent pairs, and of launches that start one after the other."""
    rows, blocks = SHAPES[name]
    draw = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(B)

    args = random(rows, WIDTH), random(WIDTH, WIDTH), random(rows, WIDTH), random(WIDTH)
    of: Made = made(layer, args, blocks=blocks)
    program, arity = of.programs["parts"], Arity.of(of.lowered)
    assert [x.kernel.dependence for x in program.launches] == [Dependence.LEADS, Dependence.FOLLOWS]
    names = [n for n in of.graph.graph.nodes if n.op == "placeholder"]
    order = tuple(names.index(of.segment.inputs[i]) for i in of.lowered.inputs)
    assert [of.segment.outputs[i] for i in of.lowered.outputs] == list(of.segment.outputs) and not of.lowered.sizes
    weights = [((random(WIDTH, WIDTH) / WIDTH ** 0.5).to(device), random(WIDTH).to(device)) for _ in range(LAYERS)]
    splits = 1 if blocks is None else blocks.splits
    pair, apart = (Chain(bind(p, arity), order, weights, args[0].to(device), args[2].to(device), rows * WIDTH * splits)
                   for p in (program, one_after_the_other(program)))
    return pair, apart


def on_cuda(program: Program, arity: Arity) -> Launch:
    return cuda_program(program, arity, None).bind(refuse)


@pytest.mark.parametrize("name", SHAPES)
def test_chains_of_pairs(name: str) -> None:
    """ROUNDS times on each stream, with other work beside them; graphs in every other round."""
    pair, apart = chains(name, on_cuda, "cuda")
    expected, noise = apart.outputs(), torch.randn(2048, 2048, device="cuda", dtype=B)
    apart(expected, destroy=False)
    torch.cuda.synchronize()
    assert all(t.isfinite().all() for outputs in expected for t in outputs)
    streams, written = [torch.cuda.Stream() for _ in range(STREAMS)], [pair.outputs() for _ in range(STREAMS)]
    pair(written[0], destroy=False)
    assert all(torch.equal(a, b) for mine, other in zip(written[0], expected) for a, b in zip(mine, other))
    graphs: list[Any] = []
    for outputs in written:
        graphs.append(torch.cuda.CUDAGraph())
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[-1]):
            pair(outputs)
    for number in range(ROUNDS):
        for outputs in written:
            for tensors in outputs:
                for t in tensors:
                    t.fill_(NAN)
        torch.cuda.synchronize()
        noise @ noise
        for stream, outputs, graph in zip(streams, written, graphs):
            with torch.cuda.stream(stream):
                if number % 2:
                    graph.replay()
                else:
                    pair(outputs)
        torch.cuda.synchronize()
        for outputs in written:
            assert all(map(torch.equal, last(outputs), last(expected))), f"other bits in round {number}"


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_a_thousand_times(name: str) -> None:
    """Back to back, each pair behind the other's end, into the same poisoned results."""
    pair, apart = chains(name, on_cuda, "cuda")
    expected, outputs = apart.outputs(), [pair.outputs() for _ in range(10)]
    apart(expected)
    for _ in range(1000 // (LAYERS * 10) + 1):
        for each in outputs:
            pair(each)
        torch.cuda.synchronize()
        for each in outputs:
            assert all(map(torch.equal, last(each), last(expected)))
            for t in last(each):
                t.fill_(NAN)
