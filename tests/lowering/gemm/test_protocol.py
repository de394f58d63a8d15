"""How parts of a split sum meet, over every interleaving of the kernels' own text; and what each line of it is for."""

from __future__ import annotations

import pytest

from fxfuser.lowering.gemm.text import LAST_ARRIVER, TURNSTILE, Policy

from .protocol import Grid, Violation, explore, filled, one_grid_filled

POLICIES = pytest.mark.parametrize("policy", [LAST_ARRIVER, TURNSTILE], ids=lambda p: p.name)
BARRIER, TURN, RESET = "tl.debug_barrier()\n", "tl.atomic_xchg(out2 + tile, ", "tl.store(counter + bundle, 0)"
WHOLE, INNER = "tl.store(counter + bundles, 0)", "        tl.debug_barrier()\n"
CACHED = ', cache_modifier=".cg")'
SMALL = (Grid(1, 2, 2), Grid(1, 3, 3), Grid(1, 3, 1))
BUNDLES = (Grid(1, 3, 3, 2), Grid(1, 4, 2, 2), Grid(2, 3, 2, 2))


def mutated(policy: Policy, old: str, new: str) -> str:
    text = filled(policy)
    assert old in text, f"{policy.name} has no {old!r}"
    return text.replace(old, new, 1)


def violation(text: str, grids: tuple[Grid, ...] = SMALL) -> str:
    """What goes wrong in the first of these grids in which something does."""
    for grid in grids:
        try:
            explore(text, grid)
        except Violation as found:
            return str(found)
    return ""


@POLICIES
@pytest.mark.parametrize("grid", [*SMALL, Grid(1, 4, 4), Grid(2, 2, 2)], ids=str)
def test_every_interleaving_of_two_launches(policy: Policy, grid: Grid) -> None:
    """One program commits each tile, with all parts in one order; counters are zero again; nobody waits for ever."""
    assert explore(filled(policy), grid) >= 12 * grid.programs


@POLICIES
@pytest.mark.parametrize("resident", [1, 2, 3])
def test_grids_beyond_residency_end(policy: Policy, resident: int) -> None:
    explore(filled(policy), Grid(2, 2, resident) if resident < 3 else Grid(1, 5, resident), launches=1)


@pytest.mark.parametrize("grid", [*BUNDLES[:2], Grid(1, 4, 4, 2), Grid(1, 5, 2, 2), Grid(1, 2, 2, 1)], ids=str)
def test_bundles_of_parts(grid: Grid) -> None:
    """The last of each bundle adds it up, the last of these the bundles: in one order, with one commit."""
    assert explore(filled(LAST_ARRIVER), grid) >= 12 * grid.programs


MERGE = '    accumulator_0 = NO_SUM\n    for other'
MERGE_BUNDLES = '            accumulator_0 = NO_SUM\n            for other'
CAUGHT: dict[str, tuple[Policy, str, str, str]] = {
    "no barrier": (LAST_ARRIVER, BARRIER, "", "poison"),
    "relaxed": (LAST_ARRIVER, 'sem="acq_rel"', 'sem="relaxed"', "poison"),
    "no release": (LAST_ARRIVER, 'sem="acq_rel"', 'sem="acquire"', "poison"),
    "no acquire": (LAST_ARRIVER, 'sem="acq_rel"', 'sem="release"', "poison"),
    "loads through L1": (LAST_ARRIVER, f"{CACHED}\n    {RESET}", f")\n    {RESET}", "poison"),
    "no reset": (LAST_ARRIVER, RESET, "pass", "counter"),
    "a reset to another number": (LAST_ARRIVER, RESET, "tl.store(out2 + tile, 1)", "counter"),
    "the first commits": (LAST_ARRIVER, "== count - 1", "== 0", ""),
    "everybody commits": (LAST_ARRIVER, "== count - 1", "< SPLITS", ""),
    "nobody commits": (LAST_ARRIVER, "== count - 1", "== SPLITS", ""),
    "its own part twice": (LAST_ARRIVER, MERGE, MERGE.replace("accumulator_0 = NO_SUM", "pass"), "the sum of"),
    "parts in one place": (LAST_ARRIVER, "(tile * (SPLITS + bundles) + part)", "(tile * (SPLITS + bundles))",
                          "the sum of"),
    "one counter for two tiles": (LAST_ARRIVER, "out2 + tile", "out2 + 0", ""),
    "turns without a barrier": (TURNSTILE, f"    {BARRIER}    {TURN}part", f"    {TURN}part", "poison"),
    "turns without acquire": (TURNSTILE, 'sem="acquire"', 'sem="relaxed"', "poison"),
    "turns without release": (TURNSTILE, 'part + 1, sem="release"', 'part + 1, sem="relaxed"', "poison"),
    "turns through L1": (TURNSTILE, f"{CACHED}\nif", ")\nif", "poison"),
    "turns without a reset": (TURNSTILE, f"{TURN}0", f"{TURN}part", "counter"),
    "turns that nobody gives": (TURNSTILE, "part + 1, sem", "part, sem", "for ever"),
    "turns that nobody awaits": (TURNSTILE, "0, sem=\"acquire\") != part", "0, sem=\"acquire\") != 0", ""),
    "turns from the last to the first": (TURNSTILE, "part = tl", "part = SPLITS - 1 - tl", "for ever"),
    "nothing is added": (TURNSTILE, "part > 0", "part > SPLITS", "the sum of"),
}


