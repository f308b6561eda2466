"""Quantised results: their shapes, empty tensors for the fakes and the backends that allocate them, MXTensors of them."""

from collections.abc import Sequence

import torch
from mx_core import ElementFormat, MXTensor
from mx_core.checks import check_format
from mx_core.codec import packed_size, storage_dtype
from mx_core.formats import BLOCK_SIZE, ScaleLayout
from mx_core.scale_layout import blocked_shape
from torch import Tensor


def scale_shape(rows: int, length: int, layout: str) -> tuple[int, ...]:
    """Shape of the scales of a matrix: `length` is the size of the quantised axis, `rows` of the other one."""
    blocks = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    return (rows, blocks) if layout == ScaleLayout.LINEAR else blocked_shape(rows, blocks)


def empty_quantized(
    like: Tensor, shape: tuple[int, ...], axis: int, format: str, layout: str, scale_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Uninitialised (data, scale) of an MX tensor of logical shape (…, R, C) on like's device.

    Args:
        like: gives the device.
        shape: logical shape, two axes or more.
        axis: -1 or -2.
        format: name of the element format.
        layout: layout of the scales.
        scale_rows: rows of the scale matrix where they are not those of `shape` (grouped COMPACT rows, blocked).
    """
    found = check_format("format", format)
    *batch, rows, cols = shape
    data = torch.empty(*batch, rows, packed_size(cols, found), dtype=storage_dtype(found), device=like.device)
    other, length = (rows, cols) if axis == -1 else (cols, rows)
    scales = scale_shape(other if scale_rows is None else scale_rows, length, layout)
    return data, torch.empty(*batch, *scales, dtype=torch.uint8, device=like.device)


def as_mx(
    parts: Sequence[Tensor], format: ElementFormat, axis: int, layout: ScaleLayout, shape: Sequence[int]
) -> MXTensor:
    """The MXTensor of an op's (data, scale)."""
    data, scale = parts
    return MXTensor(data, scale, format, axis, layout, torch.Size(shape))
