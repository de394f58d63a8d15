"""Random numbers end to end: distributions, reproducibility, one mask for forward, backward and recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxfuser import observe
from fxfuser.ops.random import SEEDS
from fxfuser.segmenter.segment import SegmentKind

N = 1 << 14


def compiled(function: Callable[..., Any], executor: str = "auto", **options: Any) -> Callable[..., Any]:
    """Each call compiles anew."""
    return torch.compile(lambda *a: function(*a), backend="fxfuser", fullgraph=True,
                         options={"executor": executor, **options})


def seeded(function: Callable[..., Any], *inputs: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return function(*inputs)


def targets(trace: observe.GraphTrace) -> list[Any]:
    return [n.target for s in trace.segmentation.segments for n in s.nodes]


# ---------------------------------------------------------------- distributions


def distance(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov and Smirnov's: the largest difference between the sample's distribution and the true one."""
    points = sample.double().flatten().sort()[0]
    steps = torch.arange(points.numel() + 1, dtype=torch.float64) / points.numel()
    true = cdf(points)
    return float(torch.maximum((steps[1:] - true).abs(), (true - steps[:-1]).abs()).max())


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return 0.5 * (1 + torch.erf((x - mean) / (std * math.sqrt(2))))


CONTINUOUS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "rand": (lambda: torch.rand(N), lambda x: x),
    "rand_double": (lambda: torch.rand(N, dtype=torch.float64), lambda x: x),
    "uniform": (lambda: torch.empty(N // 4, 4).uniform_(-1, 3), lambda x: (x + 1) / 4),
    "randn": (lambda: torch.randn(N), normal),
    "randn_double": (lambda: torch.randn(N, dtype=torch.float64), normal),
    "normal": (lambda: torch.normal(torch.full((N,), 2.0), 3.0), lambda x: normal(x, 2, 3)),
    "normal_": (lambda: torch.empty(N).normal_(2, 3), lambda x: normal(x, 2, 3)),
    "log_normal": (lambda: torch.empty(N).log_normal_(0, 0.5), lambda x: normal(x.log(), 0, 0.5)),
    "exponential": (lambda: torch.empty(N).exponential_(2), lambda x: 1 - torch.exp(-2 * x)),
    "cauchy": (lambda: torch.empty(N).cauchy_(1, 2), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(name: str) -> None:
    draw, cdf = CONTINUOUS[name]
    sample = seeded(compiled(draw))
    assert sample.dtype == draw().dtype
    assert distance(sample, cdf) < 1.63 / math.sqrt(N)  # exceeded by one sample in a hundred; this one is fixed


DISCRETE: dict[str, tuple[Callable[[], Tensor], dict[float, float]]] = {
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), {0: 0.7, 1: 0.3}),
    "bernoulli_": (lambda: torch.empty(N, dtype=torch.bool).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_sure": (lambda: torch.bernoulli(torch.ones(N)), {1: 1.0}),
    "bernoulli_never": (lambda: torch.bernoulli(torch.zeros(N, dtype=torch.bfloat16)), {0: 1.0}),
    "randint": (lambda: torch.randint(-1, 3, (N,)), dict.fromkeys(range(-1, 3), 0.25)),
    "randint_like": (lambda: torch.randint_like(torch.zeros(N, dtype=torch.uint8), 4), dict.fromkeys(range(4), 0.25)),
    "geometric": (lambda: torch.empty(N).geometric_(0.5).clamp_max(4), {1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125}),
}


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distributions(name: str) -> None:
    draw, frequencies = DISCRETE[name]
    sample = seeded(compiled(draw))
    assert sample.dtype == draw().dtype
    assert set(sample.tolist()) == set(frequencies)
    for value, expected in frequencies.items():
        sigma = math.sqrt(expected * (1 - expected) / N)
        assert abs((sample == value).double().mean() - expected) <= 3.3 * sigma


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype) -> None:
    uniform, normals = seeded(compiled(lambda: (torch.rand(N, dtype=dtype), torch.randn(N, dtype=dtype))))
    assert uniform.dtype == normals.dtype == dtype and uniform.max() < 1 and uniform.min() >= 0
    assert abs(uniform.double().mean() - 0.5) < 0.01 and abs(normals.double().std() - 1) < 0.03


def test_integers_more_than_half_of_all_apart() -> None:
    low, high = -(2**62) - 5, 2**62 + 2**61
    made = seeded(compiled(lambda: torch.randint(low, high, (N,))))
    assert low <= made.min() < low + 2**55 and high - 2**55 < made.max() < high


def test_every_integer_is_drawn_from() -> None:
    made = seeded(compiled(lambda: torch.randint(-(2**63), 2**63 - 1, (N,))))
    ones = torch.stack([(made >> i & 1).double().mean() for i in range(64)])
    assert (ones - 0.5).abs().max() < 4 * 0.5 / math.sqrt(N)


def test_neighbours_and_draws_are_independent() -> None:
    a, b = seeded(compiled(lambda: (torch.randn(N), torch.randn(N))))
    for left, right in ((a, b), (a[1:], a[:-1]), (a[2:], a[:-2]), (a[4:], a[:-4])):
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 3.3 / math.sqrt(N)


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_scale(p: float) -> None:
    y = seeded(compiled(lambda x: F.dropout(x, p)), torch.ones(N))
    assert abs((y != 0).double().mean() - (1 - p)) < 3.3 * math.sqrt(p * (1 - p) / N)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


@pytest.mark.parametrize("function", [
    lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 1.0), lambda x: F.dropout(x, 0.5, training=False),
    lambda x: torch.native_dropout(x, 0.0, True), lambda x: torch.native_dropout(x, 1.0, True),
    lambda x: torch.native_dropout(x, 0.5, False), lambda x: F.dropout(x[:0], 0.5),
])
def test_edges_are_eagers(function: Callable[..., Any]) -> None:
    x = torch.tensor([1.0, -2.0, 0.0, math.nan, math.inf])
    torch.testing.assert_close(compiled(function)(x), function(x), equal_nan=True)


