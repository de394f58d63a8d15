"""Random ops become prims of a seed; one draw per graph, device and side of the cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser.passes.random import BODIES, SEEDS, seed_random_ops

from .rewriting import apply, assert_meta, assert_untouched, targets, trace

aten = torch.ops.aten
x = torch.rand(4, 6)


def call(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda x: op(*(x if a is ... else a for a in args), **kwargs)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "native_dropout": call(aten.native_dropout, ..., 0.3, True),
    "native_dropout_evaluating": call(aten.native_dropout, ..., 0.3, False),
    "bernoulli": call(aten.bernoulli, ...),
    "bernoulli_p": call(aten.bernoulli.p, ..., 0.3),
    "bernoulli_tensor": lambda x: aten.bernoulli.Tensor(x, x.mean()),
    "rand": call(aten.rand, [3, 5]),
    "rand_double": call(aten.rand, [3, 5], dtype=torch.float64),
    "rand_half": call(aten.rand, [3, 5], dtype=torch.bfloat16),
    "rand_like": lambda x: aten.rand_like(x.t()),
    "randn": call(aten.randn, [3]),
    "randn_double": call(aten.randn, [3], dtype=torch.float64),
    "randn_like": call(aten.randn_like, ...),
    "uniform": call(aten.uniform, ..., -1.0, 2.0),
    "uniform_one_point": call(aten.uniform, ..., 2.0, 2.0),
    "normal_functional": call(aten.normal_functional, ..., 1.0, 2.0),
    "normal_tensor_float": call(aten.normal.Tensor_float, ..., 2.0),
    "normal_float_tensor": call(aten.normal.float_Tensor, 1.0, ...),
    "normal_tensor_tensor": lambda x: aten.normal.Tensor_Tensor(x[:, :1], x),
    "normal_float_float": call(aten.normal.float_float, 0.5, 2.0, [4]),
    "log_normal": call(aten.log_normal, ...),
    "exponential": call(aten.exponential, ..., 2.0),
    "geometric": call(aten.geometric, ..., 0.3),
    "cauchy": call(aten.cauchy, ...),
    "randint": call(aten.randint, 10, [7]),
    "randint_low": call(aten.randint.low, -3, 10, [7], dtype=torch.int32),
    "randint_everything": call(aten.randint.low, -(2**63), 2**63 - 1, [7]),
    "randint_like": call(aten.randint_like, ..., 10),
    "randint_like_low": call(aten.randint_like.low_dtype, ..., -3, 10),
    "random": lambda x: aten.random(x.int()),
    "random_float": call(aten.random, ...),
    "random_to": call(aten.random.to, ..., 10),
    "empty": call(aten.rand, [3, 0]),
    "without_dimensions": call(aten.randn, []),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_random_op_is_rewritten(name: str, dynamic: bool) -> None:
    module = trace(PROGRAMS[name], [x], dynamic)
    assert apply(module, [seed_random_ops]) == 1  # the funnel checks dtypes, shapes and strides
    assert_meta(module)
    drawn = [n for n in module.graph.nodes if n.op == "call_function" and n.target in BODIES]
    assert not drawn and targets(module).count("randint.low_generator") == 1
    torch.testing.assert_close(module(x), PROGRAMS[name](x), rtol=0, atol=float("inf"), equal_nan=True)


def test_programs_cover_the_bodies() -> None:
    traced = {n.target for f in PROGRAMS.values() for n in trace(f, [x]).graph.nodes}
    assert set(BODIES) <= traced


@pytest.mark.parametrize("function", [
    lambda x: aten.poisson(x), lambda x: aten.multinomial(x, 2), lambda x: aten.randperm(5), lambda x: x.sin(),
    lambda x: aten.randn([3], dtype=torch.complex64),
])
def test_left_alone(function: Callable[..., Any]) -> None:
    assert_untouched(function, [x], [seed_random_ops])


def test_an_op_with_a_generator_of_its_own_is_left_alone() -> None:
    module = trace(lambda x: aten.bernoulli.p(x, 0.5), [x])
    node = next(n for n in module.graph.nodes if n.target is aten.bernoulli.p)
    node.kwargs = {"generator": torch.Generator()}
    assert apply(module, [seed_random_ops]) == 0


def several(x: torch.Tensor) -> torch.Tensor:
    kept, _ = aten.native_dropout(x, 0.5, True)
    return aten.native_dropout(kept.sin(), 0.1, True)[0] + aten.rand_like(x)


def draws(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.target is SEEDS]


def test_one_draw_for_all_ops_of_a_graph() -> None:
    module = trace(several, [x])
    assert apply(module, [seed_random_ops]) == 3
    (seeds,) = draws(module)
    assert seeds.meta["val"].shape == (3,) and seeds.meta["recompute"] is CheckpointPolicy.MUST_SAVE
    assert [user.args[2] for user in seeds.users] == [0, 1, 2]


def test_each_side_of_the_cut_draws_for_itself() -> None:
    module = trace(several, [x])
    drawn = [n for n in module.graph.nodes if n.target in BODIES]
    drawn[-1].meta["partitioner_tag"] = "is_backward"
    apply(module, [seed_random_ops])
    assert [(n.meta["val"].shape[0], n.meta["partitioner_tag"]) for n in draws(module)] == [
        (2, "is_forward"), (1, "is_backward")]


def test_what_follows_from_the_seed_alone_is_marked() -> None:
    module = trace(lambda x: aten.native_dropout(x, 0.5, True)[0], [x])
    apply(module, [seed_random_ops])
    marked = {n.target for n in module.graph.nodes if n.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE}
    assert {torch.ops.fxfuser.random_uniform.default, aten.ge.Scalar, aten.select.int} <= marked
    assert aten.mul.Tensor not in marked


def test_fuel_stops_it() -> None:
    module = trace(several, [x])
    assert apply(module, [seed_random_ops], fuel=2) == 2
    assert draws(module)[0].meta["val"].shape == (2,)
    assert targets(module).count("rand_like.default") == 1
