"""Kernels in Triton's interpreter: how a machine without a GPU runs the very text that a GPU compiles.

Enters: a Kernel and tensors.  Leaves: the kernel's writes.  Neither TRITON_INTERPRET nor a decorator is needed:
the module text is parsed, `@triton.jit` taken off, assignments turned into tensors as Triton's own interpreter
does, and the functions called while `triton.language` is patched.  Invariant: after a launch every patch is undone,
and no other thread compiles meanwhile (`language_lock`).

A kernel may touch its own tensors only: an access outside their storages is an error here, where a GPU would read or
write a neighbour's memory, and a load that is masked off gives garbage, as it may on the device.

What Triton's interpreter gets wrong is put right while a kernel runs: rounding to bf16 (it truncates), casts of
other dtypes to bf16, products of bf16 (it multiplies their bits), the NaN of maxnum and minnum, the double rounding of
fma, counters of loops, which are tensors on the device; and reductions, which it does element by element, are done by
halving whole arrays.  Products of floats are exact to fp32 whatever their `input_precision`.
"""

from __future__ import annotations

import ast
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from fxfuser.errors import OutOfRange
from fxfuser.lowering.kernel import Dependence, Kernel
from fxfuser.ops import LIBDEVICE, memory_dtype
from fxfuser.runtime.build import DESCRIPTOR_ARCH, Variant, constants, language_lock
from fxfuser.runtime.launcher import Failed, Launch, grid_function

PROCESSORS = 4  # few, so that a persistent kernel's programs take several turns

_MISSING = object()


class Interpreted:
    """A kernel loaded for the interpreter; `bind` as the CUDA launcher's."""

    def __init__(self, kernel: Kernel) -> None:
        # one launch after the other
        self.kernel = replace(kernel, dependence=Dependence.ALONE) if kernel.dependence else kernel
        self._grid = grid_function(kernel, PROCESSORS)
        self._scope = _load(kernel)

    def bind(self, failed: Failed) -> Launch:
        return launching(self.run, failed)

    def run(self, arguments: Sequence[Any], debug: bool = True) -> None:
        """Runs all programs.  Tensors may have any strides and offset and may alias; CUDA tensors are copied.

        Raises OutOfRange where the kernel looks up a position that eager refuses, unless `debug` is False.
        """
        pointers = len(self.kernel.inputs) + len(self.kernel.outputs)
        tensors, sizes = arguments[:pointers], [int(n) for n in arguments[pointers:]]
        grid, extent = self._grid(*sizes)
        if grid <= 0:
            return
        with (language_lock, _on_host(tensors) as addresses, _patched(self._scope, _Fence(tensors, addresses), debug),
              np.errstate(all="ignore")):
            variant = Variant.of([a.address for a in addresses], sizes, extent)
            fixed = dict(constants(self.kernel, variant, DESCRIPTOR_ARCH))
            values = [interpreter._implicit_cvt(a) for a in [*addresses, *sizes]]
            interpreter.interpreter_builder.set_grid_dim(grid, 1, 1)
            for program in range(grid):
                interpreter.interpreter_builder.set_grid_idx(program, 0, 0)
                self._scope[self.kernel.name](*values, **fixed)


def launching(run: Callable[[Sequence[Any]], None], failed: Failed) -> Launch:
    """A launch function that runs its arguments; an error goes to `failed`, whose answer it returns."""
    def launch(*arguments: Any) -> bool:
        try:
            run(arguments)
        except Exception as error:
            return failed(error)
        return True

    return launch


