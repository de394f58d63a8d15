"""Random numbers follow from a seed and an index, so that a seed is saved and not a mask.

    c, m = aten.native_dropout(a, 0.1, True)   ->    s = aten.randint(-2**63, 2**63 - 1, [1])         # once per graph
                                                     u = fxfuser.random_uniform(s[0], index of each element)
                                                     m = aten.ge(u, 0.1);  c = aten.mul(aten.mul(a, m), 1 / 0.9)

One ATen call per graph and device draws the seeds of all its random ops; it takes them from the device's generator, so
`torch.manual_seed` reproduces, a restored generator state repeats, and a CUDA graph registers the generator as for any
random op.  The seeds are always saved for the backward, and what follows from them alone is always computed again: the
forward, the backward and a checkpointed region see equal numbers.  Distributions are eager's, bits are not.

Left alone: ops that name a generator, are drawn by rejection (poisson, binomial), sort (randperm) or take samples
(multinomial), complex numbers.  Runs before the cut between forward and backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser.ops import SUPPORTED
from fxfuser.ops.random import BITS, NORMAL, SEEDS, UNIFORM
from fxfuser.passes.funnel import Scope
from fxfuser.passes.inline import splice, trace_body
from fxfuser.passes.rebuild import call
from fxfuser.passes.sizes import size_inputs

aten = torch.ops.aten

INT64 = torch.iinfo(torch.int64)
# below this every integer is a value of the dtype: what random_ without bounds draws from
EXACT = {torch.float64: 2**53 + 1, torch.float32: 2**24 + 1, torch.float16: 2**11 + 1, torch.bfloat16: 2**8 + 1,
         torch.bool: 2}


@dataclass(frozen=True)
class Draw:
    """A number for each element of a tensor of this shape and dtype, from one seed."""

    seed: torch.Tensor
    shape: Sequence[Any]
    dtype: torch.dtype

    def _index(self, step: int = 1, start: int = 0) -> torch.Tensor:
        count: Any = 1
        for size in self.shape:
            count = count * size
        index = torch.arange(count, dtype=torch.int64, device=self.seed.device)
        index = index if step == 1 else index * step + start
        return index.view(self.shape)

    def uniform(self, dtype: torch.dtype) -> torch.Tensor:
        """In [0, 1), float64 or float32 whatever the dtype."""
        if dtype is torch.float64:
            return (self.bits() & (2**53 - 1)).to(dtype) * 2.0**-53
        made: torch.Tensor = UNIFORM(self.seed, self._index())
        return made

    def normal(self) -> torch.Tensor:
        """Of mean 0 and variance 1; float32 for narrower dtypes."""
        if self.dtype is not torch.float64:
            made: torch.Tensor = NORMAL(self.seed, self._index())
            return made
        first, second = (BITS(self.seed, self._index(2, i)) & (2**53 - 1) for i in (0, 1))
        radius = torch.sqrt(torch.log(first.to(self.dtype) * 2.0**-53 + 2.0**-54) * -2.0)
        return radius * torch.cos(second.to(self.dtype) * (2 * math.pi / 2**53))

    def bits(self) -> torch.Tensor:
        """int64."""
        made: torch.Tensor = BITS(self.seed, self._index())
        return made

    def exponential(self) -> torch.Tensor:
        """Of rate 1, never 0."""
        smallest = 2.0**-54 if self.dtype is torch.float64 else 2.0**-25
        return torch.clamp_min(-torch.log(1.0 - self.uniform(self.dtype)), smallest)


def _dropout(draw: Draw, x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiplies as eager does: nan and infinity stay nan where they are dropped."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = draw.uniform(torch.float32) >= p
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    return (draw.uniform(x.dtype) < x).to(x.dtype)


def _bernoulli_p(draw: Draw, x: torch.Tensor, p: Any = 0.5) -> torch.Tensor:
    wide = p.dtype if isinstance(p, torch.Tensor) else torch.float32
    hit: torch.Tensor = draw.uniform(wide) < p
    return hit.to(x.dtype)


def _between(draw: Draw, low: float, high: float) -> torch.Tensor:
    """Uniform in [low, high); what rounds up to `high` is `low`."""
    dtype = draw.dtype
    value = (draw.uniform(dtype) * (high - low) + low).to(dtype)
    return torch.where(value == high, low, value).to(dtype)


def _rand(draw: Draw) -> torch.Tensor:
    exact = draw.dtype in (torch.float32, torch.float64)
    return draw.uniform(draw.dtype) if exact else _between(draw, 0.0, 1.0)


def _uniform(draw: Draw, x: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return _between(draw, low, high)


def _randn(draw: Draw) -> torch.Tensor:
    return draw.normal().to(draw.dtype)


def _normal(draw: Draw, mean: Any = 0.0, std: Any = 1.0) -> torch.Tensor:
    value: torch.Tensor = draw.normal() * std + mean
    return value.to(draw.dtype)


def _normal_like(draw: Draw, x: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return _normal(draw, mean, std)


def _log_normal(draw: Draw, x: torch.Tensor, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    return torch.exp(draw.normal() * std + mean).to(x.dtype)


def _exponential(draw: Draw, x: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
    return (draw.exponential() / rate).to(x.dtype)


def _geometric(draw: Draw, x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.ceil(draw.exponential() / -math.log1p(-p)).to(x.dtype)


def _cauchy(draw: Draw, x: torch.Tensor, median: float = 0.0, sigma: float = 1.0) -> torch.Tensor:
    return (torch.tan((draw.uniform(x.dtype) - 0.5) * math.pi) * sigma + median).to(x.dtype)


def _integers(draw: Draw, low: Any, high: Any) -> torch.Tensor:
    """In [low, high); the remainder's bias is below one part in 2**31 for bounds less than 2**32 apart."""
    value = draw.bits()
    if not (isinstance(low, int) and isinstance(high, int) and high - low > INT64.max):
        value = torch.remainder(value & INT64.max, high - low) + low
    elif low > INT64.min or high <= INT64.max:  # what lies outside falls on the first numbers inside
        value = torch.where((value < low) | (value >= high), value - high + low, value)
    return value.to(draw.dtype)


