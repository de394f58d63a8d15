"""Which output of a kernel may be written over an input that is read for the last time.

Enters: a segment with its kernel, and the nodes that have been computed before it.  Leaves: output node -> input node.
Logits become their gradient this way, so that the two never stand beside each other.  Three things must hold:

- the input's memory is the plan's own, and nothing reads it later: a result of a product or of a kernel, or a tensor
  saved for this backward alone (`owned`), unless that backward keeps its graph;
- both have the same dtype, sizes and strides;
- every program reads exactly the elements that it writes, each before it is written.  The kernel's text tells: all
  reads of the input and the write of the output have the same offset, in a tile that each program has for itself, and
  the write comes last; in loops that walk the parts of one way, each part has its own.  Between two threads that share
  an element lies a reduction or a change of layout, and so a barrier.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Collection, Mapping

import torch
from torch import fx

from fxfuser.lowering.kernel import Kernel, Lowered
from fxfuser.ops import memory_of
from fxfuser.ops.products import AFTER
from fxfuser.passes.aliasing import aliased, root
from fxfuser.passes.saved import OWNED, owns_memory
from fxfuser.segmenter.segment import Segment

LEAST = 1 << 20  # bytes; smaller buffers are not worth a thought

_ACCESS = re.compile(r"tl\.(load|store)\((in|out)(\d+) \+ ")
_WAY = re.compile(r"( *)for \w+ in (?:tl\.)?range\(([^,]+), ([^,]+), [^)]+\):")  # indent, first, last


def overwritten(
    segment: Segment, low: Lowered, computed: Collection[fx.Node], may_take_inputs: bool
) -> Mapping[fx.Node, fx.Node]:
    """Output -> input whose memory it takes; `computed` are the nodes of all segments before this one."""
    found: dict[fx.Node, fx.Node] = {}
    for o, number in enumerate(low.outputs):
        output = segment.outputs[number]
        for i, position in enumerate(low.inputs):
            node = segment.inputs[position]
            if node in found.values() or not _alike(node, output) or not is_mine(node, may_take_inputs):
                continue
            if dies(node, segment.nodes, computed) and once(segment, output) \
                    and reads_itself(segment, low, node) \
                    and element_by_element(low.kernel, i, o):
                found[output] = node
                break
    return found


def taken_by(node: fx.Node, part: Segment, low: Lowered) -> fx.Node | None:
    """The output of a part that may be written over `node`, which nothing else reads; None where there is none."""
    for o, number in enumerate(low.outputs):
        for i, position in enumerate(low.inputs):
            output = part.outputs[number]
            if part.inputs[position] is node and _alike(node, output) \
                    and node.meta["val"].shape == output.meta["val"].shape \
                    and element_by_element(low.kernel, i, o) and once(part, output):
                return output
    return None


def _alike(node: fx.Node, output: fx.Node) -> bool:
    a, b = node.meta.get("val"), output.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.device != b.device:
        return False
    if any(type(n) is not int for n in (*a.shape, *a.stride(), *b.shape, *b.stride())):
        return False
    same = a.dtype is b.dtype and a.numel() == b.numel() and a.is_contiguous() and b.is_contiguous()
    return same and a.numel() * a.itemsize >= LEAST


def is_mine(node: fx.Node, may_take_inputs: bool) -> bool:
    """Whether the node's memory is the plan's own; that of an input is where it was saved for this backward alone."""
    if node.op == "placeholder":
        return may_take_inputs and bool(node.meta.get(OWNED))
    return owns_memory(node)


def reads_itself(segment: Segment, low: Lowered, node: fx.Node) -> bool:
    """Whether a kernel that reads memory of `node` reads it as that tensor, not as a view that the host makes of it:
    such a view has elements of its own order."""
    inputs = (segment.inputs[i] for i in low.inputs)
    return all(n is node for n in inputs if root(n) is root(node))


def dies(
    node: fx.Node, mine: Collection[fx.Node], computed: Collection[fx.Node], but: fx.Node | None = None
) -> bool:
    """Whether all that reads the node, through whatever views, is the segment's own, has been computed before, or is
    `but`."""
    stack = [node]
    while stack:
        source = stack.pop()
        for user in source.users:
            if user is but or user.target is AFTER and user.args[0] is not source:
                continue  # the latter waits for the node and does not read it
            if source in aliased(user):
                stack.append(user)
            elif user not in computed and user not in mine:
                return False
    return True


def once(segment: Segment, output: fx.Node) -> bool:
    """Whether no two programs write the same element, and none writes it twice."""
    domain = segment.domain
    stores = [s for s in domain.stores if s.node is output] if domain is not None else []
    own = memory_of(output) is output  # what is scattered has a place already
    return own and len(stores) == 1 and domain is not None and stores[0].axes >= frozenset(domain.program)


def element_by_element(kernel: Kernel, i: int, o: int) -> bool:
    """Whether each program of the kernel reads in<i>, if it does, where it writes out<o>, and before."""
    return _element_by_element(kernel.source, kernel.name, i, o)


@lru_cache(maxsize=4096)
def _element_by_element(source: str, name: str, i: int, o: int) -> bool:
    """Remembered, since equal layers ask the same."""
    reads: list[tuple[int, str]] = []
    writes: list[tuple[int, str]] = []
    lines = source.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"def {name}("))
    body = next(n for n in range(start, len(lines)) if lines[n].startswith("):")) + 1
    for number, line in enumerate(lines[body:]):
        for match in _ACCESS.finditer(line):
            place = (match[2], int(match[3]))
            if place == ("in", i):
                reads.append((number, _offset(line, match.end())))
            elif place == ("out", o):
                writes.append((number, _offset(line, match.end())))
        other = len(re.findall(rf"\b(?:in{i}|out{o})\b", line))
        if other > sum((m[2], int(m[3])) in (("in", i), ("out", o)) for m in _ACCESS.finditer(line)):
            return False  # a descriptor, or a pointer that goes somewhere else
    if len({text for _, text in (*reads, *writes)}) != 1 or not writes:
        return False
    return _in_turn(lines[body:], [n for n, _ in reads], [n for n, _ in writes]) \
        and all(_walks(lines[body:], number, offset) for number, offset in writes)


def _in_turn(lines: list[str], reads: list[int], writes: list[int]) -> bool:
    """Whether no line reads what one before it may have written.  Several write the parts of one way, each in a loop of
    its own that begins where the last one ended (see lowering/peeling.py)."""
    heads = [_head(lines, number) for number in writes]
    if len(writes) > 1:
        ways = [_WAY.match(lines[head]) if head is not None else None for head in heads]
        if any(a is None or b is None or a[1] != b[1] or a[3] != b[2] for a, b in zip(ways, ways[1:])):
            return False
    first = [-1, *(head for head in heads[1:] if head is not None)]  # from where on a read is one of this part
    return all(any(a < number < b for a, b in zip(first, writes)) for number in reads)


def _head(lines: list[str], at: int) -> int | None:
    """The line of the loop around a line; None where that is in no loop."""
    own = _indent(lines[at])
    return next((n for n in range(at - 1, -1, -1) if _indent(lines[n]) < own and lines[n].lstrip().startswith("for ")),
                None)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _offset(line: str, start: int) -> str:
    """The text of the offset that begins at `start`."""
    depth = 0
    for end in range(start, len(line)):
        if line[end] in "([":
            depth += 1
        elif line[end] in ")]":
            if depth == 0:
                return line[start:end]
            depth -= 1
        elif line[end] == "," and depth == 0:
            return line[start:end]
    return line[start:]


def _walks(lines: list[str], at: int, offset: str) -> bool:
    """Whether each loop around line `at` moves the offset, so that no element is met again."""
    indent = _indent(lines[at])
    moved: set[str] = set()
    for number in range(at - 1, -1, -1):
        line = lines[number]
        own = _indent(line)
        if own < indent:
            if not line.lstrip().startswith("for ") or not moved & set(re.findall(r"\w+", offset)):
                return False
            indent, moved = own, set()
        assigned = re.match(r"\s*(\w+) = .*\b\w+_start\b", line)
        if own == indent and assigned:
            moved.add(assigned[1])
    return True
