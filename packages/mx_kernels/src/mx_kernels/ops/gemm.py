"""Grouped GEMMs: fprop, dgrad and wgrad of E weight matrices, on MX, bf16 or fp32 operands.

| mode  | a                              | b                                    | result      |
|-------|--------------------------------|--------------------------------------|-------------|
| fprop | x (rows, K), blocks along K    | w (E, N, K), blocks along K          | y (rows, N) |
| dgrad | dy (rows, N), blocks along N   | w (E, N, K), blocks along N (axis -2) | dx (rows, K) |
| wgrad | dy (rows, N), blocks down rows | x (rows, K), blocks down rows        | dw (E, N, K) |

The op takes blocked scales only; the functions here take MXTensors of either layout.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from mx_core import FORMATS, MXTensor, RowMap, ScaleLayout
from mx_core.checks import expected
from mx_core.codec import storage_dtype
from mx_core.groups import align_rows, aligned_rows
from mx_core.quantize import linear_scale
from mx_core.scale_layout import to_blocked
from torch import Tensor

from mx_kernels import registry
from mx_kernels.ops.checks import check_aligned, check_offs, check_tensor
from mx_kernels.ops.library import define
from mx_kernels.outputs import scale_shape
from mx_kernels.problem import FLOAT_DTYPES, PLAIN_FORMATS, GemmProblem, plain_format

Operand = Tensor | MXTensor
BLOCKED = ScaleLayout.BLOCKED_128X4
_UINT8 = (torch.uint8,)


def _expected_shapes(
    mode: str,
    a_shape: tuple[int, ...],
    a_format: str,
    b_shape: tuple[int, ...],
    b_format: str,
    num_groups: int | None,
    row_map: str,
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    """Shapes of the result, of a's scales and of b's (None: they have none). ValueError if a and b do not fit."""
    rows, a_cols = _logical_shape("a", a_shape, a_format, 2)
    E = 1 if num_groups is None else num_groups
    if num_groups is not None and row_map == RowMap.ALIGNED:
        check_aligned("a", rows)
    # Each operand as a matrix of (rows, reduced size): what its scales are shaped by.
    if mode == "wgrad":
        b_rows, b_cols = _logical_shape("b", b_shape, b_format, 2)
        _check_equal("rows", rows, b_rows)
        result, a_matrix, b_matrix, b_batch = (E, a_cols, b_cols), (a_cols, rows), (b_cols, rows), ()
    else:
        E_w, N, K = _logical_shape("b", b_shape, b_format, 3)
        _check_equal("groups (1 without offs)", E, E_w)
        reduced, kept = (K, N) if mode == "fprop" else (N, K)
        _check_equal("K" if mode == "fprop" else "N", a_cols, reduced)
        scale_rows = aligned_rows(rows, E) if num_groups is not None and row_map == RowMap.COMPACT else rows
        result, a_matrix, b_matrix, b_batch = (rows, kept), (scale_rows, reduced), (kept, reduced), (E,)
    if a_format in PLAIN_FORMATS:
        return result, None, None
    return result, scale_shape(*a_matrix, BLOCKED), (*b_batch, *scale_shape(*b_matrix, BLOCKED))


def _logical_shape(name: str, shape: tuple[int, ...], format: str, ndim: int) -> tuple[int, ...]:
    """Shape of an operand in values, from that of its data."""
    if len(shape) != ndim:
        raise ValueError(expected(name, f"{ndim} axes", f"shape {tuple(shape)}"))
    if format in PLAIN_FORMATS or FORMATS[format].bits == 8:
        return shape
    return (*shape[:-1], shape[-1] * 8 // FORMATS[format].bits)


def _check_equal(what: str, of_a: int, of_b: int) -> None:
    if of_a != of_b:
        raise ValueError(expected("a, offs and b", f"the same number of {what}", f"{of_a} and {of_b}"))


#: Sizes repeat from call to call. Symbolic ones, which fakes see, cannot be looked up.
_remembered_shapes = functools.lru_cache(maxsize=4096)(_expected_shapes)


@functools.cache
def _data_dtypes(format: str) -> tuple[torch.dtype]:
    """The dtype that an operand's data must have, as check_tensor takes it."""
    return (PLAIN_FORMATS[format] if format in PLAIN_FORMATS else storage_dtype(FORMATS[format]),)