def _randint(draw: Draw, high: Any) -> torch.Tensor:
    return _integers(draw, 0, high)


def _randint_like(draw: Draw, x: torch.Tensor, high: Any) -> torch.Tensor:
    return _integers(draw, 0, high)


def _randint_like_low(draw: Draw, x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    return _integers(draw, low, high)


def _random(draw: Draw, x: torch.Tensor) -> torch.Tensor:
    return _integers(draw, 0, EXACT[x.dtype] if x.dtype in EXACT else torch.iinfo(x.dtype).max + 1)


def _random_to(draw: Draw, x: torch.Tensor, high: int) -> torch.Tensor:
    return _integers(draw, 0, high)


# of each op: what it computes, and how many of its arguments that takes; the others say shape, dtype and device
BODIES: Mapping[OpOverload, tuple[Callable[..., Any], int]] = {
    aten.native_dropout.default: (_dropout, 3),
    aten.bernoulli.default: (_bernoulli, 1),
    aten.bernoulli.p: (_bernoulli_p, 2),
    aten.bernoulli.Tensor: (_bernoulli_p, 2),
    aten.rand.default: (_rand, 0),
    aten.rand_like.default: (_rand, 0),
    aten.randn.default: (_randn, 0),
    aten.randn_like.default: (_randn, 0),
    aten.uniform.default: (_uniform, 3),
    aten.normal_functional.default: (_normal_like, 3),
    aten.normal.Tensor_float: (_normal, 2),
    aten.normal.float_Tensor: (_normal, 2),
    aten.normal.Tensor_Tensor: (_normal, 2),
    aten.normal.float_float: (_normal, 2),
    aten.log_normal.default: (_log_normal, 3),
    aten.exponential.default: (_exponential, 2),
    aten.geometric.default: (_geometric, 2),
    aten.cauchy.default: (_cauchy, 3),
    aten.randint.default: (_randint, 1),
    aten.randint.low: (_integers, 2),
    aten.randint_like.default: (_randint_like, 2),
    aten.randint_like.low_dtype: (_randint_like_low, 3),
    aten.random.default: (_random, 1),
    aten.random.to: (_random_to, 2),
}


@dataclass(frozen=True, eq=False)
class Rewrite:
    """A random op and what it becomes; the body's first placeholder is the seed."""

    node: fx.Node
    body: fx.Graph


def seed_random_ops(graph: fx.Graph, scope: Scope) -> int:
    groups: dict[tuple[torch.device, bool], list[Rewrite]] = {}
    for node in list(graph.nodes):
        if node.target not in BODIES or not _eligible(node):
            continue
        if scope.fuel.left == 0:
            break
        body = _trace(node, scope)
        if body is None:
            continue
        scope.fuel.take()
        groups.setdefault(_group(node), []).append(Rewrite(node, body))
    for (device, backward), rewrites in groups.items():
        _seed(graph, scope, device, rewrites, backward)
    return sum(map(len, groups.values()))


def _first(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value  # type: ignore[no-any-return]


def _eligible(node: fx.Node) -> bool:
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    made = _first(node)
    plain = all(t.layout is torch.strided and t.dtype in SUPPORTED and t.device == made.device
                for t in (*tensors, made))
    return plain and made.device.type in ("cpu", "cuda") and node.kwargs.get("generator") is None


def _group(node: fx.Node) -> tuple[torch.device, bool]:
    """Ops that share one draw: those of one device, on one side of the cut."""
    return _first(node).device, node.meta.get("partitioner_tag") == "is_backward"


def _trace(node: fx.Node, scope: Scope) -> fx.Graph | None:
    assert isinstance(node.target, OpOverload)
    function, count = BODIES[node.target]
    inputs, made = node.all_input_nodes, _first(node)
    names = [a.name for a in node.target._schema.arguments]

    def body(seed: torch.Tensor, *values: Any) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(inputs, values)).__getitem__)
        given = dict(zip(names, args)) | kwargs
        draw = Draw(seed, _shape(given), made.dtype)
        return function(draw, *(given[name] for name in names[:count] if name in given))

    with scope.fake():
        seed = torch.empty((), dtype=torch.int64, device=made.device)
    return trace_body(body, [seed, *(n.meta["val"] for n in inputs)], node.meta["val"], scope)


