"""From Dynamo's graph to ATen graphs: AOTAutograd, decompositions, the joint passes and the cut.

Enters: the GraphModule and example inputs that Dynamo hands a backend, and `compile_graph`, which makes a callable of
one ATen graph.  Leaves: the callable that Dynamo calls.  Invariant: every graph that `compile_graph` sees has been
through the joint passes, in training before the cut between forward and backward and without gradients as it is.

This is the only file that touches private torch.  Names used, present from 2.11 to 2.14:
    torch._dynamo.backends.common.aot_autograd, functorch.compile.min_cut_rematerialization_partition (both relied on
    by backends outside of PyTorch), torch._decomp.{_core_aten_decompositions_post_autograd, get_decompositions},
    torch._functorch._aot_autograd.descriptors.InputMutationAOTOutput,
    torch._functorch._aot_autograd.schemas.{MemoryFormatMeta, PlainTensorMeta}, torch._subclasses.FakeTensor,
    torch._functorch.config.{guess_tangent_strides_as_outputs, cse}, torch._dynamo.config.force_compile_during_fx_trace
    and torch.compiler._compile_session_context (the one or the other),
    torch._dispatch.python.enable_python_dispatcher, torch._guards.TracingContext, torch._C._DisableAutocast,
    torch._C._autograd._get_current_graph_task_keep_graph, torch._C._storage_Use_Count,
    torch.fx._lazy_graph_module._LazyGraphModule, torch._logging._internal.trace_log.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch import fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._guards import TracingContext
from torch._logging._internal import trace_log
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.fuel import Fuel, tank
from fxfuser.garbage import uncollected
from fxfuser.ops import Kind, row
from fxfuser.passes import JOINT, LATE, Scope, foreach, run, saved
from fxfuser.passes.expand import EXPANSIONS
from fxfuser.runtime import tangents
from fxfuser.runtime.capturable import Boundary
from fxfuser.runtime.stored_graphs import origin
from fxfuser.runtime.warm_up import libraries

aten = torch.ops.aten

# In the meta of a module: how many nodes it had after the last pass.  AOTAutograd may add hooks afterwards, and passes
# lose nothing but time where they miss such a change: what is compiled is the graph as it then is.
FINISHED = "finished"

Compiled = Callable[[list[Any]], Any]  # takes its arguments as one list, which it may empty
# graph, config, name, what is known of its inputs and outputs, the region's fuel
CompileGraph = Callable[[fx.GraphModule, Config, str, Boundary, Fuel], Compiled]

# Overload packets of core ATen's decompositions that are not used, and why
KEPT_WHOLE: tuple[Any, ...] = (
    # one GEMM with its epilogue, rounded once; the K=1 pass knows them
    aten.baddbmm, aten.dot, aten.mv,
    # the expand pass has a body that keeps every dimension
    aten.linalg_vector_norm,
    # the expand pass has a body without a scatter
    aten.nll_loss_backward, aten.nll_loss2d_backward,
    # without it what a scan's body returns and what it saves are one value, which the op refuses; a pass drops it
    aten.detach,
    # changes of indices; taken apart the first would read at positions that a tensor holds, the second ask for the
    # position's value, and the third have other strides than eager
    aten.roll, aten.take, aten.select_scatter,
    # one library kernel
    aten._scaled_dot_product_flash_attention_for_cpu,
    # the expand pass traces its body once for equal layers, PyTorch once for each
    aten.native_layer_norm_backward,
    # the random pass has a body that follows from a seed
    aten.bernoulli,
    # float16 overflows between its steps in eager, and would not inside a kernel
    aten.soft_margin_loss, aten.soft_margin_loss_backward,
    # scatters, which run as their ATen call: one call is better than one with its operands prepared
    aten.embedding_dense_backward, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_,
    aten.index_fill, aten.index_fill_,
)


# Overload packets that core ATen has no decomposition for and PyTorch has: copies of views, a norm, and triangles
ALSO_TAKEN_APART: tuple[Any, ...] = (
    aten.narrow_copy, aten.unbind_copy, aten.as_strided_copy, aten.dist, aten.triu_indices, aten.tril_indices)

# Overloads that PyTorch takes for composites of others and that devices have kernels for.  Of composites that have no
# kernel none need be named: tracing takes them apart by itself, and to collect them all takes a tenth of a second.
COMPOSITES: tuple[OpOverload, ...] = (
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default)

# Pointwise ops that are taken apart although the op table could render them: the cut would not recompute them whole
NOT_RECOMPUTED: tuple[Any, ...] = (aten.floor_divide, aten.hardswish, aten.fill, aten.fix)
# and overloads of theirs whose decomposition has other strides than eager
OTHER_STRIDES: tuple[OpOverload, ...] = (aten.fill.Tensor,)


# What eager has for floating dtypes alone, and whose bodies would compute something with integers
OF_FLOATS: tuple[Any, ...] = (
    aten.hardswish, aten.log_sigmoid_forward, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.logaddexp, aten.logaddexp2, aten.frac, aten._softmax, aten._log_softmax, aten.nll_loss_forward,
    aten.nll_loss2d_forward)


@functools.cache
def _core_aten() -> Mapping[Any, Callable[..., Any]]:
    """Core ATen's decompositions, without composites, which tracing takes apart by itself."""
    table: Mapping[Any, Callable[..., Any]] = _core_aten_decompositions_post_autograd()
    return table


