"""`fxfuser bisect`: the first rewrite or merge that breaks a result.

Enters: a target.  It runs in eager mode, then compiled again and again with N of fuel for all that it compiles, so that
only the first N changes (rewrites of passes, merges of the segmenter) are made.  Leaves: the change after which
results first differ from eager's, or a check of the user's first says no: the pass with what it did to the graph, or
the merge with both of its sides.

Bisection needs right results without fuel and wrong ones with all of it; between the two it finds one change that turns
right into wrong, which is the first where a broken result stays broken.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import fx

from fxfuser import fuel, observe, report, words
from fxfuser.cli import target
from fxfuser.cli.command import FAILED, Command
from fxfuser.cli.dump import node_diff
from fxfuser.cli.target import Outcome, Target, TargetError
from fxfuser.errors import user_location
from fxfuser.fuel import Change, Fuel

# relative to the largest value of a result, for what is not exact
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SMALL = 1e-2  # sums that cancel to nothing differ by roundings of their terms
Good = Callable[[Outcome], str]  # why an outcome is bad; "" where it is good


@dataclass(frozen=True)
class Trial:
    """One compiled run with `given` of fuel (None: without end)."""

    given: int | None
    fuel: Fuel
    outcome: Outcome
    fault: str


def add_arguments(parser: ArgumentParser) -> None:
    target.add_target(parser)
    parser.add_argument("--check", metavar="MODULE:FUNCTION",
                        help="called with the results (a list of tensors), says whether they are right; without it "
                        "they are compared with eager's, and a script must end with exit code 0")
    parser.add_argument("--seed", type=int, default=0, help="of random numbers, before each run")


def run(args: Namespace) -> int:
    chosen = Target.of(args)
    good = _judge(chosen, args)
    whole = _trial(chosen, None, good, args.seed)
    if not whole.fault:
        print(f"{chosen} is right with all {words.plural(whole.fuel.spent, 'change')}")
        return 0
    none = _trial(chosen, 0, good, args.seed)
    if none.fault:
        print(f"{chosen} is wrong before the first change: {none.fault}\n"
              "no pass or merge is at fault, but a kernel of one node, the plan, or what PyTorch's capture made")
        return FAILED
    right, wrong = bisect(whole.fuel.spent, lambda n: _trial(chosen, n, good, args.seed), none, whole)
    print(_report(chosen, right, wrong))
    return FAILED


def bisect(count: int, trial: Callable[[int], Trial], right: Trial, wrong: Trial) -> tuple[Trial, Trial]:
    """Trials with N - 1 and N of fuel, the first good and the second bad; `right` had 0, `wrong` all `count`."""
    low, high = 0, count
    while high - low > 1 or wrong.given is None:
        middle = (low + high) // 2 if high - low > 1 else high
        one = trial(middle)
        print(f"fuel {middle}: {one.fault or 'right'}".splitlines()[0][:110], file=sys.stderr)
        if one.fault:
            high, wrong = middle, one
        elif middle == high:
            raise TargetError(f"right with {high} of fuel, wrong without a limit: it does not repeat")
        else:
            low, right = middle, one
    return right, wrong


def _trial(chosen: Target, given: int | None, good: Good, seed: int) -> Trial:
    tank = Fuel(given)
    with fuel.shared(tank):
        outcome = _run(chosen, seed)
    return Trial(given, tank, outcome, good(outcome))


def _run(chosen: Target, seed: int) -> Outcome:
    torch.compiler.reset()
    torch.manual_seed(seed)
    return target.run(chosen)


def _judge(chosen: Target, args: Namespace) -> Good:
    """What tells good outcomes from bad ones.  Raises TargetError where eager itself fails."""
    if args.check:
        return _by_user(args.check)
    if not chosen.function:
        return lambda outcome: outcome.failure
    with torch.compiler.set_stance("force_eager"):
        eager = _run(chosen, args.seed)
    if eager.failure:
        raise TargetError(f"eager fails too: {eager.failure}")
    return lambda outcome: outcome.failure or difference(outcome.results, eager.results)


def _by_user(name: str) -> Good:
    place, colon, function = name.rpartition(":")
    if not colon:
        raise TargetError(f"--check takes module:function, not {name!r}")
    check: Callable[[Sequence[torch.Tensor]], Any] = target.function_of(Target(place, function))
    return lambda outcome: outcome.failure or ("" if check(list(outcome.results)) else f"{name} says no")


def difference(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str:
    """How the first result that is not eager's differs; "" where all are."""
    if len(ours) != len(eager):
        return f"{len(ours)} results, eager has {len(eager)}"
    for i, (a, b) in enumerate(zip(ours, eager)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {i} is {a.dtype}{tuple(a.shape)}, eager's {b.dtype}{tuple(b.shape)}"
        where = _wrong(a, b)
        if where.any():
            at = tuple(int(n) for n in where.nonzero()[0])
            return (f"result {i} differs at {int(where.sum())} of {where.numel()} places, first {list(at)}: "
                    f"{a[at].item()!r}, eager {b[at].item()!r}")
    return ""


def _wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the two differ by more than roundings."""
    tolerance = TOLERANCE.get(b.dtype)
    if tolerance is None:
        return a != b
    x, y = a.double(), b.double()
    finite = y[y.isfinite()].abs()
    allowed = tolerance * max(float(finite.max()) if finite.numel() else 0.0, SMALL)
    return ~((x == y) | ((x - y).abs() <= allowed) | (x.isnan() & y.isnan()))


def _report(chosen: Target, right: Trial, wrong: Trial) -> str:
    change = wrong.fuel.last
    assert change is not None and wrong.given is not None, "with this fuel a change was made that took the last of it"
    head = f"{chosen}: change {wrong.given} breaks it: {wrong.fault}\n"
    if change.stage == "merge":
        return head + _merge_text(change, wrong.outcome.recording)
    return head + f"pass {change.stage} on {change.graph}\n{_pass_text(change, right, wrong)}"


def _merge_text(change: Change, recording: observe.Recording) -> str:
    """Both sides of the merge, a node a line with op and model line."""
    trace = next(t for t in recording.graphs if t.name == change.graph)
    nodes = report.nodes_by_name(trace)
    lines = [f"merge in {change.graph}"]
    for side, names in zip(("one side", "the other"), change.detail.splitlines()):
        lines.append(f"  {side}:")
        for name in names.split(", "):
            lines.append(f"    {name}: {_node_text(nodes[name])}" if name in nodes else f"    {name}")
    return "\n".join(lines)


def _node_text(node: fx.Node) -> str:
    where = words.short_path(user_location(node.stack_trace))
    return f"{words.tensor_type(node)} = {node.target}" + (f"  # {where}" if where else "")


def _pass_text(change: Change, right: Trial, wrong: Trial) -> str:
    """What the pass left of the graph without this change, and with it.

    Graphs are told apart by their order, for regions are numbered on from run to run; of a pass that runs twice the
    last run that changed something is the one.
    """
    graphs = wrong.outcome.recording.graphs
    number = next(i for i, t in enumerate(graphs) if t.name == change.graph)
    runs = [i for i, p in enumerate(graphs[number].passes) if p.name == change.stage and p.changes]
    with_it = graphs[number].passes[runs[-1]].after
    without = right.outcome.recording.graphs[number].passes[runs[-1]].after
    return node_diff(without, with_it) or "  the same nodes, with other arguments or in another order"


COMMAND = Command(
    "bisect", "name the rewrite or the merge that breaks a result",
    "Run TARGET in eager mode, then compiled with fuel for its first N changes only (rewrites of passes and merges;\n"
    "see FXFUSER_FUEL), and halve the span between what is right and what is wrong. Prints the change that breaks the\n"
    "result, with what it did. TARGET must give the same results when it runs again from the same seed.",
    add_arguments, run, forwards=True)
