"""From Dynamo's graph to ATen graphs: AOTAutograd, the joint passes and the cut.

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
from fxfuser.attention_masks import simplify_masks
from fxfuser.config import Config
from fxfuser.decompositions import chosen, refusing
from fxfuser.fuel import Fuel, tank
from fxfuser.garbage import uncollected
from fxfuser.margin_loss import correct_margin_losses
from fxfuser.passes import JOINT, LATE, Scope, rng_states, run, saved
from fxfuser.passes.expand import EXPANSIONS
from fxfuser.runtime import tangents
from fxfuser.runtime.capturable import Boundary
from fxfuser.runtime.stored_graphs import origin
from fxfuser.runtime.warm_up import libraries

# In the meta of a module: how many nodes it had after the last pass.  AOTAutograd may add hooks afterwards, and passes
# lose nothing but time where they miss such a change: what is compiled is the graph as it then is.
FINISHED = "finished"

Compiled = Callable[[list[Any]], Any]  # takes its arguments as one list, which it may empty
# graph, config, name, what is known of its inputs and outputs, the region's fuel
CompileGraph = Callable[[fx.GraphModule, Config, str, Boundary, Fuel], Compiled]


@functools.cache
def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """What overloads are traced as."""
    return chosen(_core_aten_decompositions_post_autograd(), get_decompositions)


@functools.cache
def _body_table() -> Mapping[OpOverload, Callable[..., Any]]:
    """What applies inside the body of an op that `expand` takes apart: ours where there is one, else PyTorch's."""
    theirs: Any = get_decompositions([op for op, body in EXPANSIONS.items() if body is None])
    ours = {op: body for op, body in EXPANSIONS.items() if body is not None}
    return {**decompositions(), **refusing(theirs), **ours}


def capture(
    module: fx.GraphModule, example_inputs: Sequence[Any], config: Config, compile_graph: CompileGraph
) -> Callable[..., Any]:
    """Compiles one Dynamo region: its forward, its backward (when first needed), or its graph without gradients."""
    correct_margin_losses(module)
    masks = simplify_masks(module) if config.numerics == "default" else ()
    region = Region(observe.next_region(), config, tank(config.fuel), compile_graph, masks)
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
    masks: tuple[observe.MaskRecord, ...] = ()

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partition_fn: the joint passes, then the minimum cut; or what they made of an equal graph."""
        with observe.graph("joint", self.number, joint.graph, self.config.dump_dir), _undisturbed():
            self._record_masks()
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

    def _record_masks(self) -> None:
        for record in self.masks:
            observe.record(record)

    def _cut(self, joint: fx.GraphModule, inputs: Any, updated: frozenset[str], kwargs: Mapping[str, Any]
             ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.fuel.graph = f"region{self.number}.joint"
        scope = scope_of(joint, self.fuel, self.config)
        run(joint, JOINT, scope)
        # equal expressions are one already, and the partitioner's own merging imports all of Inductor: half a second
        with functorch_config.patch(cse=False):
            forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        rng_states.unwrap_what_draws_nothing(forward, backward, scope)
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
                if kind == "inference":
                    self._record_masks()
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

    return Scope(
        fuel, fake, trace, strict=config.strict, linear_cross_entropy=config.linear_cross_entropy,
        wide_products=config.wide_products, defer_normalisation=config.deferral,
        reassociates=config.numerics == "default", unrounded=config.products != "library")


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