def _shape(given: Mapping[str, Any]) -> Sequence[Any]:
    """The shape of what a random op with these arguments makes, in sizes of the trace."""
    if "size" in given:
        size: Sequence[Any] = given["size"]
        return size
    first, *rest = (v for v in given.values() if isinstance(v, torch.Tensor))
    return torch.broadcast_tensors(first, *rest)[0].shape if rest else first.shape  # type: ignore[no-untyped-call]


def _seed(graph: fx.Graph, scope: Scope, device: torch.device, rewrites: list[Rewrite], backward: bool) -> None:
    """Draws the seeds, as early as the side of the cut allows, and puts the bodies in place."""
    nodes, first = list(graph.nodes), rewrites[0].node
    start = first if backward else next(n for n in nodes if n.op != "placeholder")
    with graph.inserting_before(start):
        seeds = call(graph, scope, SEEDS, INT64.min, INT64.max, [len(rewrites)], like=first, generator=None,
                     dtype=torch.int64, device=device)
    seeds.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    seeds.meta.pop("ac_graph_id", None)
    sizes = size_inputs(graph)
    for i, rewrite in enumerate(rewrites):
        with graph.inserting_before(rewrite.node):
            seed = call(graph, scope, aten.select.int, seeds, 0, i, like=rewrite.node)
        copies = splice(graph, rewrite.node, [seed, *rewrite.node.all_input_nodes], rewrite.body, scope, sizes)
        if not backward:
            _recompute([seed, *copies])


def _recompute(nodes: list[fx.Node]) -> None:
    """Marks a seed and what follows from it and sizes alone: the cut between forward and backward saves none of it."""
    known = {nodes[0]}
    for node in nodes:
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
        if node is nodes[0] or all(n in known for n in tensors):
            known.add(node)
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
