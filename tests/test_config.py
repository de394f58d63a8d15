"""Options, modes and environment variables: what is accepted, what is refused and what the README says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxfuser import Config
from fxfuser.config import ENVIRONMENT, SETTINGS, Mode, variables_set
from fxfuser.errors import InvalidOption, UnknownOption

ROOT = Path(__file__).parent.parent


def test_defaults() -> None:
    config = Config.resolve(environ={})
    assert config == Config()
    assert (config.mode, config.executor, config.strict, config.fuel) == (Mode.DEFAULT, "auto", False, None)


@pytest.mark.parametrize(("mode", "graphs", "tune"), [
    (None, False, False), ("default", False, False), ("reduce-overhead", True, False),
    ("max-autotune", True, True), ("max-autotune-no-cudagraphs", False, True),
])
def test_modes(mode: str | None, graphs: bool, tune: bool) -> None:
    config = Config.resolve(mode, environ={})
    assert (config.cuda_graphs, config.max_autotune) == (graphs, tune)


def test_deterministic_never_measures() -> None:
    assert not Config.resolve("max-autotune", {"deterministic": True}, {}).max_autotune


def test_an_unknown_mode_lists_the_known() -> None:
    with pytest.raises(UnknownOption, match="no mode 'fast'.*default, reduce-overhead, max-autotune"):
        Config.resolve("fast", environ={})


def test_an_unknown_option_lists_the_known() -> None:
    with pytest.raises(UnknownOption, match="no option 'sctrict'.*executor, strict"):
        Config.resolve(options={"sctrict": True}, environ={})


@pytest.mark.parametrize(("name", "value"), [
    ("executor", "gpu"), ("executor", None), ("strict", 1), ("strict", "yes"), ("numerics", True),
    ("deterministic", None), ("fuel", -1), ("fuel", True), ("fuel", "3"), ("cache_dir", 7), ("dump_dir", ""),
])
def test_an_option_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(InvalidOption, match=f"option '{name}' must be"):
        Config.resolve(options={name: value}, environ={})


@pytest.mark.parametrize(("variable", "text"), [
    ("FXFUSER_EXECUTOR", "gpu"), ("FXFUSER_STRICT", "maybe"), ("FXFUSER_FUEL", "-1"), ("FXFUSER_FUEL", "many"),
])
def test_a_variable_with_a_bad_value(variable: str, text: str) -> None:
    with pytest.raises(InvalidOption, match=f"{variable} must be"):
        Config.resolve(environ={variable: text})


def test_every_variable_sets_its_option() -> None:
    environ = {"FXFUSER_EXECUTOR": "interpret", "FXFUSER_STRICT": "1", "FXFUSER_NUMERICS": "eager",
               "FXFUSER_GEMM": "fused", "FXFUSER_DETERMINISTIC": "true", "FXFUSER_FUEL": "12",
               "FXFUSER_CACHE_DIR": "c", "FXFUSER_DUMP": "d"}
    assert environ.keys() == ENVIRONMENT.keys()
    assert Config.resolve(environ=environ) == Config(
        Mode.DEFAULT, "interpret", True, "eager", "fused", True, 12, Path("c"), Path("d"))


def test_an_option_beats_its_variable_and_empty_is_unset() -> None:
    config = Config.resolve(options={"strict": False}, environ={"FXFUSER_STRICT": "1", "FXFUSER_FUEL": ""})
    assert (config.strict, config.fuel) == (False, None)


def test_few_knobs() -> None:
    assert len(ENVIRONMENT) == sum(bool(s.variable) for s in SETTINGS) <= 8


def test_the_readme_lists_every_variable_as_the_table_does() -> None:
    rows = re.findall(r"^\| `(FXFUSER_\w+)` \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert dict(rows) == ENVIRONMENT


def test_the_environment_is_read_in_config_alone() -> None:
    readers = {p.relative_to(ROOT).as_posix() for p in (ROOT / "fxfuser").rglob("*.py")
               if re.search(r"\bos\.environ\b|\bgetenv\b", p.read_text())}
    assert readers == {"fxfuser/config.py"}


def test_variables_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FXFUSER_FUEL", "3")
    assert variables_set() == {"FXFUSER_FUEL": "3"}


def test_eager_numerics_leave_products_to_the_library() -> None:
    assert Config(gemm="fused").products == "fused"
    assert Config(gemm="fused", numerics="eager").products == "library"
