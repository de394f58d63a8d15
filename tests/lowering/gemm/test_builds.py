"""Products built for Hopper and Ampere with the tiles that they get: instructions, spills, shared memory, and the
instructions of the protocols by which parts meet."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.lowering.kernel import Kernel
from fxfuser.runtime.build import SHARED_LIMIT, Report, Variant, report

from .harness import made

Tensor = torch.Tensor
B = torch.bfloat16


def plain(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def lse(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w.t()).float()
    m = h.amax(1, keepdim=True)
    return (h - m).exp().sum(1, keepdim=True).log() + m


def summed(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.relu(x @ w.t())
    return h, h.sum(0)


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.t() @ x


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "plain": (plain, [(4096, 1024), (4096, 1024)]),
    "activated": (activated, [(4096, 1024), (4096, 1024), (4096,)]),
    "logsumexp": (lse, [(4096, 1024), (50304, 1024)]),
    "summed": (summed, [(4096, 1024), (4096, 1024)]),
    "split": (weight_gradient, [(12288, 768), (12288, 768)]),
    "bundles": (weight_gradient, [(65536, 256), (65536, 256)]),
}


@cache
def programs(name: str) -> dict[str, Kernel]:
    fn, shapes = FUNCTIONS[name]
    return {policy: p.launches[0].kernel
            for policy, p in made(fn, [torch.empty(s, dtype=B) for s in shapes], blocks=None).programs.items()}


def pointers_only(kernel: Kernel) -> Variant:
    """What a misaligned factor leaves."""
    usual = Variant.usual(kernel)
    return replace(usual, aligned=(False, *usual.aligned[1:]))


def built(kernel: Kernel, arch: int = 90, variant: Variant | None = None, spills: int = 0) -> Report:
    """The build of a kernel that takes no more than there is, and spills at most so many bytes."""
    found = report(kernel, arch, variant)
    assert found.spills <= spills and found.shared <= SHARED_LIMIT[arch]
    return found


@pytest.mark.parametrize("name, spills", [("plain", 0), ("logsumexp", 0), ("summed", 0), ("activated", 32)])
def test_hopper_moves_tiles_and_multiplies_in_warp_groups(name: str, spills: int) -> None:
    found = built(programs(name)["persistent"], spills=spills)
    assert "wgmma.mma_async" in found.ptx and "cp.async.bulk.tensor" in found.ptx
    stores = re.search(r"cp\.async\.bulk\.tensor\S*\.global\.shared", found.ptx) is not None
    assert stores == (name != "logsumexp"), "tiles are stored by descriptors too"


@pytest.mark.parametrize("name, spills", [("plain", 0), ("logsumexp", 128)])
def test_hopper_by_pointers(name: str, spills: int) -> None:
    kernel = programs(name)["persistent"]
    found = built(kernel, variant=pointers_only(kernel), spills=spills)
    assert "wgmma.mma_async" in found.ptx and "cp.async.bulk" not in found.ptx


def smallest(kernel: Kernel) -> Kernel:
    """The kernel with the candidate that takes least shared memory: Ampere has two thirds of Hopper's."""
    def shared(tile: Any) -> int:
        blocks = dict(tile.blocks)
        return (blocks["MBLOCK"] + blocks["NBLOCK"]) * blocks["KBLOCK"] * tile.num_stages

    return replace(kernel, tile=min((kernel.tile, *kernel.candidates), key=shared))


@pytest.mark.parametrize("name, policy, spills", [
    ("plain", "persistent", 0), ("logsumexp", "persistent", 0), ("split", "last_arriver", 16)])
def test_ampere(name: str, policy: str, spills: int) -> None:
    found = built(smallest(programs(name)[policy]), 80, spills=spills)
    assert "mma.sync" in found.ptx and "cp.async" in found.ptx and "cp.async.bulk" not in found.ptx


SEMANTICS = ("acq_rel", "acquire", "release", "relaxed")


def memory_operations(ptx: str) -> list[str]:
    """Barriers, atomics by their semantics, loads and stores that bypass L1, as they stand in the text.

    An atomic that adds nothing may become a load of its semantics.
    """
    found = []
    for line in ptx.splitlines():
        if re.search(r"\bbar(rier)?\.sync", line):
            found.append("barrier")
        elif (atomic := re.search(r"\b(atom|ld)\.global\.[\w.]*gpu[\w.]*", line)) is not None:
            found += [s for s in SEMANTICS if s in atomic[0].split(".")]
        elif (access := re.search(r"\b(ld|st)\.global\S*\.cg\b", line)) is not None:
            found.append({"ld": "load", "st": "store"}[access[1]])
    return [op for i, op in enumerate(found) if i == 0 or op != found[i - 1]]


@pytest.mark.parametrize("policy, atomics, spills", [
    ("last_arriver", ["acq_rel"], 0), ("turnstile", ["acquire", "release", "release"], 128)])
def test_the_protocol_reaches_the_device(policy: str, atomics: list[str], spills: int) -> None:
    """Parts bypass L1.  A barrier stands between their stores and the atomic that publishes them, and another between
    the atomic that finds them and their loads, as the model in protocol.py has it: its result goes to all threads."""
    found = built(programs("split")[policy], spills=spills)
    assert "wgmma.mma_async" in found.ptx
    operations = memory_operations(found.ptx)
    assert [o for o in operations if o in SEMANTICS] == atomics
    store, load, publishes = operations.index("store"), operations.index("load"), atomics[0 if len(atomics) == 1 else 1]
    assert "barrier" in operations[store:operations.index(publishes, store)]
    assert "barrier" in operations[operations.index(atomics[0]):load]


def test_bundles_meet_behind_barriers_too() -> None:
    """Parts, a bundle and the whole: each is published by an atomic behind a barrier, and loads bypass L1."""
    kernel = programs("bundles")["last_arriver"]
    blocks = dict(kernel.tile.blocks)
    assert blocks["JOIN"] < blocks["SPLITS"]
    operations = memory_operations(built(kernel).ptx)
    first, second = (i for i, o in enumerate(operations) if o in SEMANTICS)
    assert operations[first] == operations[second] == "acq_rel"
    for publishes, before in ((first, operations[:first]), (second, operations[first + 1:second])):
        assert before[-1] == "barrier" and "store" in before and "load" in operations[publishes:]
    assert "load" in operations[first:second]


def decode(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).to(B)


@pytest.mark.parametrize("rows", [1, 16])
def test_decoding_reads_wide_and_spills_nothing(rows: int) -> None:
    """The copy engine feeds the tensor cores, or each thread loads 16 bytes; parts are read by 16 bytes."""
    shapes = [(rows, 4096), (4096, 4096), (rows, 4096)]
    program = made(decode, [torch.empty(s, dtype=B) for s in shapes], blocks=None).programs["parts"]
    first, second = (built(launch.kernel) for launch in program.launches)
    loads = [re.findall(r"ld\.global\S*", r.ptx) for r in (first, second)]
    assert loads[1] and all(".v4" in load for load in loads[1])
    if rows == 1:
        assert loads[0] and all(".v4" in load for load in loads[0])
    else:
        assert "cp.async.bulk.tensor" in first.ptx and "mma.sync" in first.ptx and not loads[0]
