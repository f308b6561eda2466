"""Grouped fprop, dgrad and wgrad in float64: the definition that every GEMM is tested against.

An MX operand's float64 values, code * 2^(scale byte - 127), are exact, and so is every product of two of
them; only the sums round, at 2^-53. Results are rounded to fp32 first and from there to a narrower output
type, as an fp32 accumulator is.
"""

import torch
from torch import Tensor

from mx_core.checks import check_choice, check_shape, check_tensor, expected
from mx_core.formats import BLOCK_SIZE, RowMap, ScaleLayout
from mx_core.groups import aligned_offs, aligned_rows, compact_rows, group_ends
from mx_core.quantize import dequantize
from mx_core.scale_layout import from_blocked
from mx_core.tensor import MXTensor

Operand = Tensor | MXTensor


def grouped_fprop(
    x: Operand,
    w: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float64,
    row_map: RowMap = RowMap.ALIGNED,
    sum_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`y = x @ w[g].T` for the rows of every group g.

    Args:
        x: (rows, K); MXTensor with axis -1, or a floating-point tensor.
        w: (E, N, K); MXTensor with axis -1, or a floating-point tensor.
        offs: int32 (E,), ends of the groups; None for one group of all rows (then E = 1).
        out_dtype: dtype of the result; float64 keeps the sums as they are.
        row_map: the row map of x and of the result.
        sum_dtype: float64 is the definition; see `float32_holds` for when float32 is good enough.

    Returns:
        (rows, N); rows that belong to no group are 0.
    """
    check_operand("x", x, ndim=2, axis=-1)
    check_operand("w", w, ndim=3, axis=-1)
    check_shape("x", x, None, w.shape[2])
    return _rows_times_weights(x, w, offs, out_dtype, row_map, sum_dtype, transpose=True)


def grouped_dgrad(
    dy: Operand,
    w: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float64,
    row_map: RowMap = RowMap.ALIGNED,
    sum_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`dx = dy @ w[g]` for the rows of every group g.

    Args:
        dy: (rows, N); MXTensor with axis -1, or a floating-point tensor.
        w: (E, N, K); MXTensor with axis -2, or a floating-point tensor.
        offs: int32 (E,), ends of the groups; None for one group of all rows (then E = 1).
        out_dtype: dtype of the result; float64 keeps the sums as they are.
        row_map: the row map of dy and of the result.
        sum_dtype: float64 is the definition; see `float32_holds` for when float32 is good enough.

    Returns:
        (rows, K); rows that belong to no group are 0.
    """
    check_operand("dy", dy, ndim=2, axis=-1)
    check_operand("w", w, ndim=3, axis=-2)
    check_shape("dy", dy, None, w.shape[1])
    return _rows_times_weights(dy, w, offs, out_dtype, row_map, sum_dtype, transpose=False)


def grouped_wgrad(
    dy: Operand,
    x: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.float64,
    row_map: RowMap = RowMap.ALIGNED,
    sum_dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`dw[g] = dy[g].T @ x[g]`: sums over the rows of every group g.

    Args:
        dy: (rows, N); MXTensor with axis -2 and ALIGNED rows, or a floating-point tensor.
        x: (rows, K); likewise.
        offs: int32 (E,), ends of the groups; None for one group of all rows.
        out_dtype: dtype of the result; float64 keeps the sums as they are.
        row_map: the row map of dy and x.
        sum_dtype: float64 is the definition; see `float32_holds` for when float32 is good enough.

    Returns:
        (E, N, K); exact 0 for a group without rows.
    """
    check_operand("dy", dy, ndim=2, axis=-2)
    check_operand("x", x, ndim=2, axis=-2)
    check_shape("x", x, dy.shape[0], None)
    row_map = check_choice("row_map", row_map, RowMap)
    if row_map is RowMap.COMPACT and offs is not None and any(isinstance(t, MXTensor) for t in (dy, x)):
        raise ValueError(
            expected("row_map", "aligned rows with MX operands (blocks run down the rows)", row_map)
        )
    dy_values, x_values = exact_values(dy, sum_dtype), exact_values(x, sum_dtype)
    rows = row_ranges(offs, dy.shape[0], row_map)
    dw = dy_values.new_zeros(len(rows), dy.shape[1], x.shape[1], dtype=out_dtype)
    for g, (start, end) in enumerate(rows):
        if end > start:
            dw[g] = round_sums(dy_values[start:end].T @ x_values[start:end], out_dtype)
    return dw


def _rows_times_weights(
    x: Operand,
    w: Operand,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    row_map: RowMap,
    sum_dtype: torch.dtype,
    *,
    transpose: bool,
) -> Tensor:
    row_map = check_choice("row_map", row_map, RowMap)
    rows = row_ranges(offs, x.shape[0], row_map)
    if w.shape[0] != len(rows):
        raise ValueError(expected("w", f"{len(rows)} groups", f"{w.shape[0]}"))
    x_values = exact_values(x, sum_dtype, offs if row_map is RowMap.COMPACT else None)
    out = x_values.new_zeros(x.shape[0], w.shape[1 if transpose else 2], dtype=out_dtype)
    for g, (start, end) in enumerate(rows):
        if end > start:
            w_values = exact_values(w[g], sum_dtype)
            out[start:end] = round_sums(
                x_values[start:end] @ (w_values.T if transpose else w_values), out_dtype
            )
    return out


def float32_holds(a: Operand, b: Operand) -> bool:
    """Whether float32 sums of a @ b.T lose nothing but their own rounding: no value, product or sum overflows.

    Operand values are then exact in float32. A product below 2^-126 is rounded to a multiple of 2^-149, as in any
    float32 accumulator. Reads the scales on the host.
    """
    largest = [int(x.scale.max()) if isinstance(x, MXTensor) and x.scale.numel() else 127 for x in (a, b)]
    return max(largest) <= 200 and sum(largest) <= 2 * 127 + 60


def exact_values(
    x: Operand, dtype: torch.dtype = torch.float64, compact_offs: Tensor | None = None
) -> Tensor:
    """The values of an operand, exact in float64, and in float32 where they are below 2^128.

    `compact_offs` is needed for COMPACT rows with blocked scales: their scale rows are ALIGNED, so that every
    group's scales start on a tile.
    """
    if isinstance(x, Tensor):
        return x.to(dtype)
    if compact_offs is not None and x.layout is ScaleLayout.BLOCKED_128X4:
        rows, length = x.shape
        rows_P = aligned_rows(rows, compact_offs.shape[0])
        scale_P = from_blocked(x.scale, rows_P, -(-length // BLOCK_SIZE))
        x = MXTensor(
            x.data, compact_rows(scale_P, compact_offs, rows), x.format, -1, ScaleLayout.LINEAR, x.shape
        )
    return dequantize(x, dtype)


def row_ranges(offs: Tensor | None, rows: int, row_map: RowMap) -> list[tuple[int, int]]:
    """[start, end) of every group's real rows; reads offs on the host."""
    if offs is None:
        return [(0, rows)]
    ends = group_ends(offs, rows)
    starts = [0, *ends[:-1]]
    if row_map is RowMap.COMPACT:
        return list(zip(starts, ends, strict=True))
    *aligned, last_unit = aligned_offs(offs).tolist()
    if last_unit > rows:
        raise ValueError(expected("rows of aligned groups", f"at least {last_unit}", rows))
    return [(a, a + end - start) for a, start, end in zip(aligned, starts, ends, strict=True)]


def round_sums(sums: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Sums in the output dtype: through fp32, unless that is float64."""
    return sums if out_dtype is torch.float64 else sums.to(torch.float32).to(out_dtype)


def check_operand(name: str, x: Operand, *, ndim: int, axis: int) -> None:
    """TypeError or ValueError unless `x` is an operand of `ndim` axes with blocks along `axis`."""
    if not isinstance(x, MXTensor) and not check_tensor(name, x).is_floating_point():
        raise TypeError(expected(name, "an MXTensor or a floating-point tensor", x.dtype))
    if len(x.shape) != ndim:
        raise ValueError(expected(name, f"{ndim} axes", f"shape {tuple(x.shape)}"))
    if isinstance(x, MXTensor) and x.axis != axis:
        raise ValueError(expected(name, f"blocks along axis {axis}", f"axis {x.axis}"))