class _Pointer:
    """What the interpreter wants to see of a tensor: its address and its dtype."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, memory_dtype(dtype)

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def _on_host(tensors: Sequence[torch.Tensor]) -> Iterator[list[_Pointer]]:
    """Pointers to the tensors; storages of other devices are copied to the host and back."""
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    pointers = []
    for tensor in tensors:
        address = tensor.data_ptr()
        if tensor.device.type != "cpu" and tensor.numel():
            base = tensor.untyped_storage().data_ptr()
            if base not in copies:
                device = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                copies[base] = (device, device.cpu())
            address += copies[base][1].data_ptr() - base
        pointers.append(_Pointer(address, tensor.dtype))
    yield pointers
    for device, host in copies.values():
        device.copy_(host)


class _Rewrite(ast.NodeTransformer):
    """Plain functions instead of jitted ones, and tensors instead of the numbers that are assigned."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list = [d for d in node.decorator_list if "triton.jit" not in ast.unparse(d)]
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if any(a.name == "libdevice" for a in node.names) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value = ast.Call(ast.Name("_tensor", ast.Load()), [node.value], [])
        return node


def _load(kernel: Kernel) -> dict[str, Any]:
    tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(kernel.source)))
    scope: dict[str, Any] = {
        "libdevice": SimpleNamespace(**{name: _libdevice(f) for name, f in LIBDEVICE.items()}), "_tensor": _tensor}
    exec(compile(tree, f"<fxfuser interpreted {kernel.name}>", "exec"), scope)
    return scope


def _tensor(value: Any) -> Any:
    return interpreter.interpreter_semantic.to_tensor(value, False)


