"""What the op table says about one ATen overload, and what an emitter must offer to render it.

Values inside a kernel: fp16 and bf16 are held as fp32, float8 as its bytes, bool is `tl.int1`, every other dtype is
itself.  A POINTWISE row's text is written in the *compute dtype* of the node (see `promotion`); the emitter converts it
to the node's own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Protocol, Union

import torch

from fxfuser.ops.monoids import Monoid


class Kind(Enum):
    """What a node does to data."""

    POINTWISE = "pointwise"  # one result element from the operands' elements at the same (broadcast) index
    VIEW = "view"  # aliases its first operand, nothing moves
    LAYOUT = "layout"  # the same elements at other places
    FACTORY = "factory"  # a value from its own index alone
    REDUCTION = "reduction"  # folds dimensions with a monoid
    SCAN = "scan"  # folds a dimension up to each of its elements
    GATHER = "gather"  # reads at positions that a tensor holds
    SCATTER = "scatter"  # stores in a tensor that exists, at positions that others hold
    GEMM = "gemm"
    ATTENTION = "attention"  # a kernel of its own, with which nothing is fused
    EXTERN = "extern"  # runs as its ATen call


class Promotion(Enum):
    """How the dtype in which a node computes follows from its operands."""

    DEFAULT = "default"  # PyTorch's promotion of all operands; 0-d tensors and Python scalars are weak
    INT_TO_FLOAT = "int_to_float"  # the same, then integers and bool become the default float
    DIVISION = "division"  # INT_TO_FLOAT, or DEFAULT where the node has a rounding mode
    ALWAYS_BOOL = "always_bool"  # computes as DEFAULT, the result is bool
    RESULT = "result"  # the node's own dtype: casts, fills and other ops that say where they go
    NONE = "none"  # the row reads every operand as it is


class Operands(Protocol):
    """What an emit function sees of its node; implemented by the emitter and, in tests, by a harness."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""

    @property
    def result(self) -> torch.dtype:
        """The node's ATen dtype."""

    @property
    def precise(self) -> bool:
        """Whether numerics="eager" asks for IEEE division and roots and accurate exponentials."""

    def text(self, i: int) -> str:
        """The i-th schema argument, a tensor or a number, as an atom of Triton text in the compute dtype."""

    def raw(self, i: int) -> str:
        """The same without the promotion cast."""

    def source(self, i: int) -> torch.dtype:
        """The ATen dtype of the i-th argument; of a number: bool, int64 or float64."""

    def argument(self, name: str, default: Any = None) -> Any:
        """A non-tensor argument by schema name: a Python value, or text for a symbolic size."""

    def has(self, name: str) -> bool:
        """Whether the argument `name` is given and not None."""

    def let(self, text: str) -> str:
        """Binds a temporary and returns its name."""

    def literal(self, value: bool | int | float) -> str:
        """A Python number as an atom of Triton text in the compute dtype."""


Emit = Union[str, Callable[[Operands], str]]


@dataclass(frozen=True)
class Row:
    """One ATen overload.

    `emit` is a format string over operand texts or a function of `Operands`; only POINTWISE rows have one, and arange.
    `operands` are the schema positions that take part in promotion (None: all that hold a tensor or a number).
    `rounded` rows read operands rounded to their ATen dtype, as a comparison or a floor shows half a unit of
    the last place; `rounds` rows (casts) round their result, whatever the numerics.  `steep` rows leave float16's
    range from operands well within it: a power, an exponential, a pole.  `dtypes`, where given, are the promoted ATen
    dtypes that the row admits.  The text of one that `agrees` may fold a tile to one number, by which it takes a branch
    or counts a loop: there all warps of a program wait for the last.
    """

    kind: Kind
    emit: Emit | None = None
    promote: Promotion = Promotion.DEFAULT
    operands: tuple[int, ...] | None = None
    rounded: bool = False
    rounds: bool = False
    steep: bool = False
    monoid: Monoid | None = None  # of a REDUCTION or a SCAN: how it folds
    cost: int = 1  # 1 cheap, 4 a division, 16 transcendental
    libdevice: tuple[str, ...] = ()  # the libdevice functions that the text may call
    dtypes: frozenset[torch.dtype] | None = None
    agrees: bool = False
    reason: str = ""  # why it runs as its ATen call, where it does