def _linspace(start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
    """Eager cuts the ends to integers before it divides what lies between; PyTorch's decomposition after."""
    if dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
        start, end = (int(x) if isinstance(x, float) else x for x in (start, end))
    made: torch.Tensor = _core_aten()[aten.linspace.default](start, end, steps, dtype=dtype, **kwargs)
    return made


def _smooth_l1_loss_backward(
        gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float) -> torch.Tensor:
    """PyTorch's own asks what is near, and takes NaN for far: its sign is 0, and so would be the gradient."""
    apart = x - target
    scaled = gradient / x.numel() if reduction == 1 else gradient
    return torch.where(apart.abs() >= beta, scaled * apart.sign(), scaled * apart / beta)


def _logit_backward(gradient: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """PyTorch's own asks what is within, and takes NaN for beyond; of the pole at -0.0 it has another sign."""
    within = gradient / (x * (1.0 - x))
    if eps is not None:
        return torch.where((x < eps) | (x > 1.0 - eps), 0.0, within)
    inside = torch.where((x == 0.0) | (x == 1.0), gradient * math.inf, within)
    return torch.where((x < 0.0) | (x > 1.0), math.nan, inside)


def _transpose(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """PyTorch's own asks for torch.permute, and that of `t` for torch.transpose: tracing sees each twice or thrice."""
    order = list(range(x.dim()))
    if len(order) < 2 or first == second:
        same: torch.Tensor = aten.alias.default(x)
        return same
    order[first], order[second] = order[second], order[first]
    permuted: torch.Tensor = aten.permute.default(x, order)
    return permuted


@functools.cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Core ATen without KEPT_WHOLE, and without what is one pointwise row: it rounds once there, as eager does."""
    table: Mapping[Any, Callable[..., Any]] = {
        **_core_aten(), **get_decompositions([*ALSO_TAKEN_APART, *COMPOSITES]), **foreach.bodies(),
        aten.linspace.default: _linspace,
        aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward, aten.logit_backward.default: _logit_backward,
        aten.transpose.int: _transpose, aten.t.default: lambda x: _transpose(x, 0, x.dim() - 1),
        aten.native_channel_shuffle.default: _core_aten()[aten.channel_shuffle.default]}
    return _refusing({op: f for op, f in table.items() if isinstance(op, OpOverload) and not _kept(op)})


def _refusing(bodies: Mapping[OpOverload, Callable[..., Any]]) -> Mapping[OpOverload, Callable[..., Any]]:
    return {op: _of_floats(f) if op.overloadpacket in OF_FLOATS else f for op, f in bodies.items()}


def _of_floats(body: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves a call on integers as it is, for ATen to refuse."""
    def taken_apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return body(x, *args, **kwargs) if x.is_floating_point() or x.is_complex() else NotImplemented
    return taken_apart


def _kept(op: OpOverload) -> bool:
    op = _functional(op)
    found = row(op)
    pointwise = found is not None and found.kind is Kind.POINTWISE
    taken = op.overloadpacket in NOT_RECOMPUTED and op not in OTHER_STRIDES
    return op.overloadpacket in KEPT_WHOLE or (pointwise and not taken)


def _functional(op: OpOverload) -> OpOverload:
    """The op without mutation that tracing makes of one with it, where PyTorch has that."""
    name = op.overloadpacket.__name__.removesuffix("_")
    found = getattr(getattr(aten, name, None), op._overloadname, op) if op.namespace == "aten" else op
    assert isinstance(found, OpOverload)
    return found


@functools.cache
def _body_table() -> Mapping[OpOverload, Callable[..., Any]]:
    """What applies inside the body of an op that `expand` takes apart: ours where there is one, else PyTorch's."""
    theirs: Any = get_decompositions([op for op, body in EXPANSIONS.items() if body is None])
    ours = {op: body for op, body in EXPANSIONS.items() if body is not None}
    return {**decompositions(), **_refusing(theirs), **ours}


def capture(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, compile_graph: CompileGraph
) -> Callable[..., Any]:
    """Compiles one Dynamo region: its forward, its backward (when first needed), or its graph without gradients."""
    region = Region(observe.next_region(), config, tank(config.fuel), compile_graph)
    compiler = aot_autograd(
        fw_compiler=region.compiler("forward", LATE),
        bw_compiler=region.compiler("backward", LATE),
        inference_compiler=region.compiler("inference", (*JOINT, *LATE)),
        partition_fn=region.partition,
        decompositions=dict(decompositions()),
        keep_inference_input_mutations=True,
    )
    # tangents mostly come with the strides of their outputs; 2.11 would have them copied to be contiguous
    with functorch_config.patch(guess_tangent_strides_as_outputs=True), _beside_other_threads(), uncollected(), \
            libraries(module):
        return compiler(module, example_inputs)


def _beside_other_threads() -> AbstractContextManager[Any]:
    """While one thread traces, others may call what they have compiled.

    The flag of a trace is the process's.  From 2.13 on a compilation says that it is one; until then a compiled
    function that another thread calls meanwhile takes itself for traced by FX and refuses, unless this setting, which
    is the process's there too, lets it go on.
    """
    if "_compile_session_context" in vars(torch.compiler):
        return nullcontext()
    allowed: AbstractContextManager[Any] = dynamo_config.patch(force_compile_during_fx_trace=True)
    return allowed


@dataclass(frozen=True)
class Region:
    """One Dynamo region on its way through AOTAutograd."""

    number: int
    config: Config
    fuel: Fuel
    compile_graph: CompileGraph

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partition_fn: the joint passes, then the minimum cut; or what they made of an equal graph."""
        with observe.graph("joint", self.number, joint.graph, self.config.dump_dir), _undisturbed():
            scope, updated = scope_of(joint, self.fuel, self.config), _updated_inputs(joint)
            kept = origin(joint.graph, self.config, self.fuel, ["joint", *_read_by_the_cut(updated, kwargs)])
            found = kept.load(scope.fake, 2)
            if found is not None:
                forward, backward = (_module_of(joint, graph) for graph in found)
            else:
                forward, backward = self._cut(joint, inputs, updated, kwargs)
                if kept.key:
                    for half in _settled(forward, backward):
                        run(half, LATE, scope)
                    kept.keep((forward.graph, backward.graph))
        for half in _settled(forward, backward) if kept.key else ():
            half.meta[FINISHED] = len(half.graph.nodes)
        forward.meta["results"] = kwargs["num_fwd_outputs"]
        return forward, backward

    def _cut(self, joint: fx.GraphModule, inputs: Any, updated: frozenset[str], kwargs: Mapping[str, Any]
             ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.fuel.graph = f"region{self.number}.joint"
        run(joint, JOINT, scope_of(joint, self.fuel, self.config))
        # equal expressions are one already, and the partitioner's own merging imports all of Inductor: half a second
        with functorch_config.patch(cse=False):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        saved.keep_old_values(forward, backward, updated, kwargs["num_fwd_outputs"])
        saved.mark(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def compiler(self, kind: str, passes: Sequence[Any]) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
        """AOTAutograd's compiler of one kind of graph."""
        def compile_one(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            with observe.graph(kind, self.number, graph.graph, self.config.dump_dir), _undisturbed(), uncollected():
                name, known = f"region{self.number}.{kind}", boundary_of(graph, kind)
                self.fuel.graph = name
                scope = scope_of(graph, self.fuel, self.config)
                if kind == "forward":
                    _expect_apart()
                dense = _expect_dense(graph, scope) if kind == "backward" else []
                if graph.meta.get(FINISHED) != len(graph.graph.nodes):
                    graph = self._passed(graph, scope, passes)
                compiled = self.compile_graph(graph, self.config, name, known, self.fuel)
                return make_boxed(tangents.restrided(compiled, dense) if dense else compiled)
        return compile_one

    def _passed(self, graph: fx.GraphModule, scope: Scope, passes: Sequence[Any]) -> fx.GraphModule:
        """The graph after the passes, or what they made of an equal one."""
        kept = origin(graph.graph, self.config, self.fuel, [one.__name__ for one in passes])
        found = kept.load(scope.fake, 1)
        if found is not None:
            return _module_of(graph, *found)
        run(graph, passes, scope)
        kept.keep((graph.graph,))
        return graph


def _settled(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, ...]:
    """The halves whose inputs keep their strides: tangents may get others before the backward's passes."""
    return (forward,) if tangents.with_gaps(backward.graph) else (forward, backward)


def _read_by_the_cut(updated: frozenset[str], kwargs: Mapping[str, Any]) -> list[object]:
    """What decides about the cut beside the graph, as a JSON value."""
    return [sorted(updated), {k: repr(v) for k, v in kwargs.items()}, functorch_config.get_hash().hex()]


class Unread(_LazyGraphModule):
    """A graph whose code and text are written when somebody reads them.

    AOTAutograd has the text of both halves made for its structured log, be that on or off: 0.1 s for GPT-2's.
    """

    def print_readable(self, *args: Any, **kwargs: Any) -> str:
        for_log = kwargs.get("expanded_def") and not kwargs.get("print_output", True)  # others ask otherwise
        return "" if for_log and not trace_log.handlers else super().print_readable(*args, **kwargs)


def _module_of(source: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module of its own for a graph over the constants of `source`."""
    return Unread(source, graph)


def _expect_dense(graph: fx.GraphModule, scope: Scope) -> list[tangents.Dense]:
    """Tangents that would be copied into memory with gaps, now expected without, by AOTAutograd and by the graph."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    expected = known.subclass_tangent_meta if known is not None else []
    found = []
    for tangent in tangents.with_gaps(graph.graph):
        plain = expected[tangent.number] if tangent.number < len(expected) else None
        wanted = MemoryFormatMeta(torch.Size(tangent.size), tangent.stride)
        if isinstance(plain, PlainTensorMeta) and plain.memory_format in (wanted, MemoryFormatMeta(
                tangent.node.meta["val"].shape, tangent.node.meta["val"].stride())):
            plain.memory_format = wanted
            found.append(tangent)
    tangents.apply(graph.graph, found, scope.fake)
    return found


def _expect_apart() -> None:
    """Tangents of expanded outputs, now expected by AOTAutograd with a place for each element.

    At the forward already: it would make its copy before the backward is compiled.
    """
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    for plain in known.subclass_tangent_meta if known is not None else ():
        form = plain.memory_format if isinstance(plain, PlainTensorMeta) else None
        if form is not None and form.size and form.stride and tangents.is_expanded(form.size, form.stride) \
                and all(isinstance(n, int) for n in form.size):
            plain.memory_format = MemoryFormatMeta(form.size, tangents.row_major(form.size))


def boundary_of(graph: fx.GraphModule, kind: str) -> Boundary:
    """What AOTAutograd knows of a graph's inputs and outputs."""
    if kind == "backward":
        return Boundary(retained=torch._C._autograd._get_current_graph_task_keep_graph, needed=_needed)
    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    if known is not None and known.bw_donated_idxs:
        # AOTAutograd would refuse retain_graph; ours asks in each call whether what is saved is needed again
        known.bw_donated_idxs.clear()
    return Boundary(frozenset(known.static_input_indices if known is not None else ()), graph.meta.get("results"))


def _needed(saved: torch.Tensor) -> bool:
    """Whether anything but the backward that runs may read what was saved for it: autograd, where the graph is
    retained, or whoever a hook on saved tensors has given it or its memory to."""
    keeps = torch._C._autograd._get_current_graph_task_keep_graph
    return keeps() or any(map(operator.gt, _holders(saved), _holders_of_one()))


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold the tensor, its memory, and its memory from C++."""
    memory = tensor.untyped_storage()
    return sys.getrefcount(tensor), sys.getrefcount(memory), torch._C._storage_Use_Count(memory._cdata)


def _holders_of_one() -> tuple[int, int, int]:
    """The same where nobody but a caller of `_needed` has the tensor.  A frame counts once or twice, by the interpreter
    and by whether Dynamo's evaluation of frames is on."""
    def beneath(tensor: torch.Tensor) -> tuple[int, int, int]:
        return _holders(tensor)

    with torch.inference_mode(False):
        alone = torch.empty(1)
    return beneath(alone)


def make_boxed(function: Compiled) -> Compiled:
    """Marks a function of one list for AOTAutograd, which then lets it free its arguments."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def _updated_inputs(joint: fx.GraphModule) -> frozenset[str]:
    """The names of the inputs to which AOTAutograd writes an output of the forward afterwards."""
    described = joint.graph.output_node().meta.get("desc") or ()
    targets = {d.mutated_input for d in described if isinstance(d, InputMutationAOTOutput)}
    return frozenset(n.name for n in joint.graph.find_nodes(op="placeholder") if n.meta.get("desc") in targets)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """The user's autocast, grad and inference modes surround compilation; none may touch what passes compute."""
    with ExitStack() as stack:
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def scope_of(module: fx.GraphModule, fuel: Fuel, config: Config = Config(strict=True)) -> Scope:
    """What the passes need to work on this graph."""
    fake = _fake_mode(module)

    def trace(function: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
        # the Python dispatcher keeps C++ decompositions from specialising symbolic sizes
        with fake(), enable_python_dispatcher():
            return make_fx(function, decomposition_table=dict(_body_table()), tracing_mode="real")(*values)

    return Scope(fuel, fake, trace, config.strict, config.linear_cross_entropy, config.wide_products, config.deferral,
                 config.products != "library")


def _fake_mode(module: fx.GraphModule) -> Callable[[], AbstractContextManager[Any]]:
    """The mode of the graph's own fake tensors, or, where it has none, of the compilation."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            mode = value.fake_mode
            return lambda: mode
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return nullcontext
    mode = context.fake_mode
    return lambda: mode
