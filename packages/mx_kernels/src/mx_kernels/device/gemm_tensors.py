"""The operands of a grouped GEMM as the tensors that TMA descriptors are made of: A (m, k, L), B (n, k, L), D (m, n, L).

| mode | A (m, k) | B (n, k) | D (m, n) |
|---|---|---|---|
| fprop | x (rows, K), ragged | w[e] (N, K) | y (rows, N), ragged |
| dgrad | dy (rows, N), ragged | w[e]ᵀ (K, N) | dx (rows, K), ragged |
| wgrad | dyᵀ (N, rows), ragged | xᵀ (K, rows), ragged | dw[e] (N, K) |

The last mode L is the expert, or for a ragged operand the row at which a group ends. One descriptor then serves groups of
any size: entry (rows - length + r, c, start + length) of a ragged (rows, C) matrix is its row start + r, and what lies past
the group's `length` rows lies past the first mode, so that loads give zeros there and stores are dropped.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64

from mx_kernels.device.gemm_scheduler import Extent

RAGGED = 1 << 30  # extent of the mode that moves a ragged view: more rows than any matrix has


@cute.jit
def gemm_tensors(mode: Constexpr[str], a, b, d, rows: Int32, n: Int32, k: Int32, groups: Int32):
    """Extent and (A, B, D) of contiguous operands; a, b, d are pointers, the weights (groups, n, k) in every mode."""
    if cutlass.const_expr(mode == "fprop"):
        tensors = (ragged(a, rows, k), matrices(b, n, k, groups), ragged(d, rows, n))
        extent = Extent(rows, rows, n, k, groups)
    elif cutlass.const_expr(mode == "dgrad"):
        tensors = (ragged(a, rows, n), transposed(matrices(b, n, k, groups)), ragged(d, rows, k))
        extent = Extent(rows, rows, k, n, groups)
    else:
        tensors = (transposed(ragged(a, rows, n)), transposed(ragged(b, rows, k)), matrices(d, n, k, groups))
        extent = Extent(rows, n, k, rows, groups)
    return extent, tensors


@cute.jit
def ragged(data, rows: Int32, columns: Int32) -> cute.Tensor:
    """A (rows, columns) matrix as (rows, columns, RAGGED), see above."""
    pitch = cute.assume(Int64(columns), divby=8)
    return cute.make_tensor(
        data - pitch * rows, cute.make_layout((rows, columns, RAGGED), stride=(pitch, 1, pitch))
    )


@cute.jit
def matrices(data, rows: Int32, columns: Int32, groups: Int32) -> cute.Tensor:
    """`groups` matrices as (rows, columns, groups)."""
    pitch = cute.assume(Int64(columns), divby=8)
    return cute.make_tensor(data, cute.make_layout((rows, columns, groups), stride=(pitch, 1, pitch * rows)))


@cute.jit
def transposed(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))
