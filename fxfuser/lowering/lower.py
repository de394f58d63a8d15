"""Segment to kernel.

Enters: a segment with its domain.  Leaves: a `Lowered`, canonical kernel text and the binding of its
arguments.  Invariant: whatever domain the segmenter carries, a kernel comes out; equal domains give equal
text, whatever the model calls its nodes.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.domain.joint import Pair
from fxfuser.domain.points import Domain, Point, PointKind
from fxfuser.domain.size import Size, Symbol, example, from_torch
from fxfuser.errors import VerificationError
from fxfuser.lowering.dependent import DEPENDENT, reads_parts
from fxfuser.lowering.emitter import Emitter
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.kernel import Dependence, Kernel, Lowered, Tile
from fxfuser.lowering.loops import Loops
from fxfuser.lowering.products import adds_parts, with_together
from fxfuser.lowering.schedule import Dim, Schedule, schedule, strides_of
from fxfuser.lowering.sum_emitter import SumEmitter
from fxfuser.lowering.tiles import tiles
from fxfuser.lowering.unrolling import unrolled
from fxfuser.ops import PRELUDE, memory_of
from fxfuser.segmenter.segment import Segment

UNBROKEN = "\0"  # stands for a space at which no line may end

MODULE = '''\
import triton
import triton.language as tl
{imports}

{functions}@triton.jit
def {name}(
{parameters}
):
{body}
'''


def lower(segment: Segment, config: Config, hints: Mapping[str, int]) -> Lowered:
    """The kernel of a segment; `hints` are example values of the graph's size symbols.

    Errors: LoweringError never arises for a domain that `resolve` accepted; any exception here is a fault.
    """
    domain = segment.domain
    assert domain is not None, f"{segment.name} has no domain"
    loads = loaded(domain.points(), segment)
    made = kernel_of(Body(domain, tuple(loads), segment.outputs, stem(segment)), config, hints)
    return Lowered(made.kernel, tuple(segment.inputs.index(n) for n in loads), tuple(range(len(segment.outputs))),
                   tuple(s.text for s in made.sizes))


@dataclass(frozen=True, eq=False)
class Body:
    """What one kernel computes: a domain, the tensors that it reads and writes, and what it is called after.

    `partials` are the dtypes of buffers of states that it also reads (see partials.py), after the tensors, and what the
    domain's points call them; `joint` the reductions that it folds together, where they are not found by loops.  One
    that leaves `sums` writes those of its outputs, in fp32.
    """

    domain: Domain
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    stem: str
    partials: Mapping[str, torch.dtype] = field(default_factory=dict)
    joint: tuple[Pair, ...] | None = None
    sums: bool = False


@dataclass(frozen=True)
class Made:
    """A kernel, and the symbol of each of its sizes."""

    kernel: Kernel
    sizes: tuple[Symbol, ...]


def kernel_of(body: Body, config: Config, hints: Mapping[str, int]) -> Made:
    """The kernel of a domain."""
    domain = unrolled(body.domain, hints)
    plan = schedule(domain)
    choices = tiles(domain, plan, hints, domain is not body.domain)
    _verify(plan, choices)
    if adds_parts(domain):
        choices = tuple(map(with_together, choices))
    inputs = {node: f"in{i}" for i, node in enumerate(body.inputs)}
    outputs = {node: f"out{i}" for i, node in enumerate(body.outputs)}
    names = {partial: f"in{len(inputs) + i}" for i, partial in enumerate(body.partials)}
    blocks = {d.block: max(dict(t.blocks)[d.block] for t in choices) for d in plan.dims}
    kind = SumEmitter if body.sums else Emitter
    emitter = kind(domain, plan, inputs, outputs, blocks, config.numerics == "eager", joint=body.joint, buffers=names,
                   unrolled=domain is not body.domain)
    Loops(emitter, dict(choices[0].blocks)).write()
    extent = extent_of(emitter.sizes, blocks, plan.dims, [*inputs, *map(memory_of, outputs)])
    grid = " * ".join(f"cdiv({emitter.sizes.text(d.size)}, {d.block})" for d in plan.program)
    lines, dependent = emitter.top.lines, body.sums or reads_parts(domain)
    source, name = module(body.stem, lines, emitter.reducer.combines(), [
        *inputs.values(), *names.values(), *outputs.values(), *emitter.sizes.names.values(), "INDEX: tl.constexpr",
        *(f"{name}: tl.constexpr" for name, _ in choices[0].blocks),
        *([f"{DEPENDENT}: tl.constexpr"] if dependent else [])])
    kernel = Kernel(
        name=name, source=source,
        inputs=(*(n.meta["val"].dtype for n in inputs), *body.partials.values()),
        outputs=tuple(torch.float32 if body.sums else n.meta["val"].dtype for n in outputs),
        sizes=len(emitter.sizes.names), grid=grid, extent=extent,
        tile=choices[0], candidates=choices[1:], notes=tuple(emitter.notes.values()),
        dependence=Dependence.ALONE if dependent else None)
    return Made(kernel, tuple(emitter.sizes.names))


def _verify(plan: Schedule, choices: Iterable[Tile]) -> None:
    """What no loop walks is in every tile as a whole: nothing else would write the rest."""
    for dim in plan.inner:
        for tile in choices:
            if not dim.looped and isinstance(dim.size, int) and dict(tile.blocks)[dim.block] < dim.size:
                raise VerificationError("tile choice", f"{tile} leaves out some of {dim.name}, which has {dim.size}")


def size_hints(graph: fx.Graph) -> dict[str, int]:
    """Example values of the graph's size symbols, as the inputs had them when it was traced."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        sizes = [value] if isinstance(value, torch.SymInt) else value.shape if isinstance(value, torch.Tensor) else []
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and (known := example(size)) is not None:
                found[str(size.node.expr)] = known
    return found