@pytest.mark.parametrize("function", [lambda x: F.dropout(x, 0.5), lambda x: torch.native_dropout(x, 0.5, True)[0]])
def test_what_is_dropped_is_multiplied_by_zero(function: Callable[..., Any]) -> None:
    assert compiled(function)(torch.full((64,), math.inf)).isnan().any()


@pytest.mark.parametrize("function", [
    lambda x: F.alpha_dropout(x, 0.3, True), lambda x: F.feature_alpha_dropout(x, 0.3, True),
    lambda x: F.dropout1d(x, 0.3), lambda x: F.rrelu(x, 0.1, 0.3, True), lambda x: F.gumbel_softmax(x, hard=True),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
])
def test_functions_that_draw(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 8, 16, requires_grad=True)
    made = compiled(function)
    y = seeded(made, x)
    assert torch.equal(y, seeded(made, x)) and y.shape == function(x).shape
    y.sum().backward()


def test_channels_are_dropped_as_a_whole() -> None:
    y = seeded(compiled(lambda x: F.dropout2d(x, 0.5)), torch.ones(8, 8, 3, 3))
    kept = (y != 0).flatten(2)
    assert torch.equal(kept.all(-1), kept.any(-1)) and 0.2 < kept.float().mean() < 0.8


# ---------------------------------------------------------------- reproducibility


def noisy(x: Tensor) -> tuple[Tensor, ...]:
    return F.dropout(x, 0.3) + torch.rand_like(x), torch.randint(9, (5,)), torch.bernoulli(x.sigmoid())


def test_manual_seed_reproduces() -> None:
    x = torch.randn(9, 33)
    function = compiled(noisy)
    first, second, again = seeded(function, x), function(x), seeded(function, x)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], seeded(function, x, seed=2)[0])


def test_executors_draw_equal_bits() -> None:
    x = torch.randn(9, 33)
    reference, interpreted = (seeded(compiled(noisy, e), x) for e in ("reference", "interpret"))
    torch.testing.assert_close(reference[1:], interpreted[1:], rtol=0, atol=0)
    torch.testing.assert_close(reference[0], interpreted[0], rtol=1e-6, atol=1e-6)


def test_a_restored_generator_repeats() -> None:
    x, function = torch.randn(40), compiled(noisy)
    state = torch.get_rng_state()
    first = function(x)
    with torch.random.fork_rng():
        function(x)
    torch.set_rng_state(state)
    torch.testing.assert_close(function(x), first, rtol=0, atol=0)


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_sizes_that_change(executor: str) -> None:
    function = torch.compile(lambda x: (torch.native_dropout(x, 0.5, True)[1], torch.rand(x.shape[0], 3)),
                             backend="fxfuser", dynamic=True, options={"executor": executor})
    for rows in (5, 12, 33):
        mask, noise = seeded(function, torch.ones(rows, 7))
        assert mask.shape == (rows, 7) and mask.any() and not mask.all()
        assert noise.shape == (rows, 3) and noise.unique().numel() == 3 * rows


def test_a_permuted_input_keeps_its_strides() -> None:
    x = torch.randn(6, 5, 4).permute(2, 0, 1)
    y = compiled(lambda x: torch.rand_like(x))(x)
    assert y.stride() == torch.rand_like(x).stride()


# ---------------------------------------------------------------- forward, backward and recomputation


def dropped(x: Tensor) -> Tensor:
    return F.dropout(torch.sin(x), 0.5) * 3


