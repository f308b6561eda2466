"""The blocked scale layout against its formula, byte by byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core import MXFP8_E4M3, ScaleLayout, from_blocked, quantize, to_blocked
from mx_core.scale_layout import blocked_offset, blocked_shape


def formula(r: int, c: int, cols: int) -> int:
    """docs/layouts.md, written out again."""
    return ((r // 128) * -(-cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@given(rows=st.integers(0, 300), cols=st.integers(0, 20), batch=st.lists(st.integers(0, 3), max_size=2))
def test_every_byte_is_where_the_formula_says(rows: int, cols: int, batch: list[int]) -> None:
    scale = torch.randint(1, 256, (*batch, rows, cols), generator=torch.Generator().manual_seed(rows)).to(
        torch.uint8
    )
    blocked = to_blocked(scale)
    assert blocked.shape == (*batch, *blocked_shape(rows, cols))
    assert blocked.is_contiguous()
    assert torch.equal(from_blocked(blocked, rows, cols), scale)
    if scale.numel() == 0:
        return
    offsets = [formula(r, c, cols) for r in range(rows) for c in range(cols)]
    assert offsets == [blocked_offset(r, c, cols) for r in range(rows) for c in range(cols)]
    tiles = blocked.reshape(*batch, -1)
    assert torch.equal(tiles[..., torch.tensor(offsets)], scale.flatten(-2))
    assert tiles.count_nonzero() == scale.numel()  # the padding is 0, and each byte has a place of its own


@pytest.mark.parametrize(
    ("r", "c", "offset"),
    [(0, 0, 0), (0, 3, 3), (32, 0, 4), (1, 0, 16), (127, 3, 511), (0, 4, 512), (128, 0, 2 * 512)],
)
def test_offsets_by_hand(r: int, c: int, offset: int) -> None:
    assert blocked_offset(r, c, cols=7) == offset


def test_offsets_past_2_to_31() -> None:
    assert blocked_offset(2**31, 5, 8) == (2**24 * 2 + 1) * 512 + 1


def test_experts_have_tiles_of_their_own() -> None:
    x = torch.randn(3, 130, 160)
    w = quantize(x, MXFP8_E4M3, layout=ScaleLayout.BLOCKED_128X4)
    assert w.scale.shape == (3, 2, 2, 32, 4, 4)
    for e in range(3):
        assert torch.equal(w.scale[e], to_blocked(quantize(x[e], MXFP8_E4M3).scale))


def test_more_row_tiles_than_asked_for() -> None:
    scale = torch.randint(0, 255, (300, 3)).to(torch.uint8)
    assert torch.equal(from_blocked(to_blocked(scale), 130, 3), scale[:130])


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"scale: expected \(..., R, C\), got shape \(3,\)"):
        to_blocked(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(
        ValueError,
        match=r"blocked scales of 129 x 4: expected shape \(..., 2, 1, 32, 4, 4\), got shape \(1, 1, 32, 4, 4\)",
    ):
        from_blocked(torch.zeros(1, 1, 32, 4, 4, dtype=torch.uint8), 129, 4)