def _checked_shape(
    shapes_of: Callable[..., tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]],
    mode: str,
    a: Tensor,
    a_scale: Tensor | None,
    a_format: str,
    b: Tensor,
    b_scale: Tensor | None,
    b_format: str,
    offs: Tensor | None,
    row_map: str,
) -> tuple[int, ...]:
    """Check all operands (the format names have been); the shape of the result."""
    device, a_shape, b_shape = a.device, a.shape, b.shape
    if offs is not None:
        check_offs(offs, device)
    groups = None if offs is None else offs.shape[0]
    check_tensor("a", a, a_shape, _data_dtypes(a_format), device)
    check_tensor("b", b, b_shape, _data_dtypes(b_format), device)
    result, a_scale_shape, b_scale_shape = shapes_of(
        mode, a_shape, a_format, b_shape, b_format, groups, row_map
    )
    _check_scale("a_scale", a_scale, a_scale_shape, a_format, device)
    _check_scale("b_scale", b_scale, b_scale_shape, b_format, device)
    return result


def _check_scale(
    name: str, scale: Tensor | None, shape: tuple[int, ...] | None, format: str, device: torch.device
) -> None:
    if scale is not None and shape is not None:
        check_tensor(name, scale, shape, _UINT8, device)
    elif scale is not None:
        raise ValueError(expected(name, f"None with {format} operands", "a tensor"))
    elif shape is not None:
        raise ValueError(expected(name, f"blocked scales of shape {tuple(shape)}", "None"))


# fmt: off
def _grouped_gemm(
    gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, out_dtype, row_map: Any = "aligned", backend="auto"
):
    run = registry.bind(
        "grouped_gemm", backend, a.device, GemmProblem,
        gemm_mode, a_format, b_format, out_dtype, row_map, offs is not None,
    )
    _checked_shape(_remembered_shapes, gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, row_map)
    return run(a, a_scale, b, b_scale, offs, None)


def _grouped_gemm_fake(
    gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, out_dtype, row_map: Any = "aligned", backend="auto"
):
    GemmProblem(gemm_mode, a_format, b_format, out_dtype, row_map, offs is not None)
    shape = _checked_shape(_expected_shapes, gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, row_map)
    return a.new_empty(shape, dtype=out_dtype)


def _grouped_gemm_out(
    gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, out, accumulate=False, row_map: Any = "aligned",
    backend="auto",
):
    run = registry.bind(
        "grouped_gemm", backend, a.device, GemmProblem,
        gemm_mode, a_format, b_format, out.dtype, row_map, offs is not None, accumulate,
    )
    shape = _checked_shape(_remembered_shapes, gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, row_map)
    check_tensor("out", out, shape, FLOAT_DTYPES, a.device)
    run(a, a_scale, b, b_scale, offs, out)


def _grouped_gemm_out_fake(
    gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, out, accumulate=False, row_map: Any = "aligned",
    backend="auto",
):
    GemmProblem(gemm_mode, a_format, b_format, out.dtype, row_map, offs is not None, accumulate)
    shape = _checked_shape(_expected_shapes, gemm_mode, a, a_scale, a_format, b, b_scale, b_format, offs, row_map)
    check_tensor("out", out, shape, FLOAT_DTYPES, a.device)
# fmt: on


#: `gemm_mode`, not `mode`: torch.compile wraps ops that write to an argument in one that has a `mode` of its own.
_OPERANDS = "str gemm_mode, Tensor a, Tensor? a_scale, str a_format, Tensor b, Tensor? b_scale, str b_format, Tensor? offs"
define(
    f"grouped_gemm({_OPERANDS}, ScalarType out_dtype, str row_map='aligned', str backend='auto') -> Tensor",
    _grouped_gemm,
    _grouped_gemm_fake,
)
define(
    f"grouped_gemm_out({_OPERANDS}, Tensor(a!) out, bool accumulate=False, str row_map='aligned', "
    "str backend='auto') -> ()",
    _grouped_gemm_out,
    _grouped_gemm_out_fake,
)


# what users call -----------------------------------------------------------------------------------------------------


