"""A kernel that reads parts starts while the kernel that leaves them still runs: a dependent pair of launches.

Enters: a program of two launches, whose first writes nothing but scratch memory, which the second reads.  Leaves: the
same program, whose second kernel is launched dependently where the device can (compute capability 9; CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization").

    first     lets the second start; sums; leaves parts
    second    loads whatever the first does not write; waits until the first has ended; reads the parts; all else

The launch of the second, its first instructions and its first loads are then over when the parts are there (an H200, a
row of 4096 times 4096 x 4096 in bf16 with residual and rms_norm: 13.9 us, 13.2 dependently).  The device starts no
program of the second before every program of the first has started, so that it takes no place from any.

Why nothing is read too early or written too early:

- The first kernel is launched plainly.  So whatever the stream ran before it has ended and is visible when it starts,
  and thus to a second kernel that starts early, unless nothing of the first was launched: a pair is made only of
  kernels of which the first has programs, whatever the sizes.
- Nothing comes between the two: one launch function makes both launches on one stream, one after the other.  If the
  first fails, there is no second.  What another thread or a profiler's hook launches between them begins when the first
  has ended, or waits for that itself.
- Before it waits, the second reads only tensors.  The first writes only scratch memory of this call, which shares no
  byte with a tensor that is still to be read, so what is read early is nothing that the first may still write.
- It writes after it has waited, so nothing that the first still reads is overwritten, whatever memory the outputs have
  been given: that of an input which dies here, or that of anything freed before.
- All of its programs wait, before any loop and under no condition.  So when the second has ended, the first has, too;
  and whatever follows is launched plainly, or waits itself, behind the second.  That holds for memory that is freed
  after this call and given to another on the stream, for events, and for the edges of a captured graph.

Where the pair is one grid, in the interpreter and on older devices DEPENDENT is false, and the text has neither line.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Iterator, Sequence

from fxfuser.domain.points import Domain, Point, PointKind, Store
from fxfuser.errors import VerificationError
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import guarded
from fxfuser.lowering.kernel import Dependence, Place, Program

DEPENDENT = "DEPENDENT"  # the constexpr of both kernels
LEAD = (f"if {DEPENDENT}:  # the kernel that reads the parts may start now: it waits until this one has ended",
        "    tl.extra.cuda.gdc_launch_dependents()")
WAIT = (f"if {DEPENDENT}:  # the kernel before this one may still run: no line above needs what it writes",
        "    tl.extra.cuda.gdc_wait()")


def reads_parts(domain: Domain) -> bool:
    """Whether a kernel of this domain reads parts that another has left."""
    return any(p.kind is PointKind.PARTS for p in domain.points())


def wait(emitter: Emission, stores: Sequence[Store]) -> None:
    """Emits the loads of these stores that neither parts nor loops precede, then the wait, at the kernel's top."""
    for point in _loads(stores):
        if not point.lookups and not emitter.loops(point.deps):
            emitter.emit(point)
    emitter.top.lines += WAIT


def _loads(stores: Sequence[Store]) -> Iterator[Point]:
    """The loads that are read under no condition."""
    pending, seen = [s.value for s in reversed(stores)], set[int]()
    while pending:
        point = pending.pop()
        if id(point) in seen:
            continue
        seen.add(id(point))
        if point.kind is PointKind.LOAD:
            yield point
        pending += reversed([p for p, guard in guarded(point, ()) if not guard])
        pending += (value for _, value in point.lookups)


def dependent(program: Program) -> Program:
    """The program with its two launches as a dependent pair; the first must have programs, whatever the sizes.

    Raises VerificationError where the texts of its kernels do not keep the order that this file promises.
    """
    first, second = program.launches
    written = first.pointers[len(first.kernel.inputs):]
    parts = [i for i, place in enumerate(second.pointers) if place in written]
    if any(place is not Place.SCRATCH for place, _ in written):
        raise VerificationError("lowering", f"{first.kernel.name} writes more than parts")
    if not _body(first.kernel.source).startswith(_text(LEAD)):
        raise VerificationError("lowering", f"{first.kernel.name} does not let its parts' reader start first of all")
    before, waits, _ = _body(second.kernel.source).partition(_text(WAIT))
    if not waits or "tl.store" in before or any(re.search(rf"\bin{i}\b", before) for i in parts):
        raise VerificationError("lowering", f"{second.kernel.name} does not wait before it reads parts or writes")
    return replace(program, launches=(
        replace(first, kernel=replace(first.kernel, dependence=Dependence.LEADS)),
        replace(second, kernel=replace(second.kernel, dependence=Dependence.FOLLOWS))))


def _body(source: str) -> str:
    """The lines of a module's kernel, its last function."""
    return source.rpartition("@triton.jit\n")[2].partition("\n):\n")[2]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
