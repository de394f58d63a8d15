"""Running a TARGET so that everything it compiles goes through fxfuser and is recorded.

Enters: a script with its arguments, or `module:function`, a function that returns (callable, example_inputs).
Leaves: an `Outcome`, the recording and, where the target failed, a short traceback.  While a target runs,
`torch.compile` compiles with fxfuser whatever backend it is told, and stdout is stderr, so that what a command
prints is its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import runpy
import sys
import traceback
from argparse import ArgumentParser, Namespace
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Callable, Iterator, Mapping

import torch

from fxfuser import observe
from fxfuser.backend import fxfuser
from fxfuser.config import EXECUTORS, NUMERICS, Mode
from fxfuser.errors import FxfuserError
from fxfuser.explanation import tensors_in

_TORCH = str(Path(torch.__file__).parent)
_MINE = str(Path(__file__))


class TargetError(FxfuserError):
    """A TARGET that cannot be found or is not what it should be."""


@dataclass(frozen=True)
class Target:
    """`function` is empty for a script; `options` override those that the target gives to torch.compile."""

    place: str  # a path, or a dotted module name
    function: str = ""
    args: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    mode: str | None = None

    def __str__(self) -> str:
        return f"{self.place}:{self.function}" if self.function else self.place

    @staticmethod
    def of(args: Namespace) -> Target:
        """The target that the command line names.  Raises TargetError where there is none such."""
        options = {name: value for name in ("executor", "numerics") if (value := getattr(args, name)) is not None}
        place, colon, function = args.target.rpartition(":")
        if os.path.exists(args.target) or not colon:
            if not os.path.isfile(args.target):
                raise TargetError(f"no script {args.target!r}; a function is named module:function")
            return Target(args.target, "", tuple(args.target_args), options, args.mode)
        if args.target_args:
            raise TargetError(f"{args.target} is a function and takes no arguments: {' '.join(args.target_args)}")
        return Target(place, function, (), options, args.mode)


@dataclass(frozen=True)
class Outcome:
    """What was recorded, and the traceback of a target that raised or the code with which it left.

    `results` are what a function gave: its outputs' tensors, its inputs afterwards, and the gradients of all leaves.
    """

    recording: observe.Recording
    failure: str = ""
    results: tuple[torch.Tensor, ...] = ()


def add_target(parser: ArgumentParser) -> None:
    """The arguments of every command that runs a target."""
    parser.add_argument("target", metavar="TARGET", help="a script, or module:function")
    group = parser.add_argument_group("compilation", "override what the target asks of torch.compile")
    group.add_argument("--executor", choices=EXECUTORS, help="where kernels run")
    group.add_argument("--numerics", choices=NUMERICS, help="eager: round after every op, as eager does")
    group.add_argument("--mode", choices=[m.value for m in Mode], help="torch.compile's mode")


def run(target: Target) -> Outcome:
    """Runs the target once.  Raises TargetError where it cannot even be loaded as a target."""
    results: tuple[torch.Tensor, ...] = ()
    with observe.recording() as recording, redirect_stdout(sys.stderr), through_fxfuser(target) as compiled:
        try:
            if target.function:
                results = _run_function(target, compiled)
            else:
                _run_script(target)
        except TargetError:
            raise
        except SystemExit as leaving:
            code = leaving.code
            return Outcome(recording, "" if code in (None, 0) else f"{target} left with exit code {code}")
        except Exception as error:
            return Outcome(recording, f"{target} failed:\n{short_traceback(error)}")
    return Outcome(recording, results=results)


@contextmanager
def through_fxfuser(target: Target) -> Iterator[list[Any]]:
    """Inside, torch.compile's backend is fxfuser; options and modes of other backends are left out.

    Yields the list of what torch.compile returned so far.
    """
    original, compiled = torch.compile, list[Any]()

    def compile(model: Any = None, *, backend: Any = "inductor", mode: Any = None, options: Any = None,
                **rest: Any) -> Any:
        if model is None:  # a decorator with arguments
            return functools.partial(compile, backend=backend, mode=mode, options=options, **rest)
        ours = backend == "fxfuser"
        kept = mode if ours or mode in [m.value for m in Mode] else None
        chosen = {**((options or {}) if ours else {}), **target.options}
        # bound here: torch.compile itself takes a mode or options, not both
        bound = functools.partial(fxfuser, mode=target.mode or kept, options=chosen)
        functools.update_wrapper(bound, fxfuser)  # errors name the backend
        made = original(model, backend=bound, **rest)
        compiled.append(made)
        return made

    torch.compile = compile
    try:
        yield compiled
    finally:
        torch.compile = original


def short_traceback(error: BaseException) -> str:
    """The error with those of its frames that are neither this file's nor PyTorch's."""
    summary = traceback.TracebackException.from_exception(error)
    shown = [f for f in summary.stack if not _foreign(f.filename)]
    return "".join([*traceback.format_list(shown), *summary.format_exception_only()]).rstrip()


def _foreign(filename: str) -> bool:
    return filename.startswith((_TORCH, "<frozen")) or filename in (_MINE, runpy.__file__, importlib.__file__)


def _run_script(target: Target) -> None:
    """As `python script args` would: the script's folder leads the path, and it is __main__."""
    before = sys.argv, list(sys.path)
    sys.argv = [target.place, *target.args]
    sys.path.insert(0, str(Path(target.place).resolve().parent))
    try:
        runpy.run_path(target.place, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]


def _run_function(target: Target, compiled: list[Any]) -> tuple[torch.Tensor, ...]:
    made = function_of(target)()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{target} must return (callable, example_inputs), not {_shape(made)}")
    fn, inputs = made
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    if not isinstance(inputs, (tuple, list)):
        raise TargetError(f"the example inputs of {target} must be a tuple, not {_shape(inputs)}")
    if not any(fn is c for c in compiled):  # else the function has said how, such as dynamic=True
        fn = torch.compile(fn, backend="fxfuser")
    outputs = fn(*inputs)
    differentiable = [t for t in tensors_in(outputs) if t.requires_grad and t.is_floating_point()]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    leaves = [*tensors_in(inputs), *(made[0].parameters() if isinstance(made[0], torch.nn.Module) else ())]
    gradients = [t.grad for t in leaves if t.is_leaf and t.grad is not None]
    return tuple(t.detach() for t in (*tensors_in(outputs), *tensors_in(inputs), *gradients))


def _shape(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"{value!r:.60}"


def function_of(target: Target) -> Callable[..., Any]:
    """The function that a target names.  Raises TargetError where there is none."""
    try:
        module = _module(target.place)
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        if error.name and target.place.split(".")[0] == error.name.split(".")[0]:
            raise TargetError(f"no module {target.place!r} here or on the Python path") from None
        raise TargetError(f"importing {target.place} failed:\n{short_traceback(error)}") from None
    except Exception as error:
        raise TargetError(f"importing {target.place} failed:\n{short_traceback(error)}") from None
    found = vars(module).get(target.function)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items()
                       if isinstance(v, FunctionType) and v.__module__ == module.__name__)
        raise TargetError(f"{target.place} has no function {target.function!r}; it has {', '.join(names) or 'none'}")
    return found  # type: ignore[no-any-return]


def _module(place: str) -> ModuleType:
    """A dotted name, or a path that ends in .py; the working directory leads the path."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(f"no file {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[path.stem] = module  # dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module
