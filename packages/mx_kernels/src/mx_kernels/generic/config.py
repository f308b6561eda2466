"""Tile shapes and launch bounds of the memory-bound kernels. Measured choices; docs/memory_bound.md has the table.

Nothing here imports the DSL.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How a CTA tile is worked on.

    lanes: lanes of a warp side by side over a row, 8 columns each (see device/tile.py); also the rows a lane holds.
    cols: width of the CTA tile.
    height: its rows.
    min_blocks: CTAs that must fit on a multiprocessor: the register budget.
    strip: tiles that a CTA takes side by side; it copies the next one to shared memory while it works on one.
    """

    lanes: int
    min_blocks: int
    cols: int = 128
    strip: int = 1
    height: int = 128


def quantize_tile(
    element_bits: int, orientation: str, gather: bool, weighted: bool, vector: bool
) -> TileConfig:
    """Tile of a quantiser: bf16 in tiles of 32 × 64 a warp, fp32, which needs twice the registers, of 32 × 32.

    A gather waits for its index before its rows: more CTAs hide that, or a strip, whose second tile need not wait.
    """
    if element_bits == 32:
        return TileConfig(lanes=4, min_blocks=2 if vector and not weighted else 1)
    if not (gather and vector):
        return TileConfig(lanes=8, min_blocks=2)
    if weighted:
        return TileConfig(lanes=8, min_blocks=2, strip=2)
    return (
        TileConfig(lanes=8, min_blocks=3)
        if orientation == "dual"
        else TileConfig(lanes=8, min_blocks=3, strip=2)
    )


def gather_quantize_band(tile: TileConfig) -> int:
    """See GATHER_BAND."""
    return 1 if tile.strip > 1 else 2


def swiglu_tile(element_bits: int, quantized: bool) -> TileConfig:
    """Tile of the forward SwiGLU. Unquantised, inputs and results wait in shared memory: many small CTAs."""
    if quantized:
        return TileConfig(lanes=4, min_blocks=1) if element_bits == 32 else TileConfig(lanes=8, min_blocks=3)
    return TileConfig(lanes=4, min_blocks=4 if element_bits == 32 else 8, height=32)


def dswiglu_tile(element_bits: int, quantized: bool, columns: bool) -> TileConfig:
    """Tile of the backward SwiGLU: every lane holds three fp32 results for each element, so few elements.

    Inputs and codes wait in shared memory. CTAs of four warps: at the barriers that this needs, larger ones wait longer.
    """
    if element_bits == 32:
        return TileConfig(lanes=4, min_blocks=2, height=32)
    return TileConfig(lanes=4, min_blocks=5 if quantized and columns else 4, height=32)


#: Plain gather.
GATHER_TILE = TileConfig(lanes=16, min_blocks=2)

#: CTAs of dequantize.py that must fit on a multiprocessor.
DEQUANTIZE_MIN_BLOCKS = 6

#: Strips of tiles walked side by side when rows are gathered: x is then read a slice of columns at a time, which stays in
#: L2 while the experts' rows come back to it. A dense walk takes whole rows.
GATHER_BAND = 1

#: route: choices are counted and placed in chunks, one a CTA of ROUTE_THREADS; every CTA reads all chunks' counts.
ROUTE_THREADS = 256
MAX_CHUNKS = 128
MIN_CHUNK = 1024
MAX_EXPERTS = 1024


def chunk_size(choices: int) -> int:
    """Choices of a CTA: a multiple of what its threads take at a time, at most MAX_CHUNKS chunks."""
    per_chunk = max(MIN_CHUNK, -(-choices // MAX_CHUNKS))
    return -(-per_chunk // ROUTE_THREADS) * ROUTE_THREADS
