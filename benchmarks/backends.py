"""The compilers that are compared, by name: name -> a function that wraps a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor import list_options

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

# Everything that helps any of the cases; a flag that a version of Inductor does not know is left out.
STRONGEST: Mapping[str, object] = {
    "max_autotune": True, "coordinate_descent_tuning": True, "combo_kernels": True, "benchmark_combo_kernel": True,
    "triton.enable_persistent_tma_matmul": True, "triton.enable_template_tma_store": True,
    "triton.cooperative_reductions": True, "triton.multi_kernel": 1, "benchmark_fusion": True,
    "max_autotune_gemm_search_space": "EXHAUSTIVE",
}


def strongest_options() -> dict[str, object]:
    known = set(list_options())
    return {name: value for name, value in STRONGEST.items() if name in known}


def _compiled(**arguments: Any) -> Compile:
    return lambda fn: torch.compile(fn, dynamic=False, **arguments)


BACKENDS: Mapping[str, Compile] = {
    "eager": lambda fn: fn,
    "aot_eager": _compiled(backend="aot_eager"),
    "inductor": _compiled(),
    "inductor-graphs": _compiled(mode="reduce-overhead"),
    "inductor-autotune": _compiled(mode="max-autotune-no-cudagraphs"),
    "inductor-strongest": lambda fn: torch.compile(fn, dynamic=False, options=strongest_options()),
    "fxfuser": _compiled(backend="fxfuser"),
    "fxfuser-graphs": _compiled(backend="fxfuser", mode="reduce-overhead"),
    "fxfuser-autotune": _compiled(backend="fxfuser", mode="max-autotune-no-cudagraphs"),
}


def with_dynamic(name: str, dynamic: bool | None) -> Compile:
    """The backend with `dynamic` as torch.compile takes it; eager stays eager."""
    if name == "eager":
        return BACKENDS[name]
    chosen = name.removesuffix("-autotune").removesuffix("-strongest")
    mode = None if chosen == name else "max-autotune-no-cudagraphs"
    return lambda fn: torch.compile(fn, backend=chosen, mode=mode, dynamic=dynamic)


def parse(text: str) -> tuple[str, ...]:
    """Names separated by commas.  Raises ValueError that lists the known names."""
    names = tuple(n.strip() for n in text.split(",") if n.strip())
    unknown = [n for n in names if n not in BACKENDS]
    if unknown:
        raise ValueError(f"unknown backend {', '.join(unknown)}; known: {', '.join(BACKENDS)}")
    return names
