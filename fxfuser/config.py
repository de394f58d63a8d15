"""What the user may set, resolved once per compilation into a frozen `Config`.

Enters: the `mode=` and `options=` of `torch.compile` and the process environment, which is read here and nowhere
else.  Leaves: a `Config`, or an error that lists what is known.  An option beats its environment variable, which
beats the default; every environment variable has an option of its own, so tests need not touch the environment, and
an option that few need has no variable.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Callable, Mapping

from fxfuser.errors import InvalidOption, UnknownOption

try:
    from platformdirs import user_cache_path
except ImportError:  # a GPU machine may have torch and Triton alone

    def user_cache_path(appname: str, appauthor: bool) -> Path:  # type: ignore[misc]  # the signature that is used
        return Path(os.path.expanduser("~/.cache")) / appname  # Path.home() raises where there is none


class Mode(Enum):
    """torch.compile's modes under the names users know.

    They differ in `Config.cuda_graphs` and `Config.max_autotune` alone: the latter measures the tiles of each kernel at
    its first call (runtime/tune.py).
    """

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


EXECUTORS = ("auto", "reference", "interpret", "triton")
NUMERICS = ("default", "eager")
GEMM = ("auto", "library", "fused")
LOSSES = ("auto", "fast", "low_memory", "off")


@dataclass(frozen=True)
class Config:
    """Every choice of one compilation."""

    mode: Mode = Mode.DEFAULT
    executor: str = "auto"  # one of EXECUTORS; "auto" is triton for CUDA tensors, else reference
    strict: bool = False  # a segment that fails to lower raises instead of running as ATen
    numerics: str = "default"  # one of NUMERICS; "eager" rounds after every op as eager does
    gemm: str = "auto"  # one of GEMM; "auto" measures fused kernels against the library's product
    deterministic: bool = False  # choices come from the cost model alone, never from a measurement
    fuel: int | None = None  # passes and merges stop after so many changes
    cache_dir: Path = user_cache_path("fxfuser", appauthor=False)
    dump_dir: Path | None = None  # what was compiled is written here
    linear_cross_entropy: str = "auto"  # one of LOSSES; how much of the logits may stand in memory at once
    defer_normalisation: bool = False  # statistics of rows may be applied behind a product, which rounds otherwise

    @property
    def cuda_graphs(self) -> bool:
        return self.mode in (Mode.REDUCE_OVERHEAD, Mode.MAX_AUTOTUNE)

    @property
    def products(self) -> str:
        """What products may be fused with, one of GEMM: eager's numerics are those of the library's product."""
        return self.gemm if self.numerics == "default" else "library"

    @property
    def wide_products(self) -> bool:
        """Whether products may be written as float32 without being rounded first: by the library, which does that."""
        return self.numerics == "default" and self.gemm != "fused"

    @property
    def deferral(self) -> bool:
        """Whether normalisation moves behind products: only kernels of ours apply it there at no cost."""
        return self.defer_normalisation and self.products != "library"

    @property
    def max_autotune(self) -> bool:
        return self.mode in (Mode.MAX_AUTOTUNE, Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS) and not self.deterministic

    @staticmethod
    def resolve(
        mode: str | None = None,
        options: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Config:
        """The configuration for these arguments of torch.compile; `environ` is os.environ unless given.

        Raises UnknownOption for a mode or an option that does not exist, InvalidOption for a value of the wrong
        type or outside its choices, in an option or in the environment.
        """
        environ = os.environ if environ is None else environ
        known = {s.option: s for s in SETTINGS}
        for name in options or {}:
            if name not in known:
                raise UnknownOption("option", name, known)
        chosen: dict[str, object] = {"mode": _mode(mode)}
        for name, setting in known.items():
            text = environ.get(setting.variable, "") if setting.variable else ""
            if options is not None and name in options:
                chosen[name] = setting.check(f"option {name!r}", options[name])
            elif text:
                chosen[name] = setting.check(setting.variable, setting.parse(text))
        return Config(**chosen)  # type: ignore[arg-type]  # each value was checked by its setting


@dataclass(frozen=True)
class Setting:
    """One option and its environment variable, "" where it has none.

    `parse` turns the variable's text into the option's value, or leaves it as text for `check` to refuse;
    `check(name, value)` returns the value that Config holds or raises InvalidOption.
    """

    option: str
    variable: str
    meaning: str
    parse: Callable[[str], object]
    check: Callable[[str, object], object]


def _mode(mode: str | None) -> Mode:
    if mode is None:
        return Mode.DEFAULT
    if mode not in [m.value for m in Mode]:
        raise UnknownOption("mode", mode, [m.value for m in Mode])
    return Mode(mode)


def _parse_flag(text: str) -> object:
    return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)


def _parse_count(text: str) -> object:
    return int(text) if text.isdecimal() else text


def _one_of(choices: tuple[str, ...]) -> Callable[[str, object], object]:
    def check(name: str, value: object) -> object:
        if value not in choices:
            raise InvalidOption(name, value, "one of " + ", ".join(choices))
        return value

    return check


def _flag(name: str, value: object) -> object:
    if not isinstance(value, bool):
        raise InvalidOption(name, value, "a bool (1 or 0 in the environment)")
    return value


def _count(name: str, value: object) -> object:
    # bool is an int to isinstance, and `fuel=True` is a slip
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise InvalidOption(name, value, "a number of changes, 0 or more")
    return value


def _directory(name: str, value: object) -> object:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InvalidOption(name, value, "a path")
    return Path(os.path.expanduser(os.fspath(value)))


SETTINGS: tuple[Setting, ...] = (
    Setting("executor", "FXFUSER_EXECUTOR", "Where kernels run: auto (triton for CUDA tensors, else reference), "
            "reference (each segment's ATen ops), interpret (Triton's interpreter) or triton.",
            str, _one_of(EXECUTORS)),
    Setting("strict", "FXFUSER_STRICT", "1: a segment that cannot be lowered raises; 0: it runs as ATen ops, with a "
            "warning.", _parse_flag, _flag),
    Setting("numerics", "FXFUSER_NUMERICS", "default (values that stay inside a kernel are not rounded to bf16 or "
            "fp16) or eager (round after every op).", str, _one_of(NUMERICS)),
    Setting("gemm", "FXFUSER_GEMM", "Matrix products with work behind them: auto (our fused kernel or the library's "
            "product and a kernel, whichever is measured to be faster), library or fused.", str, _one_of(GEMM)),
    Setting("linear_cross_entropy", "", "A linear layer and the cross entropy behind it: auto (pieces of rows, or "
            "the logits of some columns, where that needs about half of the memory), fast (all logits), low_memory "
            "(always pieces) or off.",
            str, _one_of(LOSSES)),
    Setting("defer_normalisation", "", "True: a normalised operand of a matrix product is multiplied as it is, and the "
            "rows' statistics are applied to the product.", _parse_flag, _flag),
    Setting("deterministic", "FXFUSER_DETERMINISTIC", "1: the cost model alone chooses, so that nothing depends on a "
            "measurement.", _parse_flag, _flag),
    Setting("fuel", "FXFUSER_FUEL", "Stop passes and merges after so many changes, to find the one that is at fault.",
            _parse_count, _count),
    Setting("cache_dir", "FXFUSER_CACHE_DIR", "Directory for segments, kernels and repro files that outlive the "
            "process (~/.cache/fxfuser).", str, _directory),
    Setting("dump_dir", "FXFUSER_DUMP", "Directory into which graphs, segments, kernels and plans are written.",
            str, _directory),
)

ENVIRONMENT: Mapping[str, str] = {s.variable: s.meaning for s in SETTINGS if s.variable}


def variables_set() -> Mapping[str, str]:
    """Those of ENVIRONMENT that are set in this process, with their text."""
    return {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}


def triton_variables() -> Mapping[str, str]:
    """Triton's own variables, without its directories: what it builds may depend on each."""
    return {n: v for n, v in os.environ.items() if n.startswith("TRITON_") and not n.endswith(("_DIR", "_HOME"))}


def worker_environment() -> Mapping[str, str]:
    """The environment of processes that build kernels, where Triton must compile."""
    return {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
