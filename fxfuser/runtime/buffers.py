"""Liveness: when a name of straight-line Python code is used for the last time.

Enters: statements in order and the names that are alive before them.  Leaves: for each statement, the names to
delete after it.  Names, not storages, are freed: an alias keeps its storage alive by itself, and the allocator
reuses the memory at once.  Nothing is handed a storage that something else owns, but where rooms.py and in_place.py
show that nobody else reads it.
"""

from __future__ import annotations

import keyword
import re
import symtable
from dataclasses import dataclass
from functools import lru_cache
from typing import Iterable, Sequence


@dataclass(frozen=True)
class Names:
    """The names that a statement reads and those that it binds."""

    read: frozenset[str]
    bound: tuple[str, ...]


# In most statements a name is a word that follows no dot and precedes no keyword's "=".  Text, blocks, comparisons and
# what binds names otherwise are for the compiler.
_OTHER = re.compile(r"""["'\\#;:{}]|[-+*/%&|^@<>!=]=|\b(?:for|lambda|del|import|global|nonlocal)\b""")
_TARGETS = re.compile(r"\w+(?:, \w+)*,?")
_NAME = re.compile(r"(?<![\w.])[^\W\d]\w*(?![\w=])")


@lru_cache(maxsize=16384)
def names(statement: str) -> Names:
    """The names in one line of Python source; those of attributes, keywords and strings are no names."""
    target, assigned, value = statement.partition(" = ") if " = " in statement else ("", "", statement)
    if _OTHER.search(statement) or " = " in value or assigned and not _TARGETS.fullmatch(target):
        return _parsed(statement)
    read = frozenset(name for name in _NAME.findall(value) if not keyword.iskeyword(name))
    return Names(read, tuple(target.rstrip(",").split(", ")) if assigned else ())


def _parsed(statement: str) -> Names:
    # the compiler's own table: half the time of a walk over the syntax tree
    table = symtable.symtable(statement, "<plan>", "exec")
    found = table.get_symbols()
    read = {s.get_name() for s in found if s.is_referenced()}
    for inner in table.get_children():  # of comprehensions and lambdas
        read.update(s.get_name() for s in inner.get_symbols() if s.is_global())
    return Names(frozenset(read), tuple(s.get_name() for s in found if s.is_assigned()))


def last_uses(statements: Sequence[str], params: Iterable[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(parameters that nothing reads, per statement the names to delete after it).

    A name that is bound and never read is deleted at once.  Names that the last statement reads are not
    deleted: the frame ends there.
    """
    used = [names(s) for s in statements]
    last: dict[str, int] = {}
    for position, n in enumerate(used):
        last.update(dict.fromkeys((*n.bound, *n.read), position))
    params = tuple(params)
    local = {*params, *(name for n in used for name in n.bound)}
    frees: list[tuple[str, ...]] = [
        tuple(name for name in dict.fromkeys((*sorted(n.read), *n.bound)) if name in local and last[name] == position)
        for position, n in enumerate(used)]
    if frees:
        frees[-1] = ()
    return tuple(p for p in params if p not in last), frees


def without_unread(statements: Sequence[str], removable: Sequence[bool]) -> list[int]:
    """Positions of the statements to keep: a removable one stays only if a later kept one reads what it binds."""
    needed: set[str] = set()
    keep: list[int] = []
    for position in range(len(statements) - 1, -1, -1):
        n = names(statements[position])
        if removable[position] and not needed.intersection(n.bound):
            continue
        needed |= n.read
        keep.append(position)
    return keep[::-1]
