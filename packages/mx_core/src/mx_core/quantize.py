"""Quantise a tensor to MX and back, along any axis; the arithmetic is defined in docs/numerics.md."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import check_axis, check_choice, check_dtype, check_format, expected
from mx_core.chunks import map_chunks
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

    def quantize_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
        values = blocks.to(torch.float32)
        # fp32 magnitudes are ordered like their bit patterns, Inf and NaN on top: an integer maximum needs
        # no special case for them.
        amax = (values.view(torch.int32) & 0x7FFF_FFFF).amax(1).view(torch.float32)
        scale = amax_to_e8m0(amax, format, rounding)
        # The product with a power of two is exact, or underflows and then its code is 0 either way. Where
        # the scale is NaN, the whole block becomes NaN.
        return encode(values * e8m0_to_reciprocal(scale)[:, None], format), scale

    blocks = _split_blocks(x.detach(), axis)
    codes, scale = map_chunks(quantize_blocks, blocks, row_elements=BLOCK_SIZE * blocks.shape[2])
    data = to_storage(_join_blocks(codes, x.shape, axis), format)
    scale = scale.reshape(_scale_shape(x.shape, axis)).movedim(axis, -1)
    return MXTensor(data, to_layout(scale, layout), format, axis, layout, x.shape)


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
    codes = _split_blocks(from_storage(mx.data, mx.format, mx.shape[-1]), mx.axis)
    scale = linear_scale(mx).movedim(-1, mx.axis).reshape(codes.shape[0], 1, codes.shape[2])
    values = decode(codes, mx.format, exact).mul_(e8m0_to_float(scale, exact))
    return _join_blocks(values, mx.shape, mx.axis).to(dtype)


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


def _scale_shape(shape: torch.Size, axis: int) -> tuple[int, ...]:
    """`shape` with the number of blocks, ceil(L/32), in place of L."""
    position = len(shape) + axis
    return (*shape[:position], -(-shape[axis] // BLOCK_SIZE), *shape[position + 1 :])


def _split_blocks(x: Tensor, axis: int) -> Tensor:
    """(..., L, ...) -> (blocks, 32, elements behind `axis`), the last block of each L zero-padded."""
    missing = -x.shape[axis] % BLOCK_SIZE
    if missing:
        x = pad(x, (0, 0) * (-axis - 1) + (0, missing))
    position = x.ndim + axis
    blocks = math.prod(x.shape[:position]) * (x.shape[axis] // BLOCK_SIZE)
    return x.reshape(blocks, BLOCK_SIZE, math.prod(x.shape[position + 1 :]))


def _join_blocks(blocks: Tensor, shape: torch.Size, axis: int) -> Tensor:
    """The inverse of `_split_blocks` for a tensor of this shape; contiguous."""
    position = len(shape) + axis
    length, padded = shape[axis], _scale_shape(shape, axis)[position] * BLOCK_SIZE
    whole = blocks.reshape(*shape[:position], padded, *shape[position + 1 :])
    if padded == length:
        return whole
    if torch.compiler.is_compiling():
        # Inductor's C++ backend (seen in torch 2.15) turns a loop over `length` that divides by 32 into one of
        # length // 32 steps of 32, without the rest. Indices that it cannot see through (the "| 0") prevent it.
        return whole.index_select(axis, torch.arange(length, device=whole.device) | 0)
    return whole.narrow(axis, 0, length).contiguous()
