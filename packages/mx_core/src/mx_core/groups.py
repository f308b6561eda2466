"""Groups of rows: the `offs` contract and the two row maps.

`offs`, int32 (E,) on the device, holds the cumulative, exclusive ends of the groups' real row counts:
group g is rows offs[g-1] ... offs[g] of a COMPACT tensor, as torch.nn.functional.grouped_mm takes it. In
an ALIGNED tensor every group starts at a multiple of 128 rows; how many rows it has is a bound known on
the host, so nothing here reads `offs` back, and all shapes come from shapes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import check_dtype, check_ndim, check_shape, expected
from mx_core.formats import RowMap

GROUP_ALIGNMENT = 128
"""Rows that the ALIGNED map rounds every group up to: one tensor-core tile, one tile of blocked scales."""


def aligned_rows(rows: int, num_groups: int) -> int:
    """P, the rows of an ALIGNED tensor for any split of `rows` rows over `num_groups` groups."""
    return (rows + (GROUP_ALIGNMENT - 1) * num_groups) // GROUP_ALIGNMENT * GROUP_ALIGNMENT


def check_offs(offs: Tensor) -> None:
    """TypeError or ValueError unless `offs` is an int32 vector of at least one group."""
    check_dtype("offs", offs, torch.int32)
    check_ndim("offs", offs, 1)
    if offs.shape[0] == 0:
        raise ValueError(expected("offs", "at least one group", "shape (0,)"))


def group_ends(offs: Tensor, rows: int) -> list[int]:
    """The values of `offs` on the host, checked: ascending, in [0, rows]. Reads the device; for references."""
    check_offs(offs)
    ends = offs.tolist()
    if any(start > end for start, end in zip([0, *ends], ends, strict=False)) or ends[-1] > rows:
        raise ValueError(expected("offs", f"ascending ends in [0, {rows}]", ends))
    return ends


def group_starts(offs: Tensor) -> Tensor:
    """int32 (E,): first COMPACT row of every group."""
    return torch.cat([offs.new_zeros(1), offs[:-1]])


def aligned_offs(offs: Tensor) -> Tensor:
    """int32 (E+1,): first ALIGNED row of every group, then the end of the last 128-row unit."""
    check_offs(offs)
    units = (offs - group_starts(offs) + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT
    ends = (units * GROUP_ALIGNMENT).cumsum(0, dtype=torch.int32)
    return torch.cat([ends.new_zeros(1), ends])


def compact_row_of(offs: Tensor, rows_P: int) -> Tensor:
    """int32 (P,): the COMPACT row that each ALIGNED row holds, -1 on padding."""
    starts = aligned_offs(offs)
    row = torch.arange(rows_P, dtype=torch.int32, device=offs.device)
    group = torch.searchsorted(starts[1:], row, right=True).clamp(max=offs.shape[0] - 1)
    compact = row - starts[group] + group_starts(offs)[group]
    return torch.where(compact < offs[group], compact, -1)


def aligned_row_of(offs: Tensor, rows_M: int) -> Tensor:
    """int32 (M,): the ALIGNED row that holds each COMPACT row, -1 at and past offs[-1]."""
    row = torch.arange(rows_M, dtype=torch.int32, device=offs.device)
    group = torch.searchsorted(offs, row, right=True).clamp(max=offs.shape[0] - 1)
    aligned = row - group_starts(offs)[group] + aligned_offs(offs)[group]
    return torch.where(row < offs[-1], aligned, -1)


def is_real_row(offs: Tensor, rows: int, row_map: RowMap) -> Tensor:
    """Whether each row of a tensor in this row map, bool (rows,), is a group's row, not padding or tail."""
    if row_map is RowMap.ALIGNED:
        return compact_row_of(offs, rows) >= 0
    return torch.arange(rows, dtype=torch.int32, device=offs.device) < offs[-1]


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first axis, with rows of zeros where index is -1. Any dtype, float8 too.

    Args:
        x: (rows, ...).
        index: int32 or int64 (n,), each entry -1 or a row of x.

    Returns:
        (n, ...), x's dtype. A NaN in a row that is not asked for does not show.
    """
    bits = x.view(torch.uint8) if x.element_size() == 1 else x  # index_select lacks float8
    with_zero_row = pad(bits, (0, 0) * (x.ndim - 1) + (0, 1))
    return with_zero_row.index_select(0, torch.where(index < 0, x.shape[0], index)).view(x.dtype)


def align_rows(x_MD: Tensor, offs: Tensor) -> Tensor:
    """COMPACT to ALIGNED: (M, ...) to (P, ...), P = aligned_rows(M, E), with zeros in the padding."""
    check_offs(offs)
    return take_rows(x_MD, compact_row_of(offs, aligned_rows(x_MD.shape[0], offs.shape[0])))


def compact_rows(x_PD: Tensor, offs: Tensor, rows: int) -> Tensor:
    """ALIGNED to COMPACT: (P, ...) to (rows, ...), with zeros at and past offs[-1]."""
    check_offs(offs)
    check_shape("x_PD", x_PD, aligned_rows(rows, offs.shape[0]), *x_PD.shape[1:])
    return take_rows(x_PD, aligned_row_of(offs, rows))
