"""The offs contract: bounds, both row maps, and rows that must not be read."""

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mx_core import RowMap
from mx_core.groups import (
    align_rows,
    aligned_offs,
    aligned_row_of,
    aligned_rows,
    check_offs,
    compact_row_of,
    compact_rows,
    group_ends,
    group_starts,
    is_real_row,
    take_rows,
)
from support.gemm_data import GROUP_SIZES, offs_of

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=8)


def expected_map(sizes: list[int], rows_P: int) -> list[int]:
    """COMPACT row of each ALIGNED row, -1 on padding: the definition, one row at a time."""
    rows, compact = [], 0
    for size in sizes:
        unit = -(-size // 128) * 128
        rows += [compact + i if i < size else -1 for i in range(unit)]
        compact += size
    return rows + [-1] * (rows_P - len(rows))


@given(sizes=SIZES, tail=st.integers(0, 40))
@example(sizes=[1] * 8, tail=0)
@example(sizes=[0], tail=0)
@example(sizes=[128, 256], tail=0)
def test_both_row_maps(sizes: list[int], tail: int) -> None:
    offs, rows_M = offs_of(sizes), sum(sizes) + tail
    rows_P = aligned_rows(rows_M, len(sizes))
    starts = [0, *itertools.accumulate(-(-size // 128) * 128 for size in sizes)]
    assert aligned_offs(offs).tolist() == starts
    assert aligned_offs(offs).dtype == torch.int32
    assert rows_P % 128 == 0
    assert starts[-1] <= rows_P <= rows_M + 127 * len(sizes)
    assert group_starts(offs).tolist() == [0, *offs.tolist()[:-1]]

    compact = expected_map(sizes, rows_P)
    assert compact_row_of(offs, rows_P).tolist() == compact
    assert aligned_row_of(offs, rows_M).tolist() == [
        compact.index(r) if r < sum(sizes) else -1 for r in range(rows_M)
    ]
    assert is_real_row(offs, rows_P, RowMap.ALIGNED).tolist() == [r >= 0 for r in compact]
    assert is_real_row(offs, rows_M, RowMap.COMPACT).tolist() == [r < sum(sizes) for r in range(rows_M)]

    x = torch.arange(1.0, rows_M + 1)[:, None].repeat(1, 3)
    x[sum(sizes) :] = math.nan  # past offs[-1]: never read
    aligned = align_rows(x, offs)
    assert aligned.shape == (rows_P, 3)
    assert aligned[:, 2].tolist() == [r + 1 if r >= 0 else 0 for r in compact]
    aligned[torch.tensor(compact) < 0] = math.nan  # padding: never read either
    back = compact_rows(aligned, offs, rows_M)
    assert torch.equal(back, torch.where(x.isnan(), 0, x))


def test_bound_is_reached() -> None:
    """Every group one row into a unit: the bound holds with nothing to spare."""
    for groups in (1, 3, 8):
        assert aligned_rows(groups, groups) == 128 * groups == aligned_offs(offs_of([1] * groups))[-1]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint8,
        torch.int8,
        torch.int32,
    ],
)
def test_take_rows_of_any_dtype(dtype: torch.dtype) -> None:
    x = torch.randint(0, 100, (5, 2, 16), dtype=torch.uint8)
    x = x.view(dtype) if dtype.itemsize == 1 else x.to(dtype)
    taken = take_rows(x, torch.tensor([4, -1, 0, 0], dtype=torch.int32))
    assert taken.dtype == dtype
    raw = taken.view(torch.uint8)
    assert torch.equal(raw[[0, 2, 3]], x.view(torch.uint8)[[4, 0, 0]])
    assert raw[1].count_nonzero() == 0
    assert take_rows(x[:0], torch.full((3,), -1)).view(torch.uint8).count_nonzero() == 0


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_scales_move_like_rows(sizes: list[int]) -> None:
    offs = offs_of(sizes)
    scale = torch.randint(1, 255, (sum(sizes), 4)).to(torch.uint8)
    assert torch.equal(compact_rows(align_rows(scale, offs), offs, sum(sizes)), scale)


def test_nothing_to_do() -> None:
    """C12: no rows at all, and rows without a group."""
    offs = offs_of([0, 0, 0])
    assert align_rows(torch.zeros(0, 32), offs).shape == (256, 32)
    assert compact_rows(torch.full((256, 32), math.nan), offs, 0).shape == (0, 32)
    aligned = align_rows(torch.full((6, 32), math.nan), offs)
    assert aligned.count_nonzero() == 0
    assert compact_rows(aligned, offs, 6).count_nonzero() == 0


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"offs: expected torch.int32, got torch.int64"):
        check_offs(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"offs: expected 1 axes, got shape \(1, 2\)"):
        check_offs(torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"offs: expected at least one group, got shape \(0,\)"):
        check_offs(torch.zeros(0, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"offs: expected torch.int32"):
        align_rows(torch.zeros(4, 2), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"x_PD: expected shape \(128, 2\), got shape \(100, 2\)"):
        compact_rows(torch.zeros(100, 2), offs_of([4]), 4)
    for bad in ([3, 2], [-1, 4], [2, 9]):
        with pytest.raises(ValueError, match=r"offs: expected ascending ends in \[0, 8\]"):
            group_ends(torch.tensor(bad, dtype=torch.int32), 8)
    assert group_ends(offs_of([3, 0, 5]), 8) == [3, 3, 8]
