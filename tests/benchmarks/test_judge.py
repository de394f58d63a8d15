"""What the correctness sweep calls wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks import checks, gpu_check
from benchmarks.judge import compare, exact, judge
from benchmarks.threads import in_threads

CPU = torch.device("cpu")


def test_equal_results_are_good() -> None:
    x = torch.randn(5, 7)
    assert compare(x, x, x.double()).fault is None


@pytest.mark.parametrize("change, fault", [
    (lambda x: x.double(), "dtype"), (lambda x: x[:2], "shape"), (lambda x: x.t().contiguous().t(), "strides"),
    (lambda x: x + 1e-3, "error"), (lambda x: torch.where(x == x.max(), float("nan"), x), "NaN or infinity"),
])
def test_faults_are_named(change, fault) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(5, 7)
    assert compare(change(x), x, x.double()).fault.startswith(fault)  # type: ignore[union-attr]


def test_a_missing_nan_is_a_fault_and_an_equal_one_is_not() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert compare(x.clone(), x, x.double()).fault is None
    assert compare(torch.tensor([1.0, 2.0, float("inf")]), x, x.double()).fault is not None


def test_low_precision_is_judged_against_the_reference() -> None:
    reference = torch.randn(1000, dtype=torch.float64)
    eager = (reference * (1 + 0.02)).bfloat16()  # eager is poor here: being closer than it is no fault
    assert compare(reference.bfloat16(), eager, reference).fault is None
    assert compare((reference * 1.2).bfloat16(), eager, reference).fault is not None


def test_integers_are_exact() -> None:
    x = torch.arange(10)
    assert exact(x, x).fault is None
    assert "first [9]" in exact(torch.where(x == 9, 0, x), x).fault  # type: ignore[operator]


def test_strides_of_unit_and_empty_dimensions_do_not_matter() -> None:
    x = torch.randn(1, 5)
    assert compare(x.as_strided((1, 5), (77, 1)), x, x).fault is None
    empty = torch.empty(0, 5)
    assert compare(empty.as_strided((0, 5), (1, 1)), empty, empty).fault is None


def test_results_that_are_no_tensors() -> None:
    assert judge([3, None], [3, None], [3, None]).fault is None
    assert judge([3], [4], [4]).fault is not None
    assert judge([3], [torch.ones(())], [torch.ones(())]).fault is not None


def test_makers_repeat_themselves() -> None:
    for check in list(checks.CHECKS.values())[::7]:
        if check.cuda_only:
            continue
        a, b = (gpu_check.make_inputs(check, 0, CPU) for _ in range(2))
        for x, y in zip(a, b):
            assert compare(x, y, y).fault is None if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("fn, text", [
    (lambda fn: fn, None),
    (lambda fn: lambda x, y: fn(x, y) + 1e-3, "error"),
    (lambda fn: lambda x, y: (fn(x, y), x.add_(1))[0], "result 1"),  # an input that eager leaves alone
    (lambda fn: lambda x, y: torch.empty_like(x), "NaN or infinity"),  # what nothing wrote is poison
    (lambda fn: lambda x, y: fn(x, y) + torch.rand(()) * 1e-8, "is not that of run 0"),
])
def test_planted_faults_are_found(fn, text, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    draws = iter(range(1000))
    monkeypatch.setattr(torch, "rand", lambda size: torch.tensor(float(next(draws))))
    monkeypatch.setattr(gpu_check.backends, "with_dynamic", lambda name, dynamic: fn)
    check = checks.Check("planted", lambda x, y: x * 0.001 + y * 0.001, (checks.of((9, 5), (9, 5)),))
    fault = gpu_check.run_check(check, "planted", CPU).fault
    assert fault is None if text is None else text in fault  # type: ignore[operator]


def test_errors_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    monkeypatch.setitem(checks.CHECKS, "fails", checks.Check("fails", fail, (checks.of((3,)),)))
    row = gpu_check.outcome("fails", "eager", CPU)
    assert row["status"] == "error" and row["detail"] == "ValueError: no"


def test_threads_hand_back_results_and_errors() -> None:
    assert list(in_threads(3, lambda i: i * i)) == [0, 1, 4]
    with pytest.raises(ZeroDivisionError):
        list(in_threads(2, lambda i: 1 // i))
