"""Two launches as one grid: the second's programs stand behind the first's, and wait until these have left their parts.

Enters: a program of two launches, of which the second reads what the first leaves in scratch memory.  Leaves: a program
of one launch that does the same.

    programs 0 .. L-1     the first launch's: each leaves its parts and arrives at the counter
    programs L .. L+F-1   the second's: each waits until L have arrived, and reads the parts

What follows then begins where a multiprocessor has become free, not when a whole kernel has ended and another begun.
The parts are added up by as many programs as the second kernel has, where a last arriver adds up its tile alone.

Nothing waits for ever: a program waits for lower numbers only, and programs start in the order of their numbers, so
whatever it waits for has started and waits for nothing (the assumption of decoupled look-back: Merrill and Garland,
Single-pass parallel prefix scan with decoupled look-back, 2016).  Nobody who waits can see the counter below L again:
who has waited counts itself, and the last of all sets it to zero.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Sequence

import torch

from fxfuser.lowering.dependent import DEPENDENT
from fxfuser.lowering.gemm.text import fill
from fxfuser.lowering.gemm.tiles import EACH
from fxfuser.lowering.kernel import Kernel, Launch, Place, Program, Scratch, Tile
from fxfuser.lowering.lower import module
from fxfuser.lowering.products import TOGETHER, WARP, with_together
from fxfuser.lowering.tiles import MULTIPROCESSORS

NAME = "one_grid"
BEHIND = "REST_"  # before the names of the second kernel's blocks
PROGRAM = "tl.program_id(0)"

# The acquire precedes all loads of the program: its result goes to all threads behind a barrier.  See text.py
TEXT = '''\
if tl.program_id(0) < {leaving}:
    {leave}
    tl.debug_barrier()
    tl.atomic_add({counter}, 1, sem="release")
else:
    while tl.atomic_add({counter}, 0, sem="acquire") < {leaving}:
        pass
    {follow}
    if tl.atomic_add({counter}, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store({counter}, 0)
'''


def one_grid(program: Program, hints: Sequence[int] = ()) -> Program:
    """The program's two launches as one; its tiles are the first launch's, each with a tile of the second's beside it.

    `hints` are what the program's n0, n1, ... are likely to be.
    The second launch's kernel must be one whose grid does not depend on the device, and the first's must write nothing
    but scratch memory and make no tensor descriptors.
    """
    first, second = program.launches
    made = _Joined(first, second, {f"n{i}": size for i, size in enumerate(hints)})
    scratch = (*program.scratch, Scratch(torch.int32, "1", kept=True))
    launch = made.launch(len(program.scratch))
    return replace(program, name=f"{launch.kernel.name}_{NAME}", launches=(launch,), scratch=scratch)


@dataclass(frozen=True)
class _Pointers:
    """The places of a kernel's inputs and outputs, without those that are named twice."""

    inputs: Mapping[tuple[Place, int], torch.dtype]
    outputs: Mapping[tuple[Place, int], torch.dtype]

    @property
    def names(self) -> dict[tuple[Place, int], str]:
        return {place: f"{kind}{i}" for kind, places in (("in", self.inputs), ("out", self.outputs))
                for i, place in enumerate(places)}


