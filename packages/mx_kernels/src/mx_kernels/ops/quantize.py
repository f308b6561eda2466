"""Quantise to MX: along the last axis ("row"), along the rows ("col"), or both from one read of the data.

torch.ops.mx.quantize, quantize_dual on raw tensors; `quantize_mx`, `quantize_mx_dual` return MXTensors.
"""

from typing import Any

import torch
from mx_core import MXFP8_E4M3, ElementFormat, MXTensor, RowMap, ScaleLayout, ScaleRounding
from mx_core.checks import check_choice, check_format, expected
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import registry
from mx_kernels.ops.checks import check_offs
from mx_kernels.ops.library import define_prepared
from mx_kernels.outputs import as_mx, empty_quantized
from mx_kernels.problem import FLOAT_DTYPES, QuantizeProblem

RCEIL, BLOCKED = ScaleRounding.RCEIL, ScaleLayout.BLOCKED_128X4


def _check(x: Tensor, offs: Tensor | None) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(expected("x", "torch.bfloat16 or torch.float32", x.dtype))
    if x.ndim != 2 and x.ndim != 3:
        raise ValueError(expected("x", "2 or 3 axes", f"shape {tuple(x.shape)}"))
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(expected("x", "a contiguous last axis", f"strides {x.stride()}"))
    if offs is not None:
        check_offs(offs, x.device)
        if x.ndim != 2:
            raise ValueError(expected("x", "(M, K) with offs", f"shape {tuple(x.shape)}"))


def _orientation(axis: int, offs: Tensor | None, row_map: str) -> str:
    if axis != -1 and axis != -2:
        raise ValueError(expected("axis", "-1 or -2", axis))
    if axis == -2 and offs is not None and row_map != RowMap.ALIGNED:
        raise ValueError(
            expected("row_map", "aligned when rows are quantised in groups along the rows", row_map)
        )
    return "row" if axis == -1 else "col"


def _quantize(x, format, axis, rounding, layout, offs=None, row_map: Any = "aligned", backend="auto"):
    _check(x, offs)
    orientation = _orientation(axis, offs, row_map)
    return registry.prepare(
        "quantize", backend, (x, offs), QuantizeProblem,
        x.dtype, format, rounding, layout, orientation, x.ndim, offs is not None, row_map,
    )  # fmt: skip


def _quantize_dual(x, format, rounding, layout, offs=None, backend="auto"):
    _check(x, offs)
    return registry.prepare(
        "quantize", backend, (x, offs), QuantizeProblem,
        x.dtype, format, rounding, layout, "dual", x.ndim, offs is not None, "aligned",
    )  # fmt: skip


def _empty(x: Tensor, axis: int, format: str, layout: str, offs: Tensor | None, row_map: str):
    if offs is None:
        return empty_quantized(x, x.shape, axis, format, layout)
    rows_M, K = x.shape
    rows_P = aligned_rows(rows_M, offs.shape[0])
    if row_map == RowMap.ALIGNED:
        return empty_quantized(x, (rows_P, K), axis, format, layout)
    scale_rows = rows_M if layout == ScaleLayout.LINEAR else rows_P
    return empty_quantized(x, (rows_M, K), axis, format, layout, scale_rows)


def _quantize_fake(x, format, axis, rounding, layout, offs=None, row_map: Any = "aligned", backend="auto"):
    _check(x, offs)
    QuantizeProblem(x.dtype, format, rounding, layout, _orientation(axis, offs, row_map), row_map=row_map)
    return _empty(x, axis, format, layout, offs, row_map)


def _quantize_dual_fake(x, format, rounding, layout, offs=None, backend="auto"):
    _check(x, offs)
    QuantizeProblem(x.dtype, format, rounding, layout, "dual")
    return *_empty(x, -1, format, layout, offs, "aligned"), *_empty(x, -2, format, layout, offs, "aligned")


define_prepared(
    "quantize(Tensor x, str format, int axis, str rounding, str layout, Tensor? offs=None, str row_map='aligned', "
    "str backend='auto') -> (Tensor data, Tensor scale)",
    _quantize,
    _quantize_fake,
)
define_prepared(
    "quantize_dual(Tensor x, str format, str rounding, str layout, Tensor? offs=None, str backend='auto') "
    "-> (Tensor row_data, Tensor row_scale, Tensor col_data, Tensor col_scale)",
    _quantize_dual,
    _quantize_dual_fake,
)


def quantize_mx(
    x: Tensor,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    rounding: ScaleRounding = RCEIL,
    layout: ScaleLayout = BLOCKED,
    offs: Tensor | None = None,
    row_map: RowMap = RowMap.ALIGNED,
    backend: str = "auto",
) -> MXTensor:
    """Quantise the matrices of x in blocks of 32 along `axis`. Not differentiable.

    Args:
        x: (…, R, C), bf16 or fp32, last axis contiguous.
        format: element format, or its name.
        axis: -1, or -2 for blocks that run down the rows (the data stay row-major).
        rounding: the scale rule.
        layout: of the scales.
        offs: int32 (E,), ends of the row groups of x (M, K); then no block spans two groups.
        row_map: with `offs`, where rows go: ALIGNED gives P = aligned_rows(M, E) rows, padding zero; COMPACT keeps x's
            rows (zeros at and past offs[-1]) but blocked scales have P rows.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        MXTensor of shape x.shape, or (P, K).

    Raises:
        TypeError, ValueError: an argument does not fit.
        NoBackendError: no backend can run it; with each one's reason.
    """
    format = check_format("format", format)
    layout = check_choice("layout", layout, ScaleLayout)
    batch = x.shape[:-2]
    x_3 = x.reshape(-1, *x.shape[-2:]) if x.ndim > 3 else x
    data, scale = torch.ops.mx.quantize(x_3, format.name, axis, rounding, layout, offs, row_map, backend)
    if x.ndim > 3:
        data, scale = data.view(*batch, *data.shape[1:]), scale.view(*batch, *scale.shape[1:])
    return as_mx((data, scale), format, axis, layout, (*data.shape[:-1], x.shape[-1]))


def quantize_mx_dual(
    x: Tensor,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    rounding: ScaleRounding = RCEIL,
    layout: ScaleLayout = BLOCKED,
    offs: Tensor | None = None,
    backend: str = "auto",
) -> tuple[MXTensor, MXTensor]:
    """Both orientations of x (R, C) or (E, R, C) from one read: as quantize_mx with axis -1 and with axis -2.

    With `offs` both are ALIGNED. Arguments and errors as for `quantize_mx`.
    """
    format = check_format("format", format)
    layout = check_choice("layout", layout, ScaleLayout)
    parts = torch.ops.mx.quantize_dual(x, format.name, rounding, layout, offs, backend)
    shape = (*parts[0].shape[:-1], x.shape[-1])
    return (
        as_mx(parts[:2], format, -1, layout, shape),
        as_mx(parts[2:], format, -2, layout, shape),
    )
