"""SwiGLU over the experts' ALIGNED rows, forward and backward, plain or fused with quantisation.

h (P, 2H) holds gate in its first H columns, up in the others; a = silu(gate)·up in fp32, not rounded to bf16 before it
is quantised. The backward one recomputes a and folds the router weight w of every row in: with da = d<loss>/da of the
unweighted expert output, dh = w·∂<da, a>/∂h, dw = <da, a>.
"""

from typing import NamedTuple

import torch
from mx_core import MXFP8_E4M3, ElementFormat, MXTensor, ScaleLayout, ScaleRounding
from mx_core.checks import check_choice, check_format
from torch import Tensor

from mx_kernels import registry
from mx_kernels.ops.checks import check_aligned, check_matrix, check_offs, check_tensor
from mx_kernels.ops.library import define_prepared
from mx_kernels.outputs import as_mx, empty_quantized
from mx_kernels.problem import DSwigluProblem, SwigluProblem


def _check_h(h: Tensor, offs: Tensor) -> None:
    check_matrix("h", h, multiple_of=64)  # two halves of a multiple of 32
    check_aligned("h", h.shape[0])
    check_offs(offs, h.device)


def _check_backward(da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor) -> None:
    _check_h(h, offs)
    check_tensor("da", da, (h.shape[0], h.shape[1] // 2), (h.dtype,), h.device)
    check_tensor("slot_weights", slot_weights, (h.shape[0],), (torch.float32,), h.device)


def _swiglu(h, offs, backend="auto"):
    _check_h(h, offs)
    return registry.prepare("swiglu", backend, (h, offs), SwigluProblem, h.dtype)


def _swiglu_fake(h, offs, backend="auto"):
    _check_h(h, offs)
    return h.new_empty(h.shape[0], h.shape[1] // 2)


def _swiglu_quantize(h, offs, format, rounding, layout, backend="auto"):
    _check_h(h, offs)
    problem = SwigluProblem, h.dtype, format, rounding, layout
    return registry.prepare("swiglu", backend, (h, offs), *problem)


def _swiglu_quantize_fake(h, offs, format, rounding, layout, backend="auto"):
    _check_h(h, offs)
    SwigluProblem(h.dtype, format, rounding, layout)
    return empty_quantized(h, (h.shape[0], h.shape[1] // 2), -1, format, layout)


def _dswiglu(da, h, slot_weights, offs, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    return registry.prepare("dswiglu", backend, (da, h, slot_weights, offs), DSwigluProblem, h.dtype)


def _dswiglu_fake(da, h, slot_weights, offs, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    return torch.empty_like(h), torch.empty_like(da), torch.empty_like(slot_weights)


def _dswiglu_quantize(da, h, slot_weights, offs, format, rounding, layout, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    problem = DSwigluProblem, h.dtype, format, rounding, layout, True
    return registry.prepare("dswiglu", backend, (da, h, slot_weights, offs), *problem)


def _dswiglu_quantize_fake(da, h, slot_weights, offs, format, rounding, layout, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    DSwigluProblem(h.dtype, format, rounding, layout)
    return (
        *empty_quantized(h, h.shape, -1, format, layout),
        *empty_quantized(h, h.shape, -2, format, layout),
        *empty_quantized(h, da.shape, -2, format, layout),
        torch.empty_like(slot_weights),
    )


def _dswiglu_quantize_row(da, h, slot_weights, offs, format, rounding, layout, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    problem = DSwigluProblem, h.dtype, format, rounding, layout, False
    return registry.prepare("dswiglu", backend, (da, h, slot_weights, offs), *problem)


def _dswiglu_quantize_row_fake(da, h, slot_weights, offs, format, rounding, layout, backend="auto"):
    _check_backward(da, h, slot_weights, offs)
    DSwigluProblem(h.dtype, format, rounding, layout)
    return *empty_quantized(h, h.shape, -1, format, layout), torch.empty_like(slot_weights)


_BACKWARD_ARGS = "Tensor da, Tensor h, Tensor slot_weights, Tensor offs"
_QUANTIZE_ARGS = "str format, str rounding, str layout, str backend='auto'"

define_prepared(
    "swiglu(Tensor h, Tensor offs, str backend='auto') -> Tensor", _swiglu, _swiglu_fake, differentiable=True
)
define_prepared(
    f"swiglu_quantize(Tensor h, Tensor offs, {_QUANTIZE_ARGS}) -> (Tensor data, Tensor scale)",
    _swiglu_quantize,
    _swiglu_quantize_fake,
)
define_prepared(
    f"dswiglu({_BACKWARD_ARGS}, str backend='auto') -> (Tensor dh, Tensor wa, Tensor dw)",
    _dswiglu,
    _dswiglu_fake,
)
define_prepared(
    f"dswiglu_quantize({_BACKWARD_ARGS}, {_QUANTIZE_ARGS}) -> (Tensor dh_row, Tensor dh_row_scale, Tensor dh_col, "
    "Tensor dh_col_scale, Tensor a_col, Tensor a_col_scale, Tensor dw)",
    _dswiglu_quantize,
    _dswiglu_quantize_fake,
)
define_prepared(
    f"dswiglu_quantize_row({_BACKWARD_ARGS}, {_QUANTIZE_ARGS}) -> (Tensor dh_row, Tensor dh_row_scale, Tensor dw)",
    _dswiglu_quantize_row,
    _dswiglu_quantize_row_fake,
)


def swiglu(h: Tensor, offs: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate)·up: h (P, 2H) with offs (E,) → (P, H) in h's dtype, zero in the groups' padding. Differentiable."""
    return torch.ops.mx.swiglu(h, offs, backend)


def swiglu_quantize(
    h: Tensor,
    offs: Tensor,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    rounding: ScaleRounding = ScaleRounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4,
    backend: str = "auto",
) -> MXTensor:
    """Quantise silu(gate)·up along H. Not differentiable.

    Args:
        h: (P, 2H) bf16 or fp32, ALIGNED rows, H a multiple of 32.
        offs: int32 (E,), ends of the groups' real rows.
        format: element format, or its name.
        rounding: the scale rule.
        layout: of the scales.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        MXTensor (P, H), axis -1.
    """
    format, layout = check_format("format", format), check_choice("layout", layout, ScaleLayout)
    data, scale = torch.ops.mx.swiglu_quantize(h, offs, format.name, rounding, layout, backend)
    return as_mx((data, scale), format, -1, layout, (h.shape[0], h.shape[1] // 2))


class SwigluGrads(NamedTuple):
    """Results of `dswiglu_quantize`: dh (P, 2H) along 2H and along the rows, a (P, H) along the rows, dw (P,) fp32."""

    dh_row: MXTensor
    dh_col: MXTensor
    a_col: MXTensor
    dw: Tensor


def dswiglu_quantize(
    da: Tensor,
    h: Tensor,
    slot_weights: Tensor,
    offs: Tensor,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    rounding: ScaleRounding = ScaleRounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4,
    backend: str = "auto",
) -> SwigluGrads:
    """The backward of SwiGLU with the router weight folded in, all that the GEMMs after it need from one read.

    Args:
        da: (P, H), h's dtype: gradient at a, without the router weight.
        h: (P, 2H) bf16 or fp32, ALIGNED rows.
        slot_weights: float32 (P,), router weight of every row.
        offs: int32 (E,), ends of the groups' real rows.
        format: element format, or its name.
        rounding: the scale rule.
        layout: of the scales.
        backend: "auto", "cpu", "sm90" or "sm100".
    """
    format, layout = check_format("format", format), check_choice("layout", layout, ScaleLayout)
    *parts, dw = torch.ops.mx.dswiglu_quantize(
        da, h, slot_weights, offs, format.name, rounding, layout, backend
    )
    return SwigluGrads(
        as_mx(parts[0:2], format, -1, layout, h.shape),
        as_mx(parts[2:4], format, -2, layout, h.shape),
        as_mx(parts[4:6], format, -2, layout, da.shape),
        dw,
    )