def _libdevice(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        tensors = [_tensor(a) for a in arguments]
        arrays = np.broadcast_arrays(*(t.handle.data for t in tensors))
        result = function(*(torch.from_numpy(np.array(a)) for a in arrays)).numpy()
        dtype = tl.dtype(_TYPE_OF[result.dtype.name])
        shape = arrays[0].shape if any(t.type.is_block() for t in tensors) else ()
        return _block(result.reshape(shape), dtype)

    return call


_TYPE_OF = {"float16": "fp16", "float32": "fp32", "float64": "fp64", "bool": "int1", "int32": "int32",
            "int64": "int64", "int16": "int16", "int8": "int8", "uint8": "uint8"}


class _Fence:
    """Loads and stores that stay inside the storages of a kernel's tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], pointers: Sequence[_Pointer]) -> None:
        spans = [_span(t, p.address) for t, p in zip(tensors, pointers)]
        self._low, self._high = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def patches(self) -> dict[str, Any]:
        return {"create_masked_load": self._load, "create_masked_store": self._store,
                "create_atomic_rmw": self._atomic, "create_atomic_cas": self._exchange}

    def _check(self, what: str, pointers: Any, mask: Any = True) -> None:
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        touched = np.unique(pointers.data[np.broadcast_to(mask, pointers.data.shape)]).astype(np.uint64)
        inside = (touched[:, None] >= self._low) & (touched[:, None] + size <= self._high)
        outside = int((~inside.any(axis=1)).sum())
        if outside:
            raise IndexError(f"a kernel {what} {outside} elements outside of its tensors")

    def _load(self, pointers: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
        active = _array(mask)
        self._check("loads", pointers, active)
        element = pointers.get_element_ty()
        dtype = interpreter._get_np_dtype(element)
        garbage = np.nan if np.issubdtype(dtype, np.floating) else 0x55
        rest = np.full(pointers.data.shape, garbage).astype(dtype) if other is None else other.data
        return interpreter.TensorHandle(interpreter._interpreter.load(pointers.data, active, rest, dtype), element)

    def _store(self, pointers: Any, value: Any, mask: Any, *_: Any) -> Any:
        active = _array(mask)
        self._check("stores", pointers, active)
        return interpreter._interpreter.store(pointers.data, value.data, active)

    def _atomic(self, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._check("updates", pointers, mask.data)
        builder = interpreter.interpreter_builder
        return type(builder).create_atomic_rmw(builder, operation, pointers, value, mask, *rest)

    def _exchange(self, pointers: Any, *rest: Any) -> Any:
        self._check("updates", pointers)
        builder = interpreter.interpreter_builder
        return type(builder).create_atomic_cas(builder, pointers, *rest)


def _array(mask: Any) -> Any:
    """Tensor descriptors give their masks as arrays; one that a Python bool took part in may hold integers."""
    return (mask if isinstance(mask, np.ndarray) else mask.data).astype(bool, copy=False)


def _span(tensor: torch.Tensor, address: int) -> tuple[int, int]:
    """First and past-the-end address of the storage behind a pointer to `tensor`."""
    if not tensor.numel():  # which points nowhere
        return address, address
    start = address - int(tensor.storage_offset()) * tensor.element_size()
    return start, start + int(tensor.untyped_storage().nbytes())


@contextmanager
def _patched(scope: dict[str, Any], fence: _Fence, debug: bool) -> Iterator[None]:
    """`triton.language` interprets inside; outside it is as before."""
    with ExitStack() as stack:
        patches = interpreter._patch_lang(SimpleNamespace(__globals__=scope))
        stack.callback(patches.restore)
        builder = interpreter.interpreter_builder
        # integers wrap, as they do on the device: the interpreter would assert that they do not
        options = interpreter.InterpreterOptions(sanitize_overflow=False, debug=debug)
        for name, function in {**_CORRECTED, **fence.patches(), "options": options}.items():
            stack.callback(_restore, builder, name, vars(builder).get(name, _MISSING))
            setattr(builder, name, function)
        for owner in (tl, tl.core):
            for name, function in (("reduce", _reduce), ("associative_scan", _scan), ("range", _range)):
                stack.callback(setattr, owner, name, vars(owner)[name])
                setattr(owner, name, function)
        truth = vars(tl.tensor)["__bool__"]
        # Triton asks whether there is a number for masked lanes: a block of one 0 is one; and its scalars have one
        # dimension, of which numpy makes no integer from 2.5 on
        members = {"__bool__": lambda value: value.type.is_block() or truth(value), "__index__": _integer}
        for name, function in members.items():
            stack.callback(setattr, tl.tensor, name, vars(tl.tensor)[name])
            setattr(tl.tensor, name, function)
        yield


def _restore(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _values(handle: Any) -> Any:
    """An array of what the handle holds; its bf16 are bits in uint16."""
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16 and data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _cast(source: Any, target: Any) -> Any:
    """Any numeric cast; to bf16 it rounds to nearest even."""
    data, element = _values(source), target.scalar
    if element == tl.bfloat16:
        wide = torch.from_numpy(np.array(data))
        data = wide.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))
    else:
        data = data.astype(interpreter._get_np_dtype(target))
    return interpreter.TensorHandle(data, element)


def _dot(a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
    """Products and sums in the accumulator's dtype."""
    wide = accumulator.data.dtype
    product = np.matmul(_values(a).astype(wide), _values(b).astype(wide))
    return interpreter.TensorHandle((product + accumulator.data).astype(wide), accumulator.dtype.scalar)


def _erf(argument: Any) -> Any:
    data = torch.erf(torch.from_numpy(np.array(argument.data))).numpy()
    return interpreter.TensorHandle(data.reshape(argument.data.shape), argument.dtype.scalar)


def _fma(x: Any, y: Any, z: Any) -> Any:
    dtype = z.data.dtype
    wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
    return interpreter.TensorHandle(wide.astype(dtype), z.dtype.scalar)


def _binary(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: interpreter.TensorHandle(function(a.data, b.data), a.dtype.scalar)


def _assert(condition: Any, message: str) -> None:
    """The one thing that kernels assert is that positions are inside their dimensions."""
    if not np.all(condition.data):
        raise OutOfRange(message)


_CORRECTED: dict[str, Any] = {
    "create_assert": _assert,
    "cast_impl": _cast, "create_erf": _erf, "create_fma": _fma, "create_dot": _dot,
    "create_maxnumf": _binary(np.fmax), "create_minnumf": _binary(np.fmin),
}


def _range(first: Any, second: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """tl.range, whose counters are tensors: of 64 bits where a bound is."""
    start, stop = (0, first) if second is None else (first, second)
    wide = any(isinstance(bound, tl.tensor) and bound.dtype.primitive_bitwidth == 64 for bound in (start, stop, step))
    dtype = tl.int64 if wide else tl.int32
    return (_block(np.array(i), dtype) for i in range(*map(_integer, (start, stop, step))))


def _integer(value: Any) -> int:
    return int(value.handle.data.item() if isinstance(value, tl.tensor) else _plain(value))


def _fold(function: Callable[..., Any], low: list[Any], high: list[Any], dtypes: list[Any]) -> list[Any]:
    """One combination of two states, each a list of arrays."""
    results = function(*map(_block, low, dtypes), *map(_block, high, dtypes))
    results = list(results) if isinstance(results, (tuple, tl.tuple)) else [results]
    shape = np.shape(low[0])
    return [np.broadcast_to(_tensor(r).handle.data, shape) if shape else _tensor(r).handle.data.reshape(())
            for r in results]


def _states(input: Any) -> tuple[list[Any], list[Any]]:
    parts = list(input) if isinstance(input, (tuple, tl.tuple)) else [input]
    return [p.handle.data for p in parts], [p.dtype for p in parts]


def _like(input: Any, arrays: list[Any], dtypes: list[Any]) -> Any:
    blocks = tuple(map(_block, arrays, dtypes))
    return blocks if isinstance(input, (tuple, tl.tuple)) else blocks[0]


def _reduce(input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False, **_: Any) -> Any:
    """tl.reduce over an axis of a power of two, by combining its halves: O(log n) calls of `combine_fn`."""
    (arrays, dtypes), axis = _states(input), _plain(axis)
    rank = arrays[0].ndim
    if axis is None:
        arrays, axis = [a.reshape(-1) for a in arrays], 0
    while (size := arrays[0].shape[axis]) > 1:
        low, high = ([np.take(a, range(start, start + size // 2), axis) for a in arrays] for start in (0, size // 2))
        arrays = _fold(combine_fn, low, high, dtypes)
    arrays = [a.squeeze(axis) for a in arrays]
    if _plain(keep_dims):
        arrays = [np.expand_dims(a, axis if a.ndim else tuple(range(rank))) for a in arrays]
    return _like(input, arrays, dtypes)


def _scan(input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False, **_: Any) -> Any:
    """tl.associative_scan along one axis: each element takes in the ones 1, 2, 4, ... places before it."""
    (arrays, dtypes), axis = _states(input), _plain(axis)
    arrays = [np.flip(a, axis) for a in arrays] if _plain(reverse) else arrays
    length, step = arrays[0].shape[axis], 1
    place = np.arange(length).reshape([-1 if d == axis else 1 for d in range(arrays[0].ndim)])
    while step < length:
        together = _fold(combine_fn, [np.roll(a, step, axis) for a in arrays], arrays, dtypes)
        arrays = [np.where(place >= step, new, old) for new, old in zip(together, arrays)]
        step *= 2
    return _like(input, [np.flip(a, axis) for a in arrays] if _plain(reverse) else arrays, dtypes)


def _block(data: Any, dtype: Any) -> Any:
    """A Triton tensor that holds `data`; without dimensions it is a scalar, which the interpreter keeps as [1]."""
    data = np.asarray(data).astype(interpreter._get_np_dtype(dtype), copy=False)
    if data.ndim == 0:
        return tl.tensor(interpreter.TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


_lock = threading.Lock()


@cache
def _interpreted(kernel: Kernel) -> Interpreted:
    return Interpreted(kernel)


def interpreted(kernel: Kernel) -> Interpreted:
    """The kernel in the interpreter, loaded once."""
    with _lock:
        return _interpreted(kernel)
