"""A CUDA device for programs that only notes what it is asked to launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from fxfuser.runtime import launcher, programs
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.counters import Counters


class FakeDevice:
    """`launches`: (kernel, arguments); `ran`: "kernel MBLOCK" of each; those in `broken` cannot be loaded."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[Any, ...]]] = []
        self.ran: list[str] = []
        self.broken: set[str] = set()
        self.built: list[str] = []
        self.stream, self.capturing = 99, False

    def load(self, recipe: Any, made: Binary) -> Any:
        label = " ".join([recipe["name"], *(str(v) for n, v in recipe["constants"] if n == "MBLOCK")])
        self.built.append(label)
        if label in self.broken:
            raise RuntimeError("out of resources")
        return FakeCompiled(self, recipe["name"], label, len(recipe["constants"]))

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
        """The device in place of CUDA."""
        fake, counters = FakeDevice(), Counters(torch.device("cpu"))
        monkeypatch.setattr(launcher, "load", fake.load)
        monkeypatch.setattr(launcher, "obtain", lambda recipe, store: Binary("{}", b"cubin"))
        monkeypatch.setattr(launcher, "target_of", lambda device: GPUTarget("cuda", 90, 32))
        monkeypatch.setattr(launcher, "processors_of", lambda device: 132)
        monkeypatch.setattr(launcher, "device_calls",
                            lambda: {"current_device": lambda: 0, "stream": lambda device: fake.stream})
        monkeypatch.setattr(programs, "_device", lambda index: torch.device("cpu"))
        monkeypatch.setattr(programs, "_capturing", lambda: fake.capturing)
        monkeypatch.setattr(programs, "counters_on", lambda device: counters)
        launcher._cuda.cache_clear()
        programs._cuda_program.cache_clear()
        return fake


class FakeCompiled:
    function, packed_metadata = 17, ()

    def __init__(self, device: FakeDevice, name: str, label: str, constants: int) -> None:
        self.device, self.name, self.label, self.constants = device, name, label, constants

    def run(self, *args: Any) -> None:
        self.device.launches.append((self.name, args[9:len(args) - self.constants]))
        self.device.ran.append(self.label)
