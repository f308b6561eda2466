"""Rows of x picked by token_of, unquantised. The tiles and their walk are those of the quantising gather (quantize.py)."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Int32, Int64, Uint8, Uint32

from mx_kernels.device import ptx
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.tile import ROWS, RowAccess, WarpTile, spread
from mx_kernels.generic.config import TileConfig


@dataclass(frozen=True)
class GatherKernel:
    """x (T, D), token_of (P,) → (P, D), zeros where token_of is -1. Moves 16-bit units, so it serves any dtype."""

    config: TileConfig

    @property
    def tile(self) -> WarpTile:
        """Who holds what."""
        return WarpTile(self.config.lanes, self.config.cols)

    def build(self):
        """Function and arguments for `jit.compiled`."""
        data = fake_pointer(Uint8, 16)
        return self, data, fake_pointer(Int32), data, Int32(0), Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        token_of: cute.Pointer,
        out: cute.Pointer,
        rows: Int32,
        width: Int32,
        band: Int32,
        stream: cuda.CUstream,
    ):
        """`rows` P, `width` of a row in 16-bit units; the tiles are walked `band` columns of tiles wide."""
        bands = cute.ceil_div(cute.ceil_div(width, self.tile.cols), band)
        self.kernel(x, token_of, out, rows, width).launch(
            grid=(band, cute.ceil_div(rows, ROWS), bands),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=0,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, token_of: cute.Pointer, out: cute.Pointer, rows: Int32, width: Int32):
        tile, access = self.tile, RowAccess(16, True)
        within, tile_row, outer = ca.block_idx()
        local_row, local_col = tile.place()
        col = (within + outer * ca.grid_dim()[0]) * tile.cols + local_col
        first = tile_row * ROWS
        tokens = [Int32(t) for t in spread(tile, token_of, first, rows, -1)]
        some = access.limit(col, width, Int32(0x7FFF_FFFF))
        limit = access.limit(col, width, rows)
        words = [
            access.load(x + (Int64(t) * width + col) * 2, col, width, Uint32(t) < Uint32(some))
            for t in tokens
        ]
        for row, values in zip(tile.rows(first + local_row), words, strict=True):
            ptx.store_words(out + (Int64(row) * width + col) * 2, values, row < limit)
