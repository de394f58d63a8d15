"""The collector rests while a graph is compiled, and is afterwards as it was."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from fxfuser.garbage import uncollected


def test_it_rests_inside_and_runs_again_after_an_error() -> None:
    with pytest.raises(ValueError), uncollected():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_who_had_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_last_of_several_threads_turns_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with uncollected():
        thread.start()
        assert entered.wait(10)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_compiled_function_leaves_it_on() -> None:
    x = torch.randn(8, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="fxfuser", options={"executor": "reference"})(x).backward()
    assert gc.isenabled() and x.grad is not None
