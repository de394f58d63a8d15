"""One program, compiled and eager: results and inputs as the call left them, judged with float64 as yardstick."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from benchmarks.judge import Verdict, compare, significant_strides
from fxfuser.capture import decompositions, make_boxed
from tests.fuzz import yardstick
from tests.fuzz.program import Eager, Input, Program

SPREAD = 4.0  # how many times the noise's spread a result may be off


@dataclass(frozen=True)
class Fault:
    """Why a compiled program is not as good as eager: `kind` is wrong or error, or a key of WITHOUT_US, where that
    is as bad: then what we compiled is already not the program."""

    kind: str
    text: str


@dataclass(frozen=True)
class Expected:
    """Eager's results and inputs afterwards, and the same of each float64 evaluation, the first without noise."""

    names: tuple[str, ...]
    eager: tuple[Tensor, ...]
    wide: tuple[tuple[Tensor, ...], ...]


def _as_traced(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed(lambda values: module(*values))


# PyTorch's capture, and the same with our choice of its decompositions; nothing of ours runs
WITHOUT_US: Mapping[str, Any] = {
    "capture": "aot_eager",
    "decomposition": aot_autograd(fw_compiler=_as_traced, decompositions=dict(decompositions())),
}


def expected(program: Program, device: torch.device = torch.device("cpu")) -> Expected:
    """What the program computes.  Raises what eager raises."""
    inputs = program.tensors(device)
    names = (*program.results, *(i.name for i in program.inputs))
    scope = program.run(Eager(), inputs)
    dtypes = {n: t.dtype for n, t in scope.items()}
    eager = tuple(scope[n] for n in names)
    wide = yardstick.evaluations(program, dtypes)
    return Expected(names, eager, tuple(tuple(w[n] for n in names) for w in wide))


def compiled(program: Program, executor: str, device: torch.device) -> Callable[..., tuple[Tensor, ...]]:
    """With fxfuser on one of its executors, or with PyTorch's capture alone (WITHOUT_US)."""
    torch.compiler.reset()
    if executor in WITHOUT_US:
        return torch.compile(program.on(device), backend=WITHOUT_US[executor], fullgraph=True)
    return torch.compile(program.on(device), backend="fxfuser",
                         options={"executor": executor, "strict": True}, fullgraph=True)


def check(program: Program, executor: str = "interpret", device: torch.device | None = None,
          known: Expected | None = None) -> Fault | None:
    """None where the compiled program is as good as eager; a program that eager refuses is no fault either."""
    device = device or torch.device("cuda" if executor == "triton" else "cpu")
    try:
        known = known or expected(program, device)
    except (RuntimeError, IndexError, KeyError, TypeError, ValueError):  # a shrunk program may mean nothing
        return None
    fault = _fault(program, executor, device, known)
    if fault is None or executor in WITHOUT_US:
        return fault
    for name in WITHOUT_US:
        theirs = _fault(program, name, device, known)
        if theirs is not None and theirs.kind == fault.kind:
            return Fault(name, theirs.text)
    return fault


def _fault(program: Program, executor: str, device: torch.device, known: Expected) -> Fault | None:
    inputs = program.tensors(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = [*compiled(program, executor, device)(*inputs), *inputs]
        except Exception as error:  # any is a fault
            return Fault("error", f"{type(error).__name__}: {error}")
    for i, name in enumerate(known.names):
        verdict = judged(ours[i], known.eager[i], [w[i] for w in known.wide])
        if verdict.fault:
            return Fault("wrong", f"{name}: {verdict.fault}")
    return None


def assert_as_eager(function: Callable[..., Any], inputs: Sequence[Input], executor: str = "interpret") -> None:
    """The body of a test that a failure has become."""
    fault = check(Program.of(function, inputs), executor)
    assert fault is None, f"{fault.kind}: {fault.text}"


def judged(ours: object, eager: Tensor, wide: Sequence[Tensor]) -> Verdict:
    """The judge's verdict, blind where the noise explains a difference."""
    if not isinstance(ours, Tensor):
        return Verdict(f"{type(ours).__name__}, eager has a tensor")
    if ours.dtype != eager.dtype or ours.shape != eager.shape:
        return Verdict(f"{ours.dtype}{tuple(ours.shape)}, eager {eager.dtype}{tuple(eager.shape)}")
    if eager.dtype.is_complex:
        if significant_strides(ours) != significant_strides(eager):
            return Verdict(f"strides {significant_strides(ours)}, eager {significant_strides(eager)}")
        ours, eager, *wide = (torch.view_as_real(t.resolve_conj().contiguous()) for t in (ours, eager, *wide))
    clear = _clear(eager.cpu(), wide)
    here = ours.detach().cpu()
    own = torch.where(clear, here, eager.detach().cpu())
    if eager.is_floating_point():
        spread = torch.stack([(w - wide[0]).abs() for w in wide[1:]]).amax(0)
        close = (here.double() - wide[0]).abs() <= SPREAD * spread
        own = torch.where(close & clear, eager.cpu(), own)
    if significant_strides(ours) != significant_strides(eager):
        return Verdict(f"strides {significant_strides(ours)}, eager {significant_strides(eager)}")
    return compare(own.contiguous(), eager.detach().cpu().contiguous(), wide[0].contiguous())


def _clear(eager: Tensor, wide: Sequence[Tensor]) -> Tensor:
    """Where rounding does not decide what the value is: which number, of integers, or whether it is finite."""
    if eager.is_floating_point():
        finite = wide[0].isfinite()
        same = torch.ones_like(finite)
        for w in wide[1:]:
            same &= (w.isfinite() == finite) & (w.isnan() == wide[0].isnan())
            same &= ~w.isinf() | (w == wide[0])
        # eager overflows or rounds to NaN where float64 does not: no yardstick
        return same & (eager.isfinite() == finite) & (eager.isnan() == wide[0].isnan())
    same = torch.ones(eager.shape, dtype=torch.bool)
    for w in wide[1:]:
        same &= w == wide[0]
    return same & (wide[0] == eager)
