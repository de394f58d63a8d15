"""The op table: one row per ATen overload, read by passes, domain, segmenter and emitter."""

from fxfuser.ops.cast import (
    FLOATS,
    INTEGERS,
    SUPPORTED,
    TRITON_NAMES,
    convert,
    float8_bits,
    is_negative_zero,
    literal,
    operand,
    ranged,
    rounded,
)
from fxfuser.ops.hints import BOUNDARY, blocks_of, boundary, fuse
from fxfuser.ops.monoids import MONOIDS, Folds, Monoid, Packing, Step
from fxfuser.ops.prelude import PRELUDE, prelude_for
from fxfuser.ops.promotion import (
    FLOAT8,
    argument,
    compute_dtype,
    kernel_dtype,
    memory_dtype,
    named_argument,
    opmath,
    promoted,
    promoted_dtype,
)
from fxfuser.ops.reductions import HALF_MARK, reduction_dims, reduction_dtype
from fxfuser.ops.row import Emit, Kind, Operands, Promotion, Row
from fxfuser.ops.scatter_into import REFUSED, SCATTER_INTO, memory_of
from fxfuser.ops.special import LIBDEVICE
from fxfuser.ops.table import (
    TABLE,
    UPDATE_MARK,
    add_row,
    is_view,
    is_write_back,
    kind_of,
    reads_rounded,
    render,
    row,
    unsupported,
)

__all__ = [
    "BOUNDARY", "Emit", "FLOAT8", "FLOATS", "Folds", "HALF_MARK", "INTEGERS", "Kind", "LIBDEVICE", "MONOIDS", "Monoid",
    "Operands", "PRELUDE", "Packing", "Promotion", "REFUSED", "Row", "SCATTER_INTO", "Step", "SUPPORTED", "TABLE",
    "TRITON_NAMES", "UPDATE_MARK", "add_row", "argument", "blocks_of", "boundary", "compute_dtype", "convert",
    "float8_bits", "fuse", "is_negative_zero", "is_view", "is_write_back", "kernel_dtype", "kind_of", "literal",
    "memory_dtype", "memory_of", "named_argument", "operand", "opmath", "prelude_for", "promoted", "promoted_dtype",
    "ranged", "reads_rounded", "reduction_dims", "reduction_dtype", "render", "rounded", "row", "unsupported",
]
