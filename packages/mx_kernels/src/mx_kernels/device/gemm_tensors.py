"""The operands of a grouped GEMM as the tensors that TMA descriptors are made of: A (m, k, L), B (n, k, L), D (m, n, L).

| mode | A (m, k) | B (n, k) | D (m, n) |
|---|---|---|---|
| fprop | x (rows, K), ragged | w[e] (N, K) | y (rows, N), ragged |
| dgrad | dy (rows, N), ragged | w[e]ᵀ (K, N) | dx (rows, K), ragged |
| wgrad | dyᵀ (N, rows), ragged | xᵀ (K, rows), ragged | dw[e] (N, K) |

The last mode L is the expert. For a ragged operand it moves the matrix, so that one descriptor serves groups of any size:
entry (BIG - length + r, c, (start + length, BIG)) of a ragged (rows, C) matrix is its row start + r, and what lies past the
group's `length` rows lies past the first mode's extent, so that loads give zeros there and stores are dropped. BIG steps of
the second part of L take BIG rows back: addresses are sums modulo 2^64, and its pitch is 2^34 elements less a row. (A descriptor
based BIG rows before the matrix would need no such step, but the copy engine faults where a descriptor's base address is
not mapped, whatever it then reads: seen on an H200, 2026-11-30.)
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from mx_kernels.device.gemm_scheduler import Extent

BIG = 1 << 30  # more rows than any matrix has
WRAP = 1 << 34  # BIG times as many elements are a multiple of 2^64 bytes


@cute.jit
def gemm_tensors(mode: Constexpr[str], a, b, d, rows: Int32, n: Int32, k: Int32, groups: Int32):
    """Extent and (A, B, D) of contiguous operands; a, b, d are pointers, the weights (groups, n, k) in every mode."""
    if cutlass.const_expr(mode == "fprop"):
        tensors = (ragged(a, k), matrices(b, n, k, groups), ragged(d, n))
        extent = Extent(rows, rows, n, k, groups)
    elif cutlass.const_expr(mode == "dgrad"):
        tensors = (ragged(a, n), transposed(matrices(b, n, k, groups)), ragged(d, k))
        extent = Extent(rows, rows, k, n, groups)
    else:
        tensors = (transposed(ragged(a, n)), transposed(ragged(b, k)), matrices(d, n, k, groups))
        extent = Extent(rows, n, k, rows, groups)
    return extent, tensors


@cute.jit
def ragged(data, columns: Int32) -> cute.Tensor:
    """A matrix of contiguous rows as (BIG, columns, (BIG, BIG + 1)), see above."""
    pitch = cute.assume(Int64(columns), divby=8)
    back = cute.assume(Int64(WRAP) - pitch, divby=8)
    return cute.make_tensor(
        data, cute.make_layout((BIG, columns, (BIG, BIG + 1)), stride=(pitch, 1, (pitch, back)))
    )


@cute.jit
def ragged_rows(x: cute.Tensor, start: Int32, length: Int32, mode: Constexpr[int]) -> cute.Tensor:
    """Rows start … start + length of a ragged operand, which are its mode 0 or (transposed) 1."""
    view = x[(None, None, (start + length, BIG))]
    skipped = BIG - length
    if cutlass.const_expr(mode == 0):
        return cute.domain_offset((skipped, 0), view)
    return cute.domain_offset((0, skipped), view)


@cute.jit
def matrices(data, rows: Int32, columns: Int32, groups: Int32) -> cute.Tensor:
    """`groups` matrices as (rows, columns, groups)."""
    pitch = cute.assume(Int64(columns), divby=8)
    return cute.make_tensor(data, cute.make_layout((rows, columns, groups), stride=(pitch, 1, pitch * rows)))


@cute.jit
def transposed(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))