def _parts(
    name: str, x: Operand, axis: int, offs: Tensor | None, row_map: str
) -> tuple[Tensor, Tensor | None, str]:
    """(data, blocked scale, format) of an operand."""
    if isinstance(x, Tensor):
        return x, None, plain_format(x.dtype)
    if not isinstance(x, MXTensor):
        raise TypeError(expected(name, "an MXTensor or a torch.Tensor", type(x).__name__))
    if x.axis != axis:
        raise ValueError(expected(name, f"blocks along axis {axis}", f"axis {x.axis}"))
    if x.layout is ScaleLayout.BLOCKED_128X4:
        return x.data, x.scale, x.format.name
    scale = linear_scale(x)
    if offs is not None and axis == -1 and x.ndim == 2 and row_map == RowMap.COMPACT:
        scale = align_rows(scale, offs)
    return x.data, to_blocked(scale), x.format.name


def _gemm(
    mode: str,
    a: tuple[str, Operand, int],
    b: tuple[str, Operand, int],
    offs: Tensor | None,
    out_dtype: torch.dtype | None,
    row_map: str,
    out: Tensor | None,
    accumulate: bool,
    backend: str,
) -> Tensor:
    operands = (*_parts(*a, offs, row_map), *_parts(*b, offs, row_map), offs)
    if out is None:
        if accumulate:
            raise ValueError(expected("out", "a float32 tensor to accumulate into", "None"))
        if out_dtype is None:
            out_dtype = a[1].dtype if isinstance(a[1], Tensor) else torch.bfloat16
        return torch.ops.mx.grouped_gemm(mode, *operands, out_dtype, row_map, backend)
    if out_dtype is not None and out_dtype != out.dtype:
        raise TypeError(expected("out_dtype", f"out's dtype {out.dtype}", out_dtype))
    torch.ops.mx.grouped_gemm_out(mode, *operands, out, accumulate, row_map, backend)
    return out


def grouped_gemm_fprop(
    x: Operand,
    w: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    row_map: RowMap = RowMap.ALIGNED,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Y = x @ w[g].T for the rows of every group g. Not differentiable: `mx_grouped_mm` is.

    Args:
        x: (rows, K), bf16, fp32 or MXTensor with axis -1 (quantised with the same `offs` and `row_map`).
        w: (E, N, K), bf16, fp32 or MXTensor with axis -1.
        offs: int32 (E,), ends of the groups' real rows; None for one group (then E = 1).
        out_dtype: torch.bfloat16 or torch.float32; default x's dtype, bf16 for an MXTensor.
        row_map: of x and of the result.
        out: write here instead.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        (rows, N). COMPACT: rows at and past offs[-1] are 0. ALIGNED: a group's padding is 0, rows past the last
        unit are unspecified.
    """
    return _gemm("fprop", ("x", x, -1), ("w", w, -1), offs, out_dtype, row_map, out, False, backend)


def grouped_gemm_dgrad(
    dy: Operand,
    w: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    row_map: RowMap = RowMap.ALIGNED,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Dx = dy @ w[g]: dy (rows, N) with axis -1, w (E, N, K) with axis -2 → (rows, K). The rest as for fprop."""
    return _gemm("dgrad", ("dy", dy, -1), ("w", w, -2), offs, out_dtype, row_map, out, False, backend)


def grouped_gemm_wgrad(
    dy: Operand,
    x: Operand,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    row_map: RowMap = RowMap.ALIGNED,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """dw[g] = dy[g].T @ x[g], sums over the rows of every group; exact 0 for a group without rows.

    Args:
        dy: (rows, N), bf16, fp32, or MXTensor with axis -2 and ALIGNED rows.
        x: (rows, K), likewise.
        offs: int32 (E,), ends of the groups' real rows; None for one group of all rows.
        out_dtype: torch.bfloat16 or torch.float32; default dy's dtype, bf16 for an MXTensor.
        row_map: of dy and x; MX operands are ALIGNED.
        out: write here instead, (E, N, K).
        accumulate: add to `out`, which must be float32.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        (E, N, K).
    """
    return _gemm("wgrad", ("dy", dy, -2), ("x", x, -2), offs, out_dtype, row_map, out, accumulate, backend)
