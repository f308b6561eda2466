"""Operands for GEMM tests.

`exact_*` give operands whose sums are integers below 2^24 in some unit: fp32 adds them without rounding
in any order, so a right kernel is bitwise equal to the reference. All scale bytes are unlike their
neighbours, so a scale read from the wrong row, column, tile or expert changes the result.
`random_*` give the operands of a usual layer, for the bounds of support.bounds.
"""

import dataclasses
import math

import torch
from mx_core import BLOCK_SIZE, MXFP8_E4M3, ElementFormat, MXTensor, RowMap, ScaleLayout, encode, quantize
from mx_core.codec import to_storage
from mx_core.groups import align_rows, aligned_rows, is_real_row
from mx_core.scale_layout import from_blocked, to_blocked
from torch import Tensor

SCALE_STEPS = 5  # exponents of an exact operand's scales: base ... base + 4

GROUP_SIZES = {
    "one group": [200],
    "equal": [128, 128, 128],
    "ragged": [1, 127, 128, 129, 33],
    "empty first": [0, 70, 128],
    "empty last": [70, 128, 0],
    "all but one empty": [0, 0, 150, 0],
    "no tokens": [0, 0, 0],
    "skewed": [300, 1, 1, 0, 2, 31, 32, 64],
}
"""Group sizes that every grouped operation should be tried with."""


def offs_of(sizes: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Sizes of groups to offs: int32, cumulative ends."""
    return torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


def exact_limit(reduction: int, format: ElementFormat | None = MXFP8_E4M3) -> int:
    """Largest integer that exact operands may hold when `reduction` products are summed."""
    spread = 1 if format is None else 2 ** (2 * (SCALE_STEPS - 1))
    limit = math.isqrt((2**24 - 1) // max(reduction * spread, 1))
    largest = 256 if format is None else 2 << format.mantissa_bits
    if limit == 0:
        raise ValueError(f"reduction: expected one that keeps exact sums below 2^24, got {reduction}")
    return min(limit, largest)


def exact_matrix(*shape: int, reduction: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Random integers in a plain dtype, for unquantised operands."""
    limit = exact_limit(reduction, None)
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_operand(
    *shape: int,
    reduction: int,
    axis: int = -1,
    format: ElementFormat = MXFP8_E4M3,
    layout: ScaleLayout = ScaleLayout.LINEAR,
    base_byte: int = 125,
    seed: int = 0,
) -> MXTensor:
    """A random MX operand with exact sums.

    Args:
        shape: (R, C) or (E, N, K).
        reduction: the largest number of products in one sum (K; for wgrad the rows of the largest group).
        axis: the quantised axis.
        format: element format; the codes are integers (multiples of the smallest value where those do not fit).
        layout: layout of the scales.
        base_byte: the smallest scale byte. Products are multiples of 2^(base_a + base_b - 254) units.
        seed: of codes and scales.
    """
    generator = torch.Generator().manual_seed(seed)
    limit = exact_limit(reduction, format)
    unit = 1.0 if format.max_value >= 2 << format.mantissa_bits else format.min_subnormal
    values = torch.randint(-limit, limit + 1, shape, generator=generator) * unit
    scale = neighbourly_scales(values.movedim(axis, -1).shape, base_byte=base_byte, seed=seed)
    scale = to_blocked(scale) if layout is ScaleLayout.BLOCKED_128X4 else scale
    data = to_storage(encode(values.to(torch.float32), format), format)
    return MXTensor(data, scale, format, axis, layout, torch.Size(shape))


def neighbourly_scales(shape: torch.Size, *, base_byte: int, seed: int) -> Tensor:
    """Linear scale bytes (..., R, ceil(L/32)) of values (..., R, L), each unlike the others around it.

    Around means one step in r, c or expert, and the steps of the blocked layout too: 32, 64, 96 and 128 rows,
    4 columns (none of which is a multiple of SCALE_STEPS).
    """
    *batch, rows, length = shape
    e = torch.arange(math.prod(batch)).reshape(*batch, 1, 1)
    r = torch.arange(rows)[:, None]
    c = torch.arange(-(-length // BLOCK_SIZE))
    steps = torch.randperm(SCALE_STEPS, generator=torch.Generator().manual_seed(seed + 1))
    return (base_byte + steps[(r + 2 * c + e) % SCALE_STEPS]).to(torch.uint8)


def zero_padding_rows(x: Tensor | MXTensor, offs: Tensor) -> Tensor | MXTensor:
    """An ALIGNED operand with the rows of no group set to 0: codes, and scale bytes of row-quantised data."""
    real = is_real_row(offs, x.shape[0], RowMap.ALIGNED)[:, None]
    if isinstance(x, Tensor):
        return torch.where(real, x, 0)
    data = torch.where(real, x.data.view(torch.uint8), 0).view(x.data.dtype)
    if x.axis == -2:
        return dataclasses.replace(x, data=data)
    linear = x.scale
    if x.layout is ScaleLayout.BLOCKED_128X4:
        linear = from_blocked(x.scale, x.shape[0], -(-x.shape[1] // BLOCK_SIZE))
    scale = torch.where(real, linear, 0)
    return dataclasses.replace(x, data=data, scale=_in_layout(scale, x.layout))


def compact_with_aligned_scales(x: MXTensor, offs: Tensor) -> MXTensor:
    """COMPACT rows (M, K) with linear scales to what `quantize` makes of them with offs and blocked scales.

    The data stay; every group's scales start on a 128-row tile.
    """
    scale_P = align_rows(x.scale, offs)
    return dataclasses.replace(x, scale=to_blocked(scale_P), layout=ScaleLayout.BLOCKED_128X4)


def grouped_rows(num_rows: int, num_groups: int, row_map: RowMap) -> int:
    """Rows of a tensor that holds `num_rows` real rows in this row map."""
    return num_rows if row_map is RowMap.COMPACT else aligned_rows(num_rows, num_groups)


def random_operand(
    *shape: int,
    axis: int = -1,
    format: ElementFormat = MXFP8_E4M3,
    layout: ScaleLayout = ScaleLayout.LINEAR,
    seed: int = 0,
) -> MXTensor:
    """A quantised normal distribution whose rows and columns differ in size by up to 2^6."""
    return quantize(random_matrix(*shape, dtype=torch.float32, seed=seed), format, axis=axis, layout=layout)


def random_matrix(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Normally distributed values whose rows and columns differ in size by up to 2^6."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for axis in (-1, -2):
        sizes = torch.randint(-3, 4, (x.shape[axis],), generator=generator).exp2()
        x = x * (sizes if axis == -1 else sizes[:, None])
    return x.to(dtype)


def poison(*shape: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Memory in which a value that nobody wrote shows: NaN, or 255 in integer types."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    value = math.nan if dtype.is_floating_point else (255 if dtype is torch.uint8 else -1)
    return torch.full(shape, value, dtype=dtype, device=device)


def _in_layout(scale: Tensor, layout: ScaleLayout) -> Tensor:
    return to_blocked(scale) if layout is ScaleLayout.BLOCKED_128X4 else scale
