"""A TARGET's function under several backends, each by the three clocks.

Enters: a target that names a function, and backends.  Leaves: a Measurement of each: the whole call, forward and, where
something is differentiable, backward.  Invariant: all run on the same inputs, and whatever the target itself gives to
torch.compile holds for all but eager, which does not compile.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, ContextManager, Iterator

import torch

from fxfuser.cli.target import Target, function_of, through_fxfuser
from fxfuser.config import Mode
from fxfuser.explanation import tensors_in
from fxfuser.runtime import timing
from fxfuser.runtime.timing import Measurement, Run

SIDES = ("eager", "inductor")


@dataclass(frozen=True)
class Side:
    """What was measured of a backend, or why it failed."""

    name: str
    measurement: Measurement | None
    failure: str = ""


def contest(target: Target, names: tuple[str, ...], seconds: float) -> tuple[Side, ...]:
    """fxfuser, then each of `names`."""
    return tuple(_side(target, name, seconds) for name in ("fxfuser", *names))


def _side(target: Target, name: str, seconds: float) -> Side:
    torch.compiler.reset()
    context: ContextManager[Any] = through_fxfuser(target) if name == "fxfuser" else _compiling(name)
    try:
        with redirect_stdout(sys.stderr), context:
            run, device = _whole_call(target, eager=name == "eager")
            with timing.stream(device):
                for _ in range(3):  # under CUDA graphs the second call captures
                    run()
                return Side(name, timing.measure([run], device, seconds))
    except Exception as error:
        return Side(name, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    """Inside, torch.compile compiles with this backend whatever it is told; with eager it does nothing."""
    original = torch.compile

    def compile(model: Any = None, *, backend: Any = None, mode: Any = None, options: Any = None, **rest: Any) -> Any:
        if model is None:
            return functools.partial(compile, backend=backend, mode=mode, options=options, **rest)
        if name == "eager":
            return model
        kept = mode if mode in [m.value for m in Mode] else None
        return original(model, backend=name, mode=kept, **rest)

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = original


def _whole_call(target: Target, eager: bool) -> tuple[Run, torch.device]:
    """The function with its inputs, compiled, with gradients of all that has some; and where it runs."""
    made, inputs = function_of(target)()
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    fn = made if eager else torch.compile(made)
    leaves = [*tensors_in(inputs), *(made.parameters() if isinstance(made, torch.nn.Module) else ())]
    wanted = [t for t in leaves if t.requires_grad]

    def run() -> object:
        outputs = fn(*inputs)
        ends = [t for t in tensors_in(outputs) if t.requires_grad and t.is_floating_point()]
        if not ends or not wanted:
            return outputs
        return outputs, torch.autograd.grad(ends, wanted, [torch.ones_like(t) for t in ends], allow_unused=True)

    found = (*leaves, *tensors_in(run()))
    return run, next((t.device for t in found if t.device.type == "cuda"), torch.device("cpu"))
