"""A matrix product in two kernels: one that leaves sums, one that does all else.

Enters: products.  Leaves: which of them that may pay for (the domains, `Parts`, are made in gemm.py).  The first
kernel reads the factors, which are nearly all the bytes; it leaves each sum over k in one part or several, in fp32.
The second adds the parts up as it would load the product, so it may be any kernel that could follow the product: one
that reduces rows and broadcasts the results back needs each row in one place only.

    h = residual + x @ w.t(); rms_norm(h)     head   parts[s, m, n] of x @ w.t()
                                              rest   row m: h[n] = residual[n] + sum over s; rms_norm(h)

A product of a matrix and a vector leaves one part, by a kernel with a row of the matrix in each program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

from torch import fx

from fxfuser.domain.points import Domain
from fxfuser.domain.products import matrix_product
from fxfuser.domain.size import Size, hint
from fxfuser.domain.tensors import shape_of, strides_of

LIGHT = 4  # times the bytes of a product's sums: fewer bytes of factors would not hide them
LEAST_DEPTH = 512  # of a product whose parts are worth a second kernel
MOST_SUMS = 1 << 21  # elements of a product beyond which whole tiles fill a device anyway
LEAST_ROWS = 256  # results of a product with a vector: fewer rows leave most of a device idle


@dataclass(frozen=True, eq=False)
class Parts:
    """`head` leaves the sums of products, which are its outputs; `rest` computes the group's outputs from them."""

    head: Domain
    rest: Domain


def light(product: fx.Node) -> bool:
    """Whether a product's factors outweigh its sums so much that leaving these in memory costs little."""
    factors = matrix_product(product)
    if factors is None:
        return False
    sums, depth = count(shape_of(product)), count(shape_of(factors.left)[-1:])
    read = sum(count(shape_of(n)) * n.meta["val"].dtype.itemsize for n in (factors.left, factors.right))
    return depth >= LEAST_DEPTH and sums <= MOST_SUMS and read >= LIGHT * 4 * sums


def with_vector(product: fx.Node) -> bool:
    """Whether a product is of a vector, or one for each step of a batch, and a matrix whose rows, k, are contiguous.

    A matrix with contiguous columns is no sum within a row: tiles load it better.
    """
    factors, (rows, columns) = matrix_product(product), shape_of(product)[-2:]
    if factors is None:
        return False
    if rows == 1:
        return strides_of(factors.right)[-2] == 1
    return columns == 1 and strides_of(factors.left)[-1] == 1


def count(sizes: Iterable[Size]) -> int:
    """The product of sizes, symbols at their usual hints."""
    total = 1
    for size in sizes:
        total *= hint(size, {})
    return total
