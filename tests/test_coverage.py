"""Coverage: pointwise, view and simple reduction ops are all in kernels; what is not stands in uncovered.toml.

The list may only shrink.  An op that the table learns to lower must leave it (`test_the_list_names_no_op_that_lowers`),
and nothing may run as an ATen call that it does not name (`test_what_stays_aten_is_listed`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from fxfuser import observe, ops
from fxfuser.capture import decompositions
from fxfuser.coverage import Coverage, is_compute, total
from fxfuser.errors import FallbackWarning
from fxfuser.passes.expand import EXPANSIONS
from fxfuser.passes.random import BODIES
from fxfuser.report import segment_rows
from fxfuser.runtime import lower_segments
from fxfuser.segmenter.facts import LOWERED

UNCOVERED = tomllib.loads((Path(__file__).parent / "uncovered.toml").read_text())["uncovered"]
LISTED = {op: entry for entry in UNCOVERED for op in entry["ops"]}
MOST = 106  # ops in the list, of which four are our own: three products, and memory; lower it with every op that leaves

Program = tuple[Callable[..., object], tuple[Tensor, ...]]


def x(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    made = torch.randn(shape) if dtype.is_floating_point else torch.randint(0, 5, shape)
    return made.to(dtype).requires_grad_(grad)


def record(program: Program) -> observe.Recording:
    """What was recorded of one call, forward and, where the result wants it, backward."""
    fn, inputs = program
    with observe.recording() as recording:
        out = torch.compile(fn, backend="fxfuser")(*inputs)
        results = [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor) and t.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    return recording


def packet(op: str) -> str:
    """aten.mm of aten.mm.default."""
    return op.rpartition(".")[0]


def externs(recording: observe.Recording) -> Iterator[tuple[str, str]]:
    """(op, reason) of each node that is in no kernel."""
    for trace in recording.graphs:
        for row in segment_rows(trace):
            if not row.kernel:
                yield from ((op, row.reason) for _, op, _ in row.nodes)


def listed(op: str, reason: str) -> bool:
    """Whether an overload may stay ATen, by itself, by its packet, or for the dtype that the reason names."""
    dtypes = {dtype for entry in UNCOVERED for dtype in entry["dtypes"]}
    return op in LISTED or packet(op) in LISTED or reason.removeprefix("dtype ") in dtypes


# ---------------------------------------------------------------- whole: everything must be in kernels


def rotate(q: Tensor, angle: Tensor) -> Tensor:
    left, right = q.chunk(2, dim=-1)
    return q * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


def views(a: Tensor) -> Tensor:
    b = a.view(2, 3, 4, 5).permute(2, 0, 3, 1).reshape(8, 15)
    return b.t()[::2].unsqueeze(1).expand(-1, 2, -1).flip(0) + b.diagonal()[:8].sum()


def borders(a: Tensor, b: Tensor) -> Tensor:
    return F.pad(torch.cat((a, b), 1), (1, 2), value=3.0) * torch.stack((a, b)).amax()


def statistics(a: Tensor) -> tuple[Tensor, ...]:
    return a.var(-1), a.std(0), a.mean(), a.amax(-1, keepdim=True), a.prod(0), a.logsumexp(-1), (a > 0).any(1)


def wholes(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a // (b + 1) % 3, a << 2 ^ b, torch.where(a > b, a, -b), (a & b).bool().logical_not(), a.clamp(1, 3)


WHOLE: dict[str, Callable[[], Program]] = {
    "pointwise": lambda: (lambda a, b: torch.tanh(a * b + 1).exp().sigmoid(), (x(4, 6, grad=True), x(6, grad=True))),
    "activations": lambda: (lambda a: F.gelu(a) + F.silu(a) + F.softplus(a) + F.leaky_relu(a) + F.elu(a) + F.mish(a),
                            (x(5, 7, grad=True),)),
    "casts": lambda: (lambda a: (a.half().float() + a.int(), a.bool(), a.double().to(torch.bfloat16)), (x(3, 5),)),
    "integers": lambda: (wholes, (x(4, 5, dtype=torch.int64), x(4, 5, dtype=torch.int64))),
    "half": lambda: (lambda a, b: (a * b).relu() - b, (x(8, 8, dtype=torch.bfloat16, grad=True),
                                                       x(8, 8, dtype=torch.bfloat16))),
    "views": lambda: (views, (x(8, 15, grad=True),)),
    "borders": lambda: (borders, (x(3, 4, grad=True), x(3, 4, grad=True))),
    "rolls": lambda: (lambda a, b: a.roll((1, -1), (0, 1)) * b.roll(2) + torch.cross(a, b, -1),
                      (x(4, 3, grad=True), x(4, 3, grad=True))),
    "copies": lambda: (lambda a: (torch.narrow_copy(a, 1, 1, 3) * 2, torch.unbind_copy(a, 0)[1] + 1,
                                  torch.as_strided_copy(a, (2, 2), (5, 1), 1)), (x(4, 5),)),
    "norms": lambda: (lambda a, b: F.normalize(a) + F.cosine_similarity(a, b).unsqueeze(1) + torch.dist(a, b),
                      (x(4, 5, grad=True), x(4, 5))),
    "products": lambda: (lambda a, b: torch.baddbmm(a, a, b).relu() + torch.einsum("bij,bjk->bik", a, b),
                         (x(2, 4, 4), x(2, 4, 4))),
    "extremes": lambda: (lambda a: (*a.max(1), *a.min(0), a.argmax(-1), a.argmin()), (x(4, 5),)),
    "factories": lambda: (lambda a: a + torch.arange(6) * torch.ones(5, 1) + torch.full((5, 6), 2.0), (x(5, 6),)),
    "masks": lambda: (lambda a: a.masked_fill(torch.ones(6, 6).tril() == 0, -1e9).triu(1), (x(6, 6, grad=True),)),
    "rotary": lambda: (rotate, (x(2, 3, 8, grad=True), x(3, 8))),
    "k1_matmul": lambda: (lambda a, b: (a @ b).cos(), (x(2, 5, 1), x(2, 1, 7))),
    "softmax": lambda: (lambda a: torch.softmax(a * 0.5, -1) + torch.log_softmax(a, 0), (x(5, 9, grad=True),)),
    "layer_norm": lambda: (lambda a, w: F.layer_norm(a, (9,), w), (x(5, 9, grad=True), x(9, grad=True))),
    "rms_norm": lambda: (lambda a, w: F.rms_norm(a, (9,), w), (x(5, 9, grad=True), x(9, grad=True))),
    "group_norm": lambda: (lambda a: F.group_norm(a, 2), (x(3, 4, 5, grad=True),)),
    "batch_norm": lambda: (lambda a, m, v: F.batch_norm(a, m, v) + F.batch_norm(a, m + 0, v + 0, training=True),
                           (x(3, 4, 5, grad=True), x(4), x(4).abs() + 1)),
    "statistics": lambda: (statistics, (x(4, 6),)),
    "complex": lambda: (lambda a: torch.view_as_real(torch.view_as_complex(a) * 2j) + 1, (x(4, 6, 2, grad=True),)),
    "scans": lambda: (lambda a: a.cumsum(1) + a.logcumsumexp(0) + a.flip(1).cumsum(1), (x(4, 6, grad=True),)),
    "running extremes": lambda: (lambda a: (*a.cummax(1), *a.cummin(0), a.cumprod(1)), (x(4, 6),)),
    "mutation": lambda: (lambda a: a.mul_(2).add_(1).relu(), (x(4, 6),)),
    "pools": lambda: (pools, (x(1, 2, 8, 9, grad=True),)),
    "distances": lambda: (distances, (x(4, 6), x(3, 6).sort(1)[0])),
    "grids": lambda: (lambda a, g: F.grid_sample(a, g, align_corners=False) + F.interpolate(
        a, (3, 4), mode="bilinear", antialias=True), (x(1, 2, 8, 9), x(1, 3, 4, 2))),
    "triangles": lambda: (lambda a: a[torch.triu_indices(4, 6).unbind()] + 1, (x(4, 6),)),
    "losses": lambda: (lambda a, b: F.mse_loss(a, b) + F.smooth_l1_loss(a, b) + F.binary_cross_entropy_with_logits(
        a, b.sigmoid()), (x(4, 6, grad=True), x(4, 6))),
    "decoding": lambda: (lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1, (
        x(1, 2, 3, 16, dtype=torch.bfloat16), *(x(1, 2, 150, 16, dtype=torch.bfloat16) for _ in range(2)))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_everything_is_in_kernels(name: str) -> None:
    recording = record(WHOLE[name]())
    figure = total(recording.graphs)
    assert figure.compute > 0
    assert figure.ratio == 1.0, sorted(set(externs(recording)))


# ---------------------------------------------------------------- part: the list has the rest


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(11, 8), torch.nn.LayerNorm(8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(F.gelu(h)).flatten(0, 1), targets.flatten())


def convolutions(a: Tensor, w: Tensor) -> Tensor:
    return F.interpolate(F.max_pool2d(F.conv2d(a, w, padding=1).relu(), 2) + 1, scale_factor=2).mean()


def pools(a: Tensor) -> tuple[Tensor, ...]:
    thirds = F.adaptive_avg_pool2d(a, (3, 4)) + F.adaptive_max_pool2d(a, (3, 4))
    return F.avg_pool2d(a, 3, 2, 1), *F.max_pool2d(a, 3, 2, 1, return_indices=True), thirds


def distances(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return torch.cdist(a, b, 1.0), torch.pdist(a), torch.bucketize(a, b[0]), torch.searchsorted(b[0], a, right=True)


def positions(a: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    picked = a.gather(1, i) + a[:, 0:1]
    return a.scatter_add(1, i, picked), a.sort(1)[0] * 2, a.topk(2)[1] + 1, a.cumsum(1).exp(), a.index_select(1, i[0])


PART: dict[str, Callable[[], Program]] = {
    "transformer": lambda: (Block(), (torch.randint(11, (2, 6)), torch.randint(11, (2, 6)))),
    "convolutions": lambda: (convolutions, (x(1, 3, 8, 8, grad=True), x(4, 3, 3, 3, grad=True))),
    "positions": lambda: (positions, (x(4, 5), torch.randint(5, (4, 5)))),
    "dropout": lambda: (lambda a: F.dropout(a.relu(), 0.5) * 2, (x(4, 6, grad=True),)),
    "products": lambda: (lambda a, b: torch.mv(a, b).relu() + torch.dot(b, b), (x(4, 4, grad=True), x(4, grad=True))),
}


@pytest.mark.parametrize("name", PART)
def test_what_stays_aten_is_listed(name: str) -> None:
    recording = record(PART[name]())
    assert not sorted({(op, reason) for op, reason in externs(recording) if not listed(op, reason)})
    assert 0 < total(recording.graphs).ratio < 1, "this program is here because a part of it is not lowered"


# ---------------------------------------------------------------- the list itself


TAKEN_APART = {*EXPANSIONS, *BODIES, *decompositions()}  # before the segmenter sees them


def lowers(op: OpOverload) -> bool:
    row = ops.TABLE[op]
    alone = row.kind in (ops.Kind.VIEW, ops.Kind.ATTENTION)
    return alone or (row.kind in LOWERED and not row.reason)


def test_the_list_names_no_op_that_lowers() -> None:
    """Neither by an overload that lowers or is taken apart, nor by a packet all of whose overloads do."""
    left = {op for op in ops.TABLE if not lowers(op) and op not in TAKEN_APART}
    known = {str(op) for op in ops.TABLE} | {packet(str(op)) for op in ops.TABLE}
    named = {str(op) for op in left} | {packet(str(op)) for op in left}
    assert sorted(set(LISTED) & known - named) == []


def test_the_list_names_what_the_table_does_not_lower() -> None:
    left = [op for op, row in ops.TABLE.items() if not lowers(op) and "expand pass" not in row.reason]
    apart = {packet(str(op)) for op in TAKEN_APART}
    unlisted = [op for op in left if not listed(str(op), "") and packet(str(op)) not in apart]
    # tracing takes composites of other ops apart, so that no graph has them
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    assert not [op for op in unlisted if not op.has_kernel_for_dispatch_key(composite)]


def test_the_list_has_no_pointwise_op() -> None:
    """Those that PyTorch itself calls pointwise; excepted are random ones and a host bool."""
    allowed = {op for op, entry in LISTED.items() if "random" in entry["reason"]}
    pointwise = {str(op) for op in ops.TABLE if torch.Tag.pointwise in op.tags and listed(str(op), "")}
    assert {packet(op) for op in pointwise} - allowed <= {"aten.equal"}


def test_the_list_may_only_shrink() -> None:
    assert len(LISTED) == sum(len(entry["ops"]) for entry in UNCOVERED), "an op is listed once"
    assert len(LISTED) <= MOST
    assert all(entry["reason"] and entry["dtypes"] for entry in UNCOVERED)


# ---------------------------------------------------------------- the figure


def graph_of(fn: Callable[..., object], *inputs: Tensor) -> list[torch.fx.Node]:
    return list(torch.fx.experimental.proxy_tensor.make_fx(fn, tracing_mode="fake")(*inputs).graph.nodes)


def test_views_sizes_and_getitem_are_not_compute() -> None:
    nodes = graph_of(lambda a: a.t().unsqueeze(0).split(2, 1)[0].relu(), x(4, 6))
    assert [str(n.target) for n in nodes if is_compute(n)] == ["aten.relu.default"]


def test_the_figure() -> None:
    assert (Coverage().ratio, Coverage(3, 4).ratio, (Coverage(3, 4) + Coverage(1, 4)).ratio) == (1.0, 0.75, 0.5)
    assert total(record((lambda a: a.sort(0)[0].relu() + 1, (x(4, 5),))).graphs) == Coverage(2, 3)


@pytest.mark.parametrize(("gemm", "figure"), [("library", Coverage(2, 3)), ("auto", Coverage(3, 3))])
def test_a_product_counts_where_our_kernel_may_compute_it(gemm: str, figure: Coverage) -> None:
    with observe.recording() as recording:
        torch.compile(lambda a, b: (a @ b).relu() + 1, backend="fxfuser", options={"gemm": gemm})(x(4, 5), x(5, 6))
    assert total(recording.graphs) == figure
    rows = segment_rows(recording.graphs[0])
    assert [r.kind for r in rows] == (["gemm"] if gemm == "auto" else ["extern", "pointwise"])
    assert [[p.kind for p in way] for r in rows for way in r.alternatives] == \
        ([["extern", "pointwise"]] if gemm == "auto" else [])


def test_a_product_whose_program_failed_counts_as_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        raise RuntimeError("no tile")

    monkeypatch.setattr(lower_segments, "lower_gemm", broken)
    with observe.recording() as recording, pytest.warns(FallbackWarning, match="no tile"):
        torch.compile(lambda a, b: (a @ b).relu() + 1, backend="fxfuser", options={"strict": False})(x(4, 5), x(5, 6))
    assert total(recording.graphs) == Coverage(2, 3)
    product, kernel = segment_rows(recording.graphs[0])
    assert "no tile" in product.reason and not product.kernel and kernel.kernel and not kernel.reason