@pytest.mark.parametrize("executor", ["reference", "interpret"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_share_the_mask(executor: str, dynamic: bool) -> None:
    x = torch.randn(16, 24, requires_grad=True)
    y = torch.compile(dropped, backend="fxfuser", dynamic=dynamic, options={"executor": executor})(x)
    y.sum().backward()
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(x.grad, torch.where(kept, 6 * x.cos(), 0.0).detach())


def test_no_mask_is_saved() -> None:
    def layers(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = F.dropout(F.gelu(x @ w), 0.1)
        return x

    def saved(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            function(*inputs)
        return kept

    x, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    kept = saved(compiled(layers), x, w)
    assert not [t for t in kept if t.dtype == torch.bool]
    assert [t.shape for t in kept if t.dtype == torch.int64] == [(3,)], "the seeds of three dropouts in one tensor"
    without = saved(compiled(lambda x, w: F.gelu(F.gelu(F.gelu(x @ w) @ w) @ w)), x, w)
    assert sum(t.nbytes for t in kept) <= sum(t.nbytes for t in without) + 24 + 2 * x.nbytes


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_checkpointed_regions_inside_recompute_the_mask(executor: str) -> None:
    weight = torch.randn(12, 12, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(torch.tanh(x @ weight), 0.5), x, use_reentrant=False) * 2

    x = torch.randn(10, 12, requires_grad=True)
    with observe.recording() as recording:
        y = compiled(function, executor)(x)
        y.sum().backward()
    drawing = [t.name for t in recording.graphs if t.segmentation is not None and SEEDS in targets(t)]
    assert len(drawing) == 1 and "forward" in drawing[0], "the backward draws nothing"
    slope = torch.where(y != 0, 4 * (1 - torch.tanh(x @ weight) ** 2), 0.0)
    torch.testing.assert_close(x.grad, (slope @ weight.t()).detach())


def taken(x: Tensor, positions: Tensor) -> Tensor:
    return (x[positions] * 2).sin()


@pytest.mark.keeps_segments
def test_checkpointed_regions_draw_the_same_by_rejection_and_by_sorting() -> None:
    """What no seed gives is wrapped by the cut, and the wrapper is an op without a schema: it runs, and is not kept."""
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.randperm(x.shape[0])
        return taken(x, positions), positions

    x = torch.randn(9, 4, requires_grad=True)
    y, positions = compiled(lambda x: checkpoint(function, x, use_reentrant=False), "interpret")(x)
    y.sum().backward()
    want, = torch.autograd.grad(taken(x, positions).sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_checkpointed_attention_without_dropout_is_a_plain_call(dynamic: bool) -> None:
    """The cut takes any attention for one that draws, and saves a generator's state for it."""
    def attended(q: Tensor) -> Tensor:
        return torch.tanh(F.scaled_dot_product_attention(q, q + 1, q, is_causal=True))

    def function(q: Tensor) -> Tensor:
        return checkpoint(lambda q: attended(attended(q)), q.sin(), use_reentrant=False) * 2

    q = torch.randn(2, 3, 9, 8, requires_grad=True)
    run = torch.compile(function, backend="fxfuser", dynamic=dynamic, options={"executor": "interpret"})
    with observe.recording() as recording:
        y = run(q)
        y.square().sum().backward()
    want = function(q)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(q.grad, torch.autograd.grad(want.square().sum(), q)[0])
    forward, backward = (t for t in recording.graphs if t.segmentation is not None)
    for graph in (forward, backward):
        assert targets(graph).count(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default) == 2
        assert not [t for t in targets(graph) if isinstance(t, torch._ops.HigherOrderOperator)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_restore_the_generator(reentrant: bool) -> None:
    x = torch.randn(16, 24, requires_grad=True)
    function = torch.compile(dropped, backend="fxfuser")
    y = torch._dynamo.disable(lambda x: checkpoint(function, x, use_reentrant=reentrant))(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(y != 0, 6 * x.cos(), 0.0).detach())


def test_numbers_drawn_in_the_backward() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * torch.rand_like(grad)

    x = torch.randn(50, requires_grad=True)
    compiled(lambda x: F.dropout(Noise.apply(x), 0.5))(x).sum().backward()
    kept = x.grad[x.grad != 0]
    assert kept.unique().numel() == kept.numel() > 10


def test_retained_graphs_repeat_the_mask() -> None:
    x = torch.randn(30, requires_grad=True)
    y = compiled(dropped)(x).sum()
    first, = torch.autograd.grad(y, x, retain_graph=True)
    second, = torch.autograd.grad(y, x)
    assert torch.equal(first, second)


def test_all_draws_of_a_graph_are_one_call() -> None:
    with observe.recording() as recording:
        compiled(noisy)(torch.randn(9, 33))
    trace = next(t for t in recording.graphs if t.segmentation is not None)
    externs = [s for s in trace.segmentation.segments if s.kind is SegmentKind.EXTERN]
    assert [(s.nodes[0].target, s.reason) for s in externs] == [(SEEDS, "draws the seeds of a graph's random numbers")]
