"""The host's part of a plan: inputs, sizes, views and ATen calls, each computed when first needed.

Enters: a graph and the nodes that segments own.  Leaves: statements, in order.  Invariants: a statement reads only
names bound before it; a size symbol is bound once, from a SymInt input, the size of an input, or the result of the
node that makes it known; an ATen result that a kernel or the graph's output reads has the strides of its meta, and
one that a kernel reads its dtype: some ops' fake tensors have another than what the op returns.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, Callable, Iterator

import torch
from torch import fx
from torch.autograd.graph import increment_version

from fxfuser.errors import Site, VerificationError
from fxfuser.ops import BOUNDARY, is_write_back, memory_of
from fxfuser.ops.products import AFTER
from fxfuser.passes.aliasing import root
from fxfuser.runtime import buffers, sizes
from fxfuser.runtime.literals import Namespace, call_text, render
from fxfuser.runtime.plan import Step, StepKind
from fxfuser.runtime.reference import is_size, may_alias, strided_text
from fxfuser.segmenter.segment import Segment


class Host:
    """A program under construction.  `prologue` precedes `steps` and binds the sizes that inputs give."""

    def __init__(self, graph_module: fx.GraphModule, owned: set[fx.Node]) -> None:
        self._module, self._owned = graph_module, owned
        self._nodes = tuple(graph_module.graph.nodes)
        found = frozenset(s for n in self._nodes for dim, _ in _dims(n.meta.get("val"), "") for s in sizes.symbols(dim))
        self.symbols: tuple[str, ...] = tuple(sorted(found))
        self.namespace = Namespace(found | {"call", "args", "strided", "fill", "empty_strided"})
        self.prologue: list[Step] = []
        self.steps: list[Step] = []
        self.params: tuple[str, ...] = ()
        self._names: dict[fx.Node, str] = {}
        self._given: dict[fx.Node, str] = {}  # inputs themselves, where their names are those of what kernels read
        self._held: dict[fx.Node, str] = {}  # whether anything else needs an input
        self._bound: set[str] = set()
        self._producers: dict[str, fx.Node] = {}
        self._moved: dict[tuple[fx.Node, torch.device], str] = {}
        self._needs_strides: set[fx.Node] = set()
        self._read_by_kernels: set[fx.Node] = set()
        self._pending = [n for n in self._nodes if n.op == "call_function" and n not in owned and n.is_impure()]
        self._take_inputs()

    # names and texts

    def define(self, node: fx.Node) -> str:
        """The name of a node whose value the next statement binds."""
        if node not in self._names:
            self._names[node] = self.namespace.local(node.name)
        return self._names[node]

    def text(self, node: fx.Node) -> str:
        """The name of a value at hand, or a size's expression."""
        if node in self._names:
            return self._names[node]
        if node.op == "get_attr":
            value = reduce(getattr, str(node.target).split("."), self._module)
            return self.namespace.constant(value, node.name)
        size = self.size_text(node)
        if size is None:
            raise VerificationError("segmenter", "a value is read before anything computes it", Site.of(node))
        return size

    def size_text(self, node: fx.Node) -> str | None:
        """Source of a host number over the graph's symbols; None if it is none or has no such source."""
        value = node.meta.get("val")
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            return None
        try:
            return sizes.source(value)
        except ValueError:
            return None

    def emit(self, kind: StepKind, text: str, segment: int | None = None, note: str = "") -> None:
        """Appends a statement, after binding the size symbols that it reads."""
        if self.symbols:
            for symbol in sorted(buffers.names(text).read.intersection(self.symbols) - self._bound):
                self._bind(symbol)
        self.steps.append(Step(kind, text, segment, note))

    # inputs

    def _take_inputs(self) -> None:
        placeholders = [n for n in self._nodes if n.op == "placeholder"]
        for node in placeholders:
            value = node.meta.get("val")
            symbol = sizes.source(value) if isinstance(value, torch.SymInt) and sizes.symbols(value) else ""
            if symbol in self.symbols and symbol not in self._bound:
                self._names[node] = symbol
                self._bound.add(symbol)
            else:
                self.define(node)
        self.params = tuple(self._names[n] for n in placeholders)
        # plain symbols first: their sources are cheaper than solved equations
        known = [d for n in placeholders for d in _dims(n.meta.get("val"), self._names[n])]
        for dim, text in sorted(known, key=lambda d: not sizes.expression(d[0]).is_Symbol):
            self._bind_from(dim, text, self.prologue)
        for node in self._nodes if self.symbols else ():
            if node.op == "call_function":
                for dim, _ in _dims(node.meta.get("val"), ""):
                    solved = sizes.solve(dim, "")
                    if solved is not None and solved[0] not in self._bound:
                        self._producers.setdefault(solved[0], node)

    def held_elsewhere(self, node: fx.Node, needed: Callable[[torch.Tensor], bool]) -> str:
        """The name of whether anything but this call needs an input: asked first of all, as views of it hold it too."""
        if node not in self._held:
            self._held[node] = self.namespace.local(f"{node.name}_needed")
            asked = self.namespace.constant(needed, "needed")
            self.prologue.append(Step(StepKind.SYMBOL, f"{self._held[node]} = {asked}({self._names[node]})"))
        return self._held[node]

    def prepare_inputs(self, kernel_inputs: set[fx.Node]) -> None:
        """Makes inputs fit what kernels assume: tangents come with any strides, and views may be lazily negated."""
        output = self._nodes[-1]
        self._read_by_kernels = kernel_inputs
        self._needs_strides = kernel_inputs | _with_bases(output.all_input_nodes)
        for node in self._nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or node not in kernel_inputs or not isinstance(value, torch.Tensor):
                continue
            name = given = self._names[node]
            if value.is_neg():
                if any(map(is_write_back, node.users)):  # that writes to the view
                    self._given[node], name = given, self.namespace.local(f"{given}_resolved")
                self._names[node] = name
                self.emit(StepKind.STRIDE, f"{name} = {given}.resolve_neg()")
            if node.name.startswith("tangents") or value.is_neg():
                self.emit(StepKind.STRIDE, f"{name} = {strided_text(name, value)}", note="autograd may give others")

    def on_device(self, node: fx.Node, device: torch.device) -> str:
        """The text of a kernel's input; a number that lives on the CPU is copied to a CUDA kernel's device."""
        self.materialise(node)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.device == device:
            return self.text(node)
        if value.device.type != "cpu" or value.dim() != 0:
            raise VerificationError("segmenter", f"a kernel on {device} reads a tensor on {value.device}",
                                    Site.of(node))
        if (node, device) not in self._moved:
            name = self.namespace.local(f"{node.name}_{device.type}")
            where = render(device, self.text, self.namespace)
            self.emit(StepKind.STRIDE, f"{name} = {self.text(node)}.to({where}, non_blocking=True)")
            self._moved[node, device] = name
        return self._moved[node, device]

    # values

    def materialise(self, root: fx.Node) -> None:
        """Emits what computes `root`, unless it is at hand.  The output node stands for all that it returns."""
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in self._names or node.op in ("placeholder", "get_attr"):
                continue
            if is_size(node) and self._bind_size(node):
                continue
            if not ready:
                stack.append((node, True))
                stack.extend((n, False) for n in reversed(node.all_input_nodes))
            elif node.op == "call_function":
                self.call(node)
            elif node.op != "output":
                raise VerificationError("capture", f"the graph has a {node.op}", Site.of(node))

    def call(self, node: fx.Node, segment: Segment | None = None, twin: Callable[..., Any] | None = None) -> None:
        """Emits the node's own ATen (or Python) call and what its result makes known; `twin` stands for the op."""
        for operand in node.all_input_nodes:
            self.materialise(operand)
        text = self._call_text(node) if twin is None else call_text(node, self.text, self.namespace, twin)
        name = self.define(node)
        view = segment is None and (may_alias(node) or node.target is operator.getitem)
        kind = StepKind.VIEW if view else StepKind.SYMBOL if _only_sizes(node) else StepKind.EXTERN
        note = " ".join(segment.reason.split()) if segment is not None else ""
        self.emit(kind, f"{name} = {text}", None if segment is None else segment.index, note)
        self.bind_symbols(node)
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not _is_strided(value) or may_alias(node):
            return
        if node in self._needs_strides:
            # what only the graph returns keeps the dtype that eager's result has
            text = strided_text(name, value, typed=node in self._read_by_kernels)
            self.emit(StepKind.STRIDE, f"{name} = {text}")

    def _call_text(self, node: fx.Node) -> str:
        if node.target is BOUNDARY or node.target is AFTER:  # the tensor itself: the cut was all that was asked for
            return self.text(node.all_input_nodes[0])
        if is_write_back(node):
            return call_text(node, lambda n: self._given.get(n) or self.text(n), self.namespace)
        return call_text(node, self.text, self.namespace)

    def write_back(self, node: fx.Node, update: fx.Node, segment: int) -> None:
        """A kernel is about to write `node` to the memory of the input that `update` would copy it to."""
        target = update.args[0]
        assert isinstance(target, fx.Node)
        self.emit(StepKind.ALLOC, f"{self.define(node)} = {self.text(target)}", segment, "in place")
        self.written_back(update)

    def scatter(self, node: fx.Node, segment: int) -> None:
        """A kernel is about to store `node` in the memory of a tensor, of which it is passed the first element."""
        base = memory_of(node)
        self.materialise(base)
        self.emit(StepKind.ALLOC, f"{self.define(node)} = {self.text(base)}", segment, "in place")

    def count(self, update: fx.Node, segment: int | None = None) -> None:
        """Tells autograd of a write by a kernel, so that it refuses a value which was saved before; AOTAutograd tells
        it of those in a forward."""
        target = update.args[0]
        assert isinstance(target, fx.Node)
        name = self.namespace.constant(increment_version, "increment_version")
        self.emit(StepKind.EXTERN, f"{name}({self.text(target)})", segment, "written to by a kernel")

    def written_back(self, update: fx.Node) -> None:
        """What `update` does has been done."""
        target = update.args[0]
        assert isinstance(target, fx.Node)
        self._names[update] = self.text(target)

    def part_from_bases(self, output: fx.Node, count: int | None) -> None:
        """Makes the first `count` results, which users get, tensors of their own where they alone are views of memory
        that the plan has allocated: autograd refuses to mutate a view whose base nobody knows, and eager's result is
        none where it comes of a product or a copy."""
        returned = output.args[0]
        results = returned if isinstance(returned, (list, tuple)) else (returned,)
        owners = [root(n) if isinstance(n, fx.Node) else None for n in results]
        for node, owner in zip(results[:count], owners):
            if not isinstance(node, fx.Node) or owner is None or not may_alias(node) or owners.count(owner) > 1:
                continue
            rebuilt = owner.op == "placeholder" or any(map(is_write_back, owner.users))  # a view, by AOTAutograd
            value = node.meta.get("val")
            if not rebuilt and isinstance(value, torch.Tensor) and _is_strided(value):
                name = self.text(node)
                self.emit(StepKind.VIEW, f"{name} = {name}.data", note="a result of its own")

    def run_effects(self, last: bool, counted: bool = False) -> None:
        """Emits effects that no segment owns: checks once what they read is at hand, writes at the end.  Where writes
        of kernels are `counted`, autograd has not been told of them."""
        for node in tuple(self._pending):
            if last or (not _mutates(node) and self._at_hand(node)):
                self._pending.remove(node)
                if _has_been_scattered(node):
                    self.written_back(node)
                    if counted:
                        self.count(node)
                else:
                    self.materialise(node)

    def _at_hand(self, root: fx.Node) -> bool:
        stack = list(root.all_input_nodes)
        while stack:
            node = stack.pop()
            if node in self._owned and node not in self._names:
                return False
            if node not in self._names:
                stack.extend(node.all_input_nodes)
        return True

    # sizes

    def bind_symbols(self, node: fx.Node) -> None:
        """Binds the symbols that this value, just computed, makes known."""
        for dim, text in _dims(memory_of(node).meta.get("val"), self._names[node]):
            self._bind_from(dim, text, self.steps)

    def _bind_from(self, dim: Any, text: str, steps: list[Step]) -> None:
        solved = sizes.solve(dim, text) if sizes.symbols(dim) else None
        if solved is not None and solved[0] not in self._bound:
            self._bound.add(solved[0])
            steps.append(Step(StepKind.SYMBOL, f"{solved[0]} = {solved[1]}"))

    def _bind_size(self, node: fx.Node) -> bool:
        """Whether the number follows from symbols; those that a node has yet to compute are computed first."""
        if self.size_text(node) is None:
            return False
        missing = sizes.symbols(node.meta["val"]) - self._bound
        if any(self._producers.get(s, node) is node for s in missing):
            return False
        for symbol in sorted(missing):
            self._bind(symbol)
        return True

    def _bind(self, symbol: str) -> None:
        producer = self._producers.get(symbol)
        if producer is not None:
            self.materialise(producer)
        if symbol not in self._bound:
            raise VerificationError("capture", f"nothing tells the size {symbol} at run time",
                                    Site.of(producer) if producer is not None else Site())


