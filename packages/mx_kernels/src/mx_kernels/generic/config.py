"""Tile shapes and launch bounds of the memory-bound kernels. Measured choices; docs/memory_bound.md has the table.

Nothing here imports the DSL.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How a 128 × 128 CTA tile is worked on.

    lanes: lanes of a warp side by side over a row, 8 columns each (see device/tile.py); also the rows a lane holds.
    min_blocks: CTAs that must fit on a multiprocessor: the register budget.
    """

    lanes: int
    min_blocks: int


def quantize_tile(element_bits: int, orientation: str, weighted: bool) -> TileConfig:
    """Tile of a quantiser: bf16 in tiles of 32 × 64 a warp, fp32, which needs twice the registers, of 32 × 32."""
    if element_bits == 32:
        return TileConfig(lanes=4, min_blocks=1)
    return TileConfig(lanes=8, min_blocks=2)


#: Columns of tiles walked side by side when rows are gathered: x is then read a slice of columns at a time, which stays in
#: L2 while the experts' rows come back to it. A dense walk takes whole rows.
GATHER_BAND = 2
