"""What walks over a group have in common, and that they may leave out what follows from it."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F

from fxfuser.domain.index import Axis, Form, Splits
from fxfuser.domain.pattern import Pattern
from fxfuser.domain.resolve import settled_walk
from fxfuser.domain.space import Space
from fxfuser.domain.views import reshape
from fxfuser.domain.walk import Ref, Rejected, Walk
from tests.domain.groups import Traced, trace
from tests.domain.test_rotary import CASES as ROTARY

Functions = dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]


def pattern(fn: Callable[..., Any], *args: torch.Tensor) -> Pattern:
    traced = trace(fn, args)
    return Pattern(traced.nodes, traced.outputs)


def readers(fn: Callable[..., Any], *args: torch.Tensor) -> list[tuple[str, str]]:
    """The nodes that one node alone reads, and which, by their ops."""
    found = pattern(fn, *args).reader
    return [(str(a.target).split(".")[1], str(b.target).split(".")[1]) for a, b in found.items()]


def test_a_chain_is_needed_where_its_end_is() -> None:
    x = torch.ones(4, 6)
    assert sorted(readers(lambda x: (x.sin() * x.cos()).neg(), x)) == [("cos", "mul"), ("mul", "neg"), ("sin", "mul")]
    assert readers(lambda x: (lambda y: y * y)(x.sin()), x) == [("sin", "mul")]
    assert readers(lambda x: x.sum(1, keepdim=True).exp().neg(), x) == [("sum", "exp"), ("exp", "neg")]


@pytest.mark.parametrize("fn", [
    lambda x, row: (lambda y: (y, y.cos()))(x.sin()),  # stored as well
    lambda x, row: (lambda y: y.exp() + y.cos().sum())(x.sin()).exp2(),  # read by two
    lambda x, row: row.sin() * x,  # at fewer places
    lambda x, row: x.sin().t().cos(),  # through a view
    lambda x, row: x.sin().sum(0),  # by no pointwise node
])
def test_what_else_is_not(fn: Callable[..., Any]) -> None:
    assert "sin" not in [made for made, _ in readers(fn, torch.ones(4, 6), torch.ones(6))]


def test_paths_end_at_nodes_and_at_inputs() -> None:
    found = pattern(lambda x, y: x.sin().view(3, 8).t() * y.chunk(2)[1], torch.ones(4, 6), torch.ones(16, 3))
    sin, mul = found.nodes
    left, right = (found.path(operand) for operand, _ in found.operands[mul])
    assert left.node is sin and len(left.views) == 2
    assert right.node.op == "placeholder" and len(right.views) == 1
    assert found.path(sin).views == ()


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


OTHERS: Functions = {
    "softmax": (softmax, [torch.randn(6, 30)]),
    "layer norm": (lambda x, w: F.layer_norm(x.sin() + 1, (8,), w) * 2, [torch.randn(3, 4, 8), torch.randn(8)]),
    "views": (lambda x: (x.view(6, 4, 5) * 2 + 1).transpose(0, 1).reshape(4, 30).exp() - 1, [torch.randn(12, 10)]),
    "cat": (lambda x, y: torch.cat([x.sin() * 2, y.exp()], 1).cos() + 1, [torch.randn(4, 6), torch.randn(4, 3)]),
    "gather": (lambda x, i: x.sin()[(i * 1 + 0)].cos() + 1, [torch.randn(9, 4), torch.tensor([1, 5, 8])]),
}


@pytest.mark.parametrize("name", [*OTHERS, *ROTARY])
def test_walks_note_what_they_would_without_it(name: str) -> None:
    """Every walk of a group, from the first to the one after which nothing changes."""
    fn, args = OTHERS[name] if name in OTHERS else (ROTARY[name][0], ROTARY[name][1](2, 12))
    traced = trace(fn, args)
    short, long = Pattern(traced.nodes, traced.outputs), followed_throughout(traced)
    assert short.reader and not long.reader
    first, second = Space(), Space()
    assert noted(Walk(short, first)) == noted(Walk(long, second))
    assert noted(settled_walk(short, first)) == noted(settled_walk(long, second))


def followed_throughout(traced: Traced) -> Pattern:
    """The group's pattern, of which each operand is followed."""
    found = Pattern(traced.nodes, traced.outputs)
    found.reader, found.followed = {}, dict(found.operands)
    return found


def noted(walk: Walk) -> tuple[Any, ...]:
    """All that becomes of a walk."""
    demands = {node: [(key, [(o.node, o.index, o.output) if isinstance(o, Ref) else o.value
                             for o in walk.demand(node, key).operands]) for key in keys]
               for node, keys in walk.demands.items()}
    return demands, walk.loads, walk.splits, set(walk.indices), walk.root_indices


def test_what_is_needed_at_too_many_places_is_refused_either_way() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        for k in range(13):
            x = (x[:-(1 << k)].sin() + x[1 << k:]).cos().exp()
        return x

    traced = trace(shifted, [torch.randn(1 << 14)])
    for found in (Pattern(traced.nodes, traced.outputs), followed_throughout(traced)):
        with pytest.raises(Rejected, match="too many places"):
            settled_walk(found, Space())


def test_axes_of_one_name_and_other_sizes_are_not_confused() -> None:
    """What a view makes of an index is remembered, and axes are equal by name."""
    def viewed(size: int, reduced: bool = False) -> tuple[Any, Splits]:
        splits: Splits = {}
        axis = Axis("a", size, reduced)
        found = reshape((Form.axis(axis),), (size,), (size // 4, 4), splits)
        assert all(a.reduced is reduced for a in found[0].axes)
        return repr(found), splits

    assert viewed(24) == viewed(24)  # asked again, the splits are wanted again
    assert viewed(24)[1] == {Axis("a", 24): [4]}
    assert [a.size for a in viewed(48)[1]] == [48] and [a.size for a in viewed(24)[1]] == [24]
    viewed(24, reduced=True)
    part, whole = (reshape((Form.axis(Axis("a", size)),), (24,), (6, 4), {}) for size in (4, 24))
    assert repr(part) == "(0, a)" and repr(whole) != repr(part)
