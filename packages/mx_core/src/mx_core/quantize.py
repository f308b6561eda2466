"""Quantise a tensor to MX and back, along any axis; the arithmetic is defined in docs/numerics.md."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import check_axis, check_choice, check_dtype, check_format, expected
from mx_core.codec import decode, encode, from_storage, to_storage
from mx_core.formats import BLOCK_SIZE, ElementFormat, ScaleLayout, ScaleRounding
from mx_core.scale_layout import from_blocked, to_layout
from mx_core.scaling import amax_to_e8m0, e8m0_to_float, e8m0_to_reciprocal
from mx_core.tensor import MXTensor, moved_last


def quantize(
    x: Tensor,
    format: ElementFormat,
    *,
    axis: int = -1,
    rounding: ScaleRounding = ScaleRounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.LINEAR,
) -> MXTensor:
    """Quantise `x` in blocks of 32 consecutive elements along `axis`.

    A block with a NaN or an Inf gets scale byte 255 and NaN codes; a block of zeros gets scale byte 0 and
    keeps the signs; a short last block counts as padded with zeros.

    Args:
        x: at least one axis (two with blocked scales), any strides; float32, bfloat16 or float16. float64
            is refused: rounding it to fp32 first would round twice.
        format: the element format.
        axis: the reduction axis of the product that the result goes into.
        rounding: the scale rule.
        layout: the layout of the scales.

    Returns:
        MXTensor of x's shape, row-major whatever the axis; scales as MXTensor describes.
    """
    check_dtype("x", x, torch.float32, torch.bfloat16, torch.float16)
    if x.ndim == 0:
        raise ValueError(expected("x", "at least one axis", "shape ()"))
    format = check_format("format", format)
    rounding = check_choice("rounding", rounding, ScaleRounding)
    layout = check_choice("layout", layout, ScaleLayout)
    axis = check_axis("axis", axis, x.ndim)
    if layout is ScaleLayout.BLOCKED_128X4 and x.ndim < 2:
        raise ValueError(expected("x", "two axes or more with blocked scales", f"shape {tuple(x.shape)}"))

    blocks = _split_blocks(x.detach().to(torch.float32).contiguous(), axis)
    # fp32 magnitudes are ordered like their bit patterns, with Inf and then NaN on top: an integer maximum
    # needs no special case for them.
    amax = (blocks.view(torch.int32) & 0x7FFF_FFFF).amax(axis).view(torch.float32)
    scale = amax_to_e8m0(amax, format, rounding)
    # Times a power of two is exact; where the product underflows, its code is 0 either way. A scale of NaN
    # makes the whole block NaN.
    codes = encode(blocks * e8m0_to_reciprocal(scale).unsqueeze(axis), format)
    codes = _join_blocks(codes, axis, x.shape[axis])
    scale = scale.movedim(axis, -1)
    return MXTensor(to_storage(codes, format), to_layout(scale, layout), format, axis, layout, x.shape)


def dequantize(mx: MXTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of `mx`, code * 2^(scale byte - 127), in its logical shape.

    Args:
        mx: any MXTensor whose scale rows are its own (not those of grouped COMPACT rows with blocked
            scales, whose rows only `offs` can place: see mx_core.reference).
        dtype: float64 is always exact. float32 is exact too, subnormals included, but for magnitudes of 2^128
            and more, which become Inf. bfloat16 and float16 are the float32 result, rounded once.
    """
    if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(expected("dtype", "torch.float64, float32, bfloat16 or float16", dtype))
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    values = _split_blocks(decode(from_storage(mx.data, mx.format, mx.shape[-1]), mx.format, exact), mx.axis)
    scale = e8m0_to_float(linear_scale(mx), exact).movedim(-1, mx.axis).unsqueeze(mx.axis)
    return _join_blocks(values * scale, mx.axis, mx.shape[mx.axis]).to(dtype)


def linear_scale(mx: MXTensor) -> Tensor:
    """The scale bytes of `mx` in the linear layout: (..., R, ceil(L/32)), the quantised axis last."""
    if mx.layout is ScaleLayout.LINEAR:
        return mx.scale
    *_, rows, length = moved_last(mx.shape, mx.axis)
    if mx.scale.shape[-5] != -(-rows // 128):
        raise ValueError(
            expected("scale", f"the row tiles of {rows} rows", f"{mx.scale.shape[-5]} row tiles")
        )
    return from_blocked(mx.scale, rows, -(-length // BLOCK_SIZE))


def _split_blocks(x: Tensor, axis: int) -> Tensor:
    """(..., L, ...) -> (..., ceil(L/32), 32, ...), zero-padded: `axis` becomes the axis inside a block."""
    length = x.shape[axis]
    blocks = -(-length // BLOCK_SIZE)
    if blocks * BLOCK_SIZE != length:
        x = pad(x, (0, 0) * (-axis - 1) + (0, blocks * BLOCK_SIZE - length))
    return x.unflatten(axis, (blocks, BLOCK_SIZE))


def _join_blocks(x: Tensor, axis: int, length: int) -> Tensor:
    """The inverse of `_split_blocks`: `axis` counts from the end, as there."""
    return x.flatten(axis - 1, axis).narrow(axis, 0, length).contiguous()