def loaded(points: Iterable[Point], segment: Segment) -> list[fx.Node]:
    """The inputs that points really read, in the segment's order."""
    read = {p.node for p in points if p.kind is PointKind.LOAD}
    return [n for n in segment.inputs if n in read]


def extent_of(sizes: Sizes, blocks: Mapping[str, int], dims: Iterable[Dim], tensors: Iterable[fx.Node]) -> str:
    """The largest element offset or index that a kernel computes, as Python source."""
    largest: list[Size] = [d.size + blocks[d.block] for d in dims]
    for node in tensors:
        offset: Size = 0
        for size, stride in zip(node.meta["val"].shape, strides_of(node)):
            offset = offset + (from_torch(size) - 1) * stride
        largest.append(offset)
    # a tile's masked lanes compute offsets past the end: leave them the same room again
    texts = dict.fromkeys(sizes.text(s) for s in largest)
    return f"2 * max({', '.join(texts)}, 0)"


def module(stem: str, lines: Iterable[str], combines: Mapping[str, str], parameters: Sequence[str]) -> tuple[str, str]:
    """(source, name) of a module whose kernel has these lines and parameters."""
    body = "\n".join(f"    {line}" for line in lines)
    functions = _functions(body, combines)
    imports = "from triton.language.extra import libdevice\n" if "libdevice." in body + functions else ""
    whole = (p.replace(" ", UNBROKEN) for p in parameters)  # a name and its annotation on one line
    text = MODULE.format(imports=imports, functions=functions, name="{name}", body=body, parameters=textwrap.fill(
        ", ".join(whole), 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False,
        ).replace(UNBROKEN, " "))
    name = f"{stem}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return text.replace("{name}", name, 1), name


def _functions(body: str, combines: Mapping[str, str]) -> str:
    """The helper functions that the body calls, callees first."""
    sources = {**combines, **PRELUDE}
    needed: dict[str, str] = {}

    def add(text: str) -> None:
        for name in re.findall(r"\b([A-Za-z_]\w*)\b", text):
            if name in sources and name not in needed:
                add(sources[name].split("\n", 2)[2])
                needed[name] = sources[name]

    add(body)
    return "".join(f"{source.strip()}\n\n\n" for source in needed.values())


def stem(segment: Segment) -> str:
    """A readable name: the kind and the first few ops, by position so that equal kernels have equal names."""
    ops = [str(n.target).split(".")[1].strip("_") for n in segment.nodes]
    return "_".join([segment.kind.value, *dict.fromkeys(ops)][:5])[:60]