def _dims(value: Any, text: str) -> Iterator[tuple[Any, str]]:
    """(symbolic number, its source) for all that a value of this meta tells of sizes."""
    if isinstance(value, torch.SymInt):
        yield value, text
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _dims(part, f"{text}[{i}]")
    elif isinstance(value, torch.Tensor):
        yield from ((n, f"{text}.size({i})") for i, n in enumerate(value.shape) if type(n) is not int)
        if _is_strided(value):
            yield from ((n, f"{text}.stride({i})") for i, n in enumerate(value.stride()) if type(n) is not int)


def _is_strided(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def _only_sizes(node: fx.Node) -> bool:
    """Whether a call computes a number from numbers and so may be left out if nothing reads it."""
    return is_size(node) and not node.is_impure() and all(map(is_size, node.all_input_nodes))


def _has_been_scattered(update: fx.Node) -> bool:
    """Whether a write-back's value is the input itself, in which it has been stored."""
    if not is_write_back(update):
        return False
    value = update.args[1]
    while isinstance(value, fx.Node) and value.target is AFTER:
        value = value.args[0]
    return value is update.args[0]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _with_bases(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are views of."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.op == "call_function" and may_alias(node) or node.target is operator.getitem:
                stack.extend(node.all_input_nodes)
    return found


