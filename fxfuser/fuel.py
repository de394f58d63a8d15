"""Fuel: how many changes a compilation may still make, so that the one that breaks a result can be found.

A change is one rewrite of a pass or one merge of two groups.  Leaves, when the fuel is out: a program that is right as
far as the changes before were.  With N of fuel, `Fuel.last` is the N-th change; `fxfuser bisect` looks for the first N
whose result is wrong.  A Dynamo region has a tank of its own, unless `shared` gives one to all that compile inside.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator


@dataclass(frozen=True)
class Change:
    """What took fuel: in which graph, which pass (or "merge"), and for a merge its two sides."""

    graph: str
    stage: str
    detail: str = ""


@dataclass
class Fuel:
    """How many more changes may be made; None is without end."""

    left: int | None = None
    graph: str = ""  # what is being compiled, for `last`
    stage: str = ""
    last: Change | None = None  # the change that took the last of it
    spent: int = 0

    def take(self, detail: Callable[[], str] | None = None) -> bool:
        """Asks for one change; a pass that is refused leaves the node as it is."""
        if self.left is not None and self.left <= 0:
            return False
        self.spent += 1
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.last = Change(self.graph, self.stage, detail() if detail else "")
        return True

    def give_back(self, count: int) -> None:
        """Changes that were taken back."""
        self.spent -= count
        if self.left is not None:
            self.left += count


_shared: list[Fuel] = []


@contextmanager
def shared(fuel: Fuel) -> Iterator[None]:
    """Everything that is compiled inside, on any thread, takes from this tank."""
    _shared.append(fuel)
    try:
        yield
    finally:
        _shared.remove(fuel)


def counted(fuel: Fuel) -> bool:
    """Whether somebody asks what takes fuel, or has set an end to it."""
    return fuel.left is not None or any(fuel is one for one in _shared)


def tank(left: int | None) -> Fuel:
    """The tank of one region that begins to be compiled: the shared one, else a new one of `left` changes."""
    return _shared[-1] if _shared else Fuel(left)
