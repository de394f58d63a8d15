"""The op table: one row per ATen overload, read by passes, domain, segmenter and emitter."""

from fxfuser.ops.prelude import PRELUDE
from fxfuser.ops.promotion import compute_dtype, kernel_dtype, opmath, promoted
from fxfuser.ops.row import Emit, Kind, Operands, Promotion, Row
from fxfuser.ops.table import LIBDEVICE, TABLE, is_view, kind_of, reduction_dims, reduction_dtype, row, unsupported

__all__ = [
    "Emit", "Kind", "LIBDEVICE", "Operands", "PRELUDE", "Promotion", "Row", "TABLE", "compute_dtype", "is_view",
    "kernel_dtype", "kind_of", "opmath", "promoted", "reduction_dims", "reduction_dtype", "row", "unsupported",
]