@dataclass(frozen=True)
class _Joined:
    first: Launch
    second: Launch
    hints: Mapping[str, int]

    def launch(self, counter: int) -> Launch:
        """The joint launch; `counter` is the number of its scratch buffer."""
        first, second = self.first.kernel, self.second.kernel
        assert first.aligned is None, "a program of one part makes no descriptors"
        place = (Place.SCRATCH, counter)
        pointers, sizes = self._pointers(place), self._sizes()
        tiles = [self._tile(t) for t in dict.fromkeys((first.tile, *first.candidates))]
        source, name = self._source(pointers, sizes, pointers.names[place])
        kernel = Kernel(
            name, source, tuple(pointers.inputs.values()), tuple(pointers.outputs.values()), len(sizes),
            f"{first.grid} + {self._behind(second.grid, sizes)}",
            f"max({first.extent}, {self._behind(second.extent, sizes)})", tiles[0], tuple(tiles[1:]),
            (*first.notes, *second.notes))
        return Launch(kernel, tuple(pointers.names), tuple(sizes))

    def _pointers(self, counter: tuple[Place, int]) -> _Pointers:
        """Parts are outputs, which the second kernel reads; tensors that both read are named once."""
        inputs: dict[tuple[Place, int], torch.dtype] = {}
        outputs: dict[tuple[Place, int], torch.dtype] = {}
        for launch in (self.first, self.second):
            read, written = len(launch.kernel.inputs), launch.pointers[len(launch.kernel.inputs):]
            outputs |= dict(zip(written, launch.kernel.outputs))
            inputs |= {p: d for p, d in zip(launch.pointers[:read], launch.kernel.inputs) if p not in outputs}
        return _Pointers(inputs, outputs | {counter: torch.int32})

    def _sizes(self) -> dict[str, str]:
        """What the program's sizes are called, by their expressions: the first launch's, then the second's others."""
        varying = (s for s in self.second.sizes if re.search(r"\bn\d+\b", s))
        return {s: f"n{i}" for i, s in enumerate(dict.fromkeys((*self.first.sizes, *varying)))}

    def _behind(self, expression: str, sizes: Mapping[str, str]) -> str:
        """An expression over the second kernel's sizes and blocks as one over the joint kernel's."""
        names = {f"n{i}": sizes.get(s, f"({s})") for i, s in enumerate(self.second.sizes)}
        names |= {block: BEHIND + block for block, _ in self.second.kernel.tile.blocks}
        return re.sub(r"\b[A-Za-z_]\w*\b", lambda found: names.get(found[0], found[0]), expression)

    def _tile(self, tile: Tile) -> Tile:
        """The first kernel's tile with that of the second's which gives each multiprocessor about one program.

        A program takes as much shared memory as one of the first's, so that few share a multiprocessor; and one that
        reads many elements of few parts awaits no more than one that reads few elements of many.
        """
        kernel, most = self.second.kernel, EACH * WARP * tile.num_warps

        def fit(other: Tile) -> tuple[bool, float]:
            values = {**dict(tile.blocks), **self.hints}
            values = {**{f"n{i}": _value(s, values) for i, s in enumerate(self.second.sizes)}, **dict(other.blocks)}
            return _elements(other) > most, abs(math.log2(max(1, _value(kernel.grid, values)) / MULTIPROCESSORS))

        each = min((kernel.tile, *kernel.candidates), key=fit)
        each = replace(each, num_warps=tile.num_warps)
        if TOGETHER in dict(each.blocks):
            each = with_together(each, dict(tile.blocks)["SPLITS"])
        return replace(tile, blocks=(*tile.blocks, *((BEHIND + name, size) for name, size in each.blocks)))

    def _source(self, pointers: _Pointers, sizes: Mapping[str, str], counter: str) -> tuple[str, str]:
        """A module with both kernels as functions, and the kernel that calls one of them; and this kernel's name."""
        first, second = self.first.kernel, self.second.kernel
        own, behind = ([n for n, _ in k.tile.blocks] for k in (first, second))
        own = ["INDEX", *own]
        behind = [BEHIND + name for name in behind]
        # a number that is constant has a method `to` as a block
        counts = [sizes[s] if s in sizes else f"tl.full([], {_computed(s)}, tl.int32)" for s in self.second.sizes]
        leaving, names, alone = _computed(first.grid), pointers.names, f"{DEPENDENT}=False"
        leave = [*map(names.__getitem__, self.first.pointers), *(sizes[s] for s in self.first.sizes), *own, alone]
        follow = [f"{PROGRAM} - ({leaving})", *map(names.__getitem__, self.second.pointers), *counts, "INDEX", *behind,
                  alone]
        lines = fill(TEXT, {"leaving": leaving, "counter": counter, "leave": [f"leave({', '.join(leave)})"],
                            "follow": [f"follow({', '.join(follow)})"]})
        functions = {**dict(_functions(first)), **dict(_functions(second))}
        functions["leave"] = functions.pop(first.name).replace(first.name, "leave", 1)
        functions["follow"] = _numbered(functions.pop(second.name).replace(second.name, "follow", 1))
        parameters = [*names.values(), *sizes.values(), *(f"{name}: tl.constexpr" for name in (*own, *behind))]
        return module(first.name.rpartition("_")[0], lines, functions, parameters)


def _elements(tile: Tile) -> int:
    return math.prod(size for name, size in tile.blocks if name != TOGETHER)


def _functions(kernel: Kernel) -> Iterator[tuple[str, str]]:
    """The names and texts of the functions of a kernel's module, decorators included."""
    lines = kernel.source.splitlines()
    for node in ast.parse(kernel.source).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, "\n".join(lines[node.decorator_list[0].lineno - 1:node.end_lineno])


def _numbered(function: str) -> str:
    """The function with its program's number as its first parameter."""
    assert "tl.num_programs" not in function, "a kernel that counts its programs stands behind no other"
    return re.sub(r"\(\n    ", "(\n    program, ", function, count=1).replace(PROGRAM, "program")


class _Division(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.func) != "cdiv":
            return node
        dividend, divisor = node.args
        up = ast.BinOp(ast.BinOp(dividend, ast.Add(), divisor), ast.Sub(), ast.Constant(1))
        return ast.BinOp(up, ast.FloorDiv(), divisor)


def _value(expression: str, values: Mapping[str, int]) -> int:
    """An expression of a launch, where its names have these values."""
    found: int = eval(_computed(expression), {"__builtins__": {}}, dict(values))
    return found


def _computed(expression: str) -> str:
    """An expression of a launch as one of a kernel, which knows no `cdiv`."""
    return ast.unparse(_Division().visit(ast.parse(expression, mode="eval").body))
