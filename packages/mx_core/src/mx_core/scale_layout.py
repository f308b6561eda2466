"""Where scale bytes lie: the linear layout and the blocked one that Blackwell's tensor core reads.

Linear scales are (..., R, C): r runs over the axis that is not quantised, c over the blocks of the
quantised one. Blocked scales are tiles of 128 r x 4 c = 512 bytes, what one `tcgen05.cp.32x128b.warpx4`
copies to tensor memory, in row-major order; see docs/layouts.md.
Source: PTX ISA, "tcgen05.mma scale factor layout"; cuBLAS, "1D block scaling factors layout".
"""

from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import expected
from mx_core.formats import ScaleLayout

TILE_ROWS = 128
TILE_COLS = 4
_LINEAR = "... (row_tile r4 r32) (col_tile c4)"
_BLOCKED = "... row_tile col_tile r32 r4 c4"


def blocked_shape(rows: int, cols: int) -> tuple[int, int, int, int, int]:
    """Shape of the blocked scales of R = rows and C = cols, without batch axes."""
    return -(-rows // TILE_ROWS), -(-cols // TILE_COLS), 32, TILE_ROWS // 32, TILE_COLS


def blocked_offset(r: int, c: int, cols: int) -> int:
    """Byte offset of scale (r, c) in a blocked matrix of C = cols columns."""
    tile = (r // TILE_ROWS) * -(-cols // TILE_COLS) + c // TILE_COLS
    return tile * TILE_ROWS * TILE_COLS + (r % 32) * 16 + (r % TILE_ROWS) // 32 * 4 + c % TILE_COLS


def to_blocked(scale: Tensor) -> Tensor:
    """Linear to blocked scales; the padding is written as 0.

    Args:
        scale: (..., R, C). Every matrix of the batch gets tiles of its own.

    Returns:
        (..., ceil(R/128), ceil(C/4), 32, 4, 4), contiguous, [r//128, c//4, r%32, (r%128)//32, c%4].
    """
    if scale.ndim < 2:
        raise ValueError(expected("scale", "(..., R, C)", f"shape {tuple(scale.shape)}"))
    rows, cols = scale.shape[-2:]
    padded = pad(scale, (0, -cols % TILE_COLS, 0, -rows % TILE_ROWS))
    return rearrange(padded, f"{_LINEAR} -> {_BLOCKED}", r4=4, r32=32, c4=4).contiguous()


def from_blocked(blocked: Tensor, rows: int, cols: int) -> Tensor:
    """Blocked to linear scales, dropping the padding; the inverse of `to_blocked`.

    Args:
        blocked: (..., row tiles, ceil(cols/4), 32, 4, 4) with at least ceil(rows/128) row tiles.
        rows: R.
        cols: C.

    Returns:
        (..., rows, cols), contiguous.
    """
    row_tiles, *rest = blocked_shape(rows, cols)
    if blocked.ndim < 5 or blocked.shape[-5] < row_tiles or list(blocked.shape[-4:]) != rest:
        raise ValueError(
            expected(
                f"blocked scales of {rows} x {cols}",
                f"shape (..., {row_tiles}, {', '.join(map(str, rest))})",
                f"shape {tuple(blocked.shape)}",
            )
        )
    linear = rearrange(blocked, f"{_BLOCKED} -> {_LINEAR}")
    return linear[..., :rows, :cols].contiguous()


def to_layout(scale: Tensor, layout: ScaleLayout) -> Tensor:
    """Linear scales in the asked layout."""
    return to_blocked(scale) if layout is ScaleLayout.BLOCKED_128X4 else scale.contiguous()