CAUGHT_BUNDLES: dict[str, tuple[str, str, str]] = {
    "no barrier behind a bundle": (INNER, "", "poison"),
    "no release of a bundle": (' + bundles, 1, sem="acq_rel"', ' + bundles, 1, sem="acquire"', "poison"),
    "no acquire of bundles": (' + bundles, 1, sem="acq_rel"', ' + bundles, 1, sem="release"', "poison"),
    "bundles through L1": (f"{CACHED}\n            {WHOLE}", f")\n            {WHOLE}", "poison"),
    "no reset of the whole": (WHOLE, "pass", "counter"),
    "no reset of a bundle": (RESET, "pass", "counter"),
    "each bundle commits": ("== bundles - 1", "< bundles", ""),
    "no bundle commits": ("== bundles - 1", "== bundles", ""),
    "its own bundle twice": (MERGE_BUNDLES, MERGE_BUNDLES.replace("accumulator_0 = NO_SUM", "pass"), "the sum of"),
    "bundles in one place": ("SPLITS + bundle)", "SPLITS)", "the sum of"),
    "one counter for bundles and the whole": ("counter + bundles, 1", "counter + 0, 1", ""),
    "a short bundle waits": ("min(SPLITS - first, JOIN)", "JOIN", ""),
    "the bundles of another tile": ("tile * (bundles + 1)", "tile", ""),
}


@pytest.mark.parametrize("name", CAUGHT_BUNDLES)
def test_what_bundles_must_not_lose(name: str) -> None:
    old, new, reason = CAUGHT_BUNDLES[name]
    found = violation(mutated(LAST_ARRIVER, old, new), BUNDLES)
    assert found and reason in found, found or "nothing went wrong"


@pytest.mark.parametrize("name", CAUGHT)
def test_what_the_text_must_not_lose(name: str) -> None:
    policy, old, new, reason = CAUGHT[name]
    found = violation(mutated(policy, old, new), (*SMALL, Grid(2, 2, 2)))
    assert found and reason in found, found or "nothing went wrong"


HARMLESS: dict[str, tuple[Policy, str, str]] = {
    "stores through L1, which writes through": (LAST_ARRIVER, f"{CACHED}\ntl.debug", ")\ntl.debug"),
    "an atomic reset": (LAST_ARRIVER, RESET, 'tl.atomic_xchg(counter + bundle, 0, sem="relaxed")'),
    "another barrier": (LAST_ARRIVER, BARRIER, BARRIER + BARRIER),
    "more order than is needed": (TURNSTILE, 'sem="acquire"', 'sem="acq_rel"'),
    "no barrier before the last turn": (TURNSTILE, f"    {BARRIER}    {TURN}0", f"    {TURN}0"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_the_model_does_not_refuse_what_is_right(name: str) -> None:
    policy, old, new = HARMLESS[name]
    assert violation(mutated(policy, old, new)) == ""


AHEAD = (Grid(1, 2, 3, behind=True), Grid(2, 2, 4, behind=True), Grid(2, 2, 2, behind=True))


@pytest.mark.parametrize("grid", [*AHEAD, Grid(2, 3, 1, behind=True), Grid(1, 3, 3, behind=True),
                                  Grid(3, 2, 3, behind=True)], ids=str)
def test_programs_behind_those_that_leave_parts(grid: Grid) -> None:
    """Each waits until all parts are there, as many as are resident; the counter is zero again."""
    assert explore(one_grid_filled(), grid) >= 12 * grid.programs


WAITS = "    while tl.atomic_add(out2, 0, sem=\"acquire\") < SPLITS:\n        pass\n"
CAUGHT_BEHIND: dict[str, tuple[str, str, str]] = {
    "no barrier before an arrival": (BARRIER, "", "poison"),
    "no release": ('sem="release"', 'sem="relaxed"', "poison"),
    "no acquire": ('sem="acquire"', 'sem="relaxed"', "poison"),
    "nobody waits": (WAITS, "", ""),  # what is read was not written, or the counter goes on behind its reset
    "one is not awaited": ("< SPLITS:\n        pass", "< SPLITS - 1:\n        pass", ""),
    "parts through L1": (CACHED, ")", "poison"),
    "who has waited is seen as late": ("< SPLITS:\n        pass", "!= SPLITS:\n        pass", "for ever"),
    "the first resets": ("== tl.num_programs(0) - 1", "== SPLITS", ""),
    "nobody resets": ("tl.store(out2, 0)", "pass", "counter"),
    "nobody counts itself": ("out2, 1, sem=\"relaxed\"", "out2, 0, sem=\"relaxed\"", "counter"),
    "those who wait stand before": ("if tl.program_id(0) < SPLITS", "if tl.program_id(0) >= TILES", ""),
    "an arrival too many": ("tl.atomic_add(out2, 1, sem=\"release\")", "tl.atomic_add(out2, 2, sem=\"release\")", ""),
}


@pytest.mark.parametrize("name", CAUGHT_BEHIND)
def test_what_programs_behind_must_not_lose(name: str) -> None:
    old, new, reason = CAUGHT_BEHIND[name]
    text = one_grid_filled()
    assert old in text
    found = violation(text.replace(old, new, 1), AHEAD)
    assert found and reason in found, found or "nothing went wrong"


def test_a_poll_that_does_something_is_not_understood() -> None:
    with pytest.raises(AssertionError, match="no loop that polls"):
        explore(mutated(TURNSTILE, "    pass", "    tl.debug_barrier()"), SMALL[0])
