"""CUDA launches: the only file that knows how Triton's compiled kernels are called (3.6 to 3.7).

Enters: a Kernel and a device.  Leaves: `launch(in0, ..., out0, ..., n0, ...) -> bool`, specialised Python that
costs a few microseconds: it reads the pointers, looks up the grid and the variant, and calls the compiled kernel.
Invariant: the variant that runs assumes nothing that this call's arguments do not meet.  Past `MOST_VARIANTS`
variants of one kernel only the general one is built.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from typing import Any, Callable

import torch
import triton
from triton.backends.compiler import GPUTarget

from fxfuser.lowering.kernel import Kernel
from fxfuser.runtime.build import Options, Variant, build, constants, is_wide, language_lock, size_class

Launch = Callable[..., bool]
Failed = Callable[[Exception], bool]

MOST_VARIANTS = 8
_MOST_SHAPES = 4096

# pointers, sizes and names are filled in; see `_source`
_TEMPLATE = """
def launch({params}):
    {pointers}
    shape = shapes.get({sizes})
    if shape is None:
        shape = new_shape({sizes})
    grid, key = shape
    if grid == 0:
        return True
    device = {device}
    if device != current_device():
        with on_device(device):
            return launch({params})
    if ({union}) & 15:
        key = (key, {misaligned})
    variant = variants.get(key)
    try:
        if variant is None:
            variant = new_variant(key, ({pointer_tuple}), {sizes})
        run, function, metadata, tail, compiled = variant
        queue = stream(device)
        run(grid, 1, 1, queue, function, metadata, *hooks(compiled, grid, queue), {arguments}*tail)
    except Exception as error:
        return failed(error)
    return True
"""


def grid_function(kernel: Kernel) -> Callable[..., tuple[int, int]]:
    """(programs, largest offset) as a function of n0, n1, ...; block names are those of the kernel's tile."""
    scope: dict[str, Any] = {"cdiv": lambda a, b: -(-a // b), "max": max, "min": min, **dict(kernel.tile.blocks)}
    names = ", ".join(f"n{i}" for i in range(kernel.sizes))
    made: Callable[..., tuple[int, int]] = eval(f"lambda {names}: (({kernel.grid}), ({kernel.extent}))", scope)
    return made


class Cuda:
    """A kernel on one device: its variants, shared by all segments that have this kernel."""

    def __init__(self, kernel: Kernel, device: int | None, options: Options) -> None:
        self.kernel, self.device, self.options = kernel, device, options
        self._grid = grid_function(kernel)
        self._lock = threading.Lock()
        self._shapes: dict[tuple[int, ...], tuple[int, Any]] = {}
        self._variants: dict[Any, Any] = {}
        self._built: dict[Variant, Any] = {}
        self._code = compile(_source(kernel, device), f"<fxfuser launch {kernel.name}>", "exec")

    def bind(self, failed: Failed) -> Launch:
        """The launch function; a failure to build or launch goes to `failed`, whose answer is returned."""
        scope: dict[str, Any] = {
            "shapes": self._shapes, "variants": self._variants, "new_shape": self.shape, "new_variant": self.variant,
            "on_device": torch.cuda.device, "hooks": _hooks, "failed": failed, **_device_calls()}
        exec(self._code, scope)
        launch: Launch = scope["launch"]
        return launch

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, Any]:
        """(grid, key of what the sizes allow to assume), remembered by the sizes."""
        grid, extent = self._grid(*sizes)
        found = (max(grid, 0), (tuple(map(size_class, sizes)), is_wide(extent)))
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        self._shapes[sizes] = found
        return found

    def assumptions(self, pointers: tuple[int, ...], sizes: tuple[int, ...]) -> Variant:
        """The strongest variant that these arguments meet, or the general one if there are too many."""
        _, (classes, wide) = self.shape(sizes)
        variant = Variant(tuple(p % 16 == 0 for p in pointers), classes, wide)
        if variant in self._built or len(self._built) < MOST_VARIANTS:
            return variant
        return Variant.general(self.kernel)

    def variant(self, key: Any, pointers: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """(run, function, metadata, constexpr arguments, kernel) for `key`, built at most once.

        The current device must be the kernel's.  Raises what Triton raises; a failure is remembered.
        """
        with self._lock:
            if key not in self._variants:
                assumed = self.assumptions(pointers, sizes)
                if assumed not in self._built:
                    self._built[assumed] = self._load(assumed)
                found = self._built[assumed]
                if isinstance(found, Exception):
                    raise found
                self._variants[key] = found
            return self._variants[key]

    def _load(self, variant: Variant) -> Any:
        try:
            compiled = build(self.kernel, variant, current_target(), self.options)
            run = compiled.run  # loads the binary onto the current device
            tail = tuple(v for _, v in constants(self.kernel, self.kernel.tile, variant.wide))
            return run, compiled.function, compiled.packed_metadata, tail, compiled
        except Exception as error:
            return error


def current_target() -> GPUTarget:
    """What to build for on the current device."""
    major, minor = torch.cuda.get_device_capability()
    return GPUTarget("cuda", 10 * major + minor, 32)


@cache
def _cuda(kernel: Kernel, device: int | None, options: Options) -> Cuda:
    return Cuda(kernel, device, options)


def cuda(kernel: Kernel, device: int | None, options: Options = Options()) -> Cuda:
    """The kernel on this device; kernels that differ in their notes alone are one."""
    with language_lock:
        return _cuda(replace(kernel, notes=(), candidates=()), device, options)


def _device_calls() -> dict[str, Callable[..., int]]:
    """The current device, and the current stream's handle as a function of the device: a call into C each."""
    active = triton.runtime.driver.active
    return {"current_device": active.get_current_device, "stream": active.get_current_stream}


def _hooks(compiled: Any, grid: int, stream: int) -> tuple[Any, Any, Any]:
    """(launch metadata, enter, exit): profilers hang hooks there; where there are none Triton wants None."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    if not (enter and enter.calls) and not (leave and leave.calls):
        return None, None, None
    return compiled.launch_metadata((grid, 1, 1), stream), enter, leave


def _source(kernel: Kernel, device: int | None) -> str:
    pointers = [f"in{i}" for i in range(len(kernel.inputs))] + [f"out{i}" for i in range(len(kernel.outputs))]
    sizes = [f"n{i}" for i in range(kernel.sizes)]
    addresses = [f"p{i}" for i in range(len(pointers))]
    return _TEMPLATE.format(
        params=", ".join([*pointers, *sizes]),
        pointers="; ".join(f"{a} = {p}.data_ptr()" for a, p in zip(addresses, pointers)),
        sizes=f"({', '.join(sizes)}{',' * (len(sizes) == 1)})",
        device="current_device()" if device is None else device,
        union=" | ".join(addresses),
        misaligned=", ".join(f"{a} & 15 != 0" for a in addresses),
        pointer_tuple="".join(f"{a}, " for a in addresses),
        arguments="".join(f"{a}, " for a in [*addresses, *sizes]))
