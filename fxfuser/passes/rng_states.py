"""Random ops that the backward computes again: plain calls where nothing is drawn, and values for the others.

    s, o = run_and_save_rng_state(attention, q, k, v, 0.0)   ->   o = attention(q, k, v, 0.0)
    o = run_with_rng_state(s, attention, q, k, v, 0.0)       ->   o = attention(q, k, v, 0.0)

In a checkpointed region the cut wraps each op that may draw, so that the backward draws the same.  Attention may, and
without dropout does not: wrapped it would be an op that no rule knows, with a generator's state to save.  Enters: both
halves of a joint graph after the cut.  Leaves: halves in which only what draws is wrapped, and in which the wrappers
have the values that the cut gives to their parts alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.passes.funnel import Scope

SAVING, REPLAYING = torch.ops.higher_order.run_and_save_rng_state, torch.ops.higher_order.run_with_rng_state
WITH_GENERATOR = torch.ops.higher_order.graphsafe_run_with_rng_state  # of CUDA devices, the same in both halves
OP: dict[Any, int] = {SAVING: 0, REPLAYING: 1, WITH_GENERATOR: 0}  # which argument is the op; the op's own follow
STATE = "rng_state"  # a wrapper's keyword, and in the names of the inputs that the cut adds


def unwrap_what_draws_nothing(forward: fx.GraphModule, backward: fx.GraphModule, scope: Scope) -> None:
    wrappers = [n for half in (forward, backward) for n in half.graph.nodes if n.target in OP]
    for wrapper in wrappers:
        wrapper.meta["val"] = _value(wrapper, scope)
        if not _draws(wrapper):
            _unwrap(wrapper)
    if wrappers:
        _drop_states(forward.graph, backward.graph)
        forward.recompile()
        backward.recompile()


def _wrapped(wrapper: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op, its arguments and its keywords."""
    op, *args = wrapper.args[OP[wrapper.target]:]
    assert isinstance(op, OpOverload)
    return op, tuple(args), {k: v for k, v in wrapper.kwargs.items() if k != STATE}


def _value(wrapper: fx.Node, scope: Scope) -> object:
    """What its op returns, behind the generator's state where it saves that."""
    op, args, kwargs = fx.map_arg(_wrapped(wrapper), lambda n: n.meta["val"])
    with scope.fake():
        made = op(*args, **kwargs)
    if wrapper.target is not SAVING:
        return made
    state = next(n for n in wrapper.users if n.args[1] == 0)
    return state.meta["val"], made


def _draws(wrapper: fx.Node) -> bool:
    op, args, kwargs = _wrapped(wrapper)
    given = {a.name: a.default_value for a in op._schema.arguments}
    given.update(zip(list(given), args))
    return (given | kwargs).get("dropout_p") != 0.0


def _unwrap(wrapper: fx.Node) -> None:
    """Puts the plain call in its place; a wrapper whose state is saved stays until that is dropped."""
    with wrapper.graph.inserting_before(wrapper):
        plain = wrapper.graph.call_function(*_wrapped(wrapper))
    if wrapper.target is not SAVING:
        plain.meta = dict(wrapper.meta)
        wrapper.replace_all_uses_with(plain)
        wrapper.graph.erase_node(wrapper)
        return
    for result in [n for n in wrapper.users if n.args[1] == 1]:
        plain.meta = dict(result.meta)
        result.replace_all_uses_with(plain)
        wrapper.graph.erase_node(result)


def _drop_states(forward: fx.Graph, backward: fx.Graph) -> None:
    """Removes states that the backward does not read, and what saves them."""
    output = forward.output_node()
    values: tuple[Any, ...] = output.args[0]  # type: ignore[assignment]
    saved = [v for v in values if isinstance(v, fx.Node) and any(n.target is SAVING for n in v.all_input_nodes)
             and v.args[1] == 0]
    given = [n for n in backward.find_nodes(op="placeholder") if n.name.startswith(f"{STATE}_output")]
    unread = {source: state for source, state in zip(saved, given, strict=True) if not state.users}
    output.args = (tuple(v for v in values if v not in unread),)
    for source, state in unread.items():
        backward.erase_node(state)
        wrapper = source.all_input_nodes[0]
        forward.erase_node(source)
        forward.erase_node(wrapper)
    for graph in (forward, backward):
        for generator in graph.find_nodes(op="placeholder"):
            if f"wd_{STATE}" in generator.name and not generator.users:  # fwd and bwd
                graph.erase_node(generator)
