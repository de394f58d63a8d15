"""Two launches as one grid: what each program is told, and values where programs and sizes are odd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxfuser.lowering.gemm.one_grid import one_grid
from fxfuser.lowering.kernel import Place, Program
from fxfuser.runtime.launcher import grid_function

from .harness import Blocks, check, made, run

Tensor = torch.Tensor
B = torch.bfloat16
SHAPES = ((5, 528), (528, 48))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def cast(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).float()


def softmax(x: Tensor, w: Tensor) -> Tensor:
    e = torch.exp((f := (x @ w).float() / 20) - f.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def programs(fn: Callable[..., Any] = cast, **arguments: Any) -> tuple[Program, Program]:
    found = made(fn, tensors(*SHAPES), **arguments).programs
    return found["parts"], found["one_grid"]


def test_one_launch_does_what_two_did() -> None:
    """A tensor that both read is named once; parts stay in scratch memory; one counter, which is kept, is added."""
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).float() * w[0].float()

    two, one = programs(scaled)
    (launch,) = one.launches
    assert launch.pointers == ((Place.INPUT, 0), (Place.INPUT, 1), (Place.SCRATCH, 0), (Place.OUTPUT, 0),
                               (Place.SCRATCH, 1))
    assert one.scratch[:-1] == two.scratch and one.scratch[-1].kept and one.scratch[-1].size == "1"
    assert launch.kernel.inputs == (B, B) and launch.kernel.outputs == (torch.float32, torch.float32, torch.int32)


def test_as_many_programs_as_both_had() -> None:
    two, one = programs(softmax)
    blocks = dict(one.launches[0].kernel.tile.blocks)
    first, second = (launch.kernel for launch in two.launches)
    behind = replace(second.tile, blocks=tuple((name, blocks[f"REST_{name}"]) for name, _ in second.tile.blocks))
    counts = [grid_function(k, 1)(*[3] * k.sizes)[0] for k in (first, replace(second, tile=behind))]
    assert grid_function(one.launches[0].kernel, 1)()[0] == sum(counts) > counts[0] > 0


def test_every_tile_of_the_first_has_one_of_the_second_beside_it() -> None:
    two, one = programs(blocks=None)
    tiles = [(k.tile, *k.candidates) for k in (p.launches[0].kernel for p in (two, one))]
    assert [t.num_warps for t in tiles[0]] == [t.num_warps for t in tiles[1]] and len(tiles[0]) > 1
    for plain, joint in zip(*tiles):
        blocks = dict(joint.blocks)
        assert joint.blocks[:len(plain.blocks)] == plain.blocks
        assert 1 <= blocks["REST_TOGETHER"] <= blocks["SPLITS"]


def test_the_number_of_parts_is_known_to_the_text() -> None:
    """No argument tells it, as one does the second of two kernels."""
    two, one = programs()
    assert two.launches[1].sizes == ("SPLITS",) and one.launches[0].sizes == ()


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
@pytest.mark.parametrize("fn", [cast, softmax])
def test_any_number_of_parts(fn: Callable[..., Any], splits: int) -> None:
    check(fn, tensors(*SHAPES), policies=("one_grid",), blocks=Blocks(splits=splits, depth=64))


@pytest.mark.parametrize("fn", [cast, softmax])
def test_symbolic_sizes(fn: Callable[..., Any]) -> None:
    """The sizes of both kernels, each passed once."""
    others = [tensors((m, 528), (528, 48)) for m in (2, 17)]
    found = check(fn, tensors(*SHAPES), [{0}, set()], others, policies=("one_grid",))
    (launch,) = found.programs["one_grid"].launches
    assert len(launch.sizes) == len(set(launch.sizes)) == launch.kernel.sizes > 0


def test_the_same_sums_as_two_kernels() -> None:
    """Bit for bit, where both have the same tile."""
    args = tensors(*SHAPES)
    of = made(cast, args)
    (two,), (one,) = (run(of, of.programs[name], args) for name in ("parts", "one_grid"))
    assert torch.equal(one, two)


def test_names_do_not_matter() -> None:
    def other(query: Tensor, matrix: Tensor) -> Tensor:
        return (query @ matrix).float()

    names = [programs(fn)[1].launches[0].kernel.name for fn in (cast, other)]
    assert names[0] == names[1]


def test_a_kernel_that_counts_its_programs_stands_behind_none() -> None:
    two, _ = programs()
    first, second = two.launches
    counting = replace(second.kernel, source=second.kernel.source.replace("tl.program_id(0)", "tl.num_programs(0)"))
    with pytest.raises(AssertionError, match="counts its programs"):
        one_grid(replace(two, launches=(first, replace(second, kernel=counting))))
