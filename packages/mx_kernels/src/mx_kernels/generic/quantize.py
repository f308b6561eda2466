"""Quantise a matrix along its rows, down its columns, or both from one read; densely, by groups, or through a gather.

One CTA takes one 128 × 128 tile and leaves; the many CTAs on a multiprocessor overlap each other's loads and stores.
What differs between the forms is only where the rows of a tile come from and go to (`place_rows`).
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Int64, Uint8
from cutlass.memory import SmemAllocator
from mx_core import RowMap

from mx_kernels.device import ptx
from mx_kernels.device.launch import carveout, fake_pointer, fake_stream
from mx_kernels.device.mx import BlockScaling
from mx_kernels.device.stage import Lookahead
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    MemoryTarget,
    RowAccess,
    ScaleTile,
    TileQuantizer,
    WarpTile,
    WeightedRows,
    spread,
)
from mx_kernels.generic.config import TileConfig
from mx_kernels.generic.groups import GroupTable


@dataclass(frozen=True)
class QuantizeKernel:
    """Compile key and kernel.

    source: "dense", "grouped" (rows placed by the table of generic/groups.py) or "gather" (rows picked by token_of).
    compact: grouped output rows stand without padding; one more row of tiles then writes the zeros at their end.
    """

    scaling: BlockScaling
    element_bits: int
    row: bool
    col: bool
    blocked: bool
    source: str
    weighted: bool
    compact: bool
    vector: bool
    config: TileConfig

    def __post_init__(self):
        assert self.config.strip == 1 or (self.source == "gather" and self.vector)

    @property
    def tile(self) -> WarpTile:
        """Who holds what."""
        return WarpTile(self.config.lanes)

    @property
    def access(self) -> RowAccess:
        """How a lane reads and writes."""
        return RowAccess(self.element_bits, self.vector)

    @property
    def lookahead(self) -> Lookahead:
        """Room for the next tile of a strip."""
        return Lookahead(self.tile, self.access, 1)

    @property
    def smem_bytes(self) -> int:
        """Scale bytes of every tile of a strip, and the look-ahead if there is a next tile."""
        return 2 * SCALE_TILE_BYTES * self.config.strip + (self.config.strip > 1) * self.lookahead.bytes

    def build(self):
        """Function and arguments for `jit.compiled`."""
        outputs = [fake_pointer(Uint8, 16)] * 4
        inputs = [
            fake_pointer(Uint8, 16 if self.vector else 2),
            fake_pointer(Int32, 16),
            fake_pointer(Int32),
            fake_pointer(Float32),
        ]
        sizes = Int32(0), Int32(0), Int32(0), Int64(0), Int32(0), Int32(0), Int32(0), Int32(0)
        return self, *inputs, *outputs, *sizes, fake_stream()

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        row_index: cute.Pointer,
        offs: cute.Pointer,
        weights: cute.Pointer,
        row_data: cute.Pointer,
        row_scale: cute.Pointer,
        col_data: cute.Pointer,
        col_scale: cute.Pointer,
        rows: Int32,
        cols: Int32,
        row_bytes: Int32,
        batch_bytes: Int64,
        batch: Int32,
        band: Int32,
        compact_rows: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        """X is read as bytes: `row_bytes`, `batch_bytes` from one row and one matrix to the next.

        The tiles are walked `band` strips of tiles wide: across, then down the rows, then the next band.
        Grouped, `row_index` is scratch for the table that is made of offs (groups,) over `compact_rows` rows of x.
        """
        if cutlass.const_expr(self.source == "grouped"):
            row_map = RowMap.COMPACT if self.compact else RowMap.ALIGNED
            tiles = cute.ceil_div(rows, ROWS) + self.compact
            GroupTable(row_map)(offs, row_index, groups, compact_rows, tiles, stream)
        bands = cute.ceil_div(cute.ceil_div(cols, self.tile.cols * self.config.strip), band)
        self.kernel(
            x,
            row_index,
            weights,
            row_data,
            row_scale,
            col_data,
            col_scale,
            rows,
            cols,
            row_bytes,
            batch_bytes,
        ).launch(
            grid=(band, cute.ceil_div(rows, ROWS) + self.compact, bands * batch),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=carveout(self.smem_bytes, self.config.min_blocks),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        row_index: cute.Pointer,
        weights: cute.Pointer,
        row_data: cute.Pointer,
        row_scale: cute.Pointer,
        col_data: cute.Pointer,
        col_scale: cute.Pointer,
        rows: Int32,
        cols: Int32,
        row_bytes: Int32,
        batch_bytes: Int64,
    ):
        tile, access, strip = self.tile, self.access, self.config.strip
        smem = SmemAllocator().allocate(self.smem_bytes, 16)
        stage = smem + 2 * SCALE_TILE_BYTES * strip
        tile_col, tile_row, outer = ca.block_idx()
        batch = outer
        if cutlass.const_expr(self.source == "gather"):
            batch, tile_col = Int32(0), (tile_col + outer * ca.grid_dim()[0]) * strip
        local_row, local_col = tile.place()
        source, present, first, end = self.place_rows(row_index, tile_row, rows)
        ids = tile.rows(first + local_row)
        row_weights = spread(tile, weights, first, end, 0) if self.weighted else []
        per_row = [w.bitcast(Float32) for w in row_weights]

        def rows_at(col):
            """Pointers to this lane's column of its rows, and which of them are there."""
            lane = x + (Int64(batch) * batch_bytes + col * (self.element_bits // 8))
            pointers = [lane + Int64(r) * Int64(row_bytes) for r in source]
            return pointers, [p & (col < cols) for p in present]

        for n in cutlass.range_constexpr(strip):
            col = (tile_col + n) * tile.cols + local_col
            if cutlass.const_expr(n == 0):
                loaded = [access.load(p, col, cols, v) for p, v in zip(*rows_at(col), strict=True)]
                values = access.as_rows(loaded)
            else:
                ca.cp_async_wait_group(0)
                values = self.lookahead.rows(stage, 0)
            if cutlass.const_expr(n + 1 < strip):
                self.lookahead.copy(stage, 0, *rows_at(col + tile.cols))
                ca.cp_async_commit_group()
            col_values = WeightedRows(values, per_row) if self.weighted else values
            offset = Int64(batch) * rows * cols + col
            row_scales, col_scales = self.scale_tiles(smem, n)
            limit = access.limit(col, cols, end)
            TileQuantizer(self.scaling, tile, access)(
                (values, MemoryTarget(row_scales, row_data + offset)) if self.row else None,
                (col_values, MemoryTarget(col_scales, col_data + offset)) if self.col else None,
                ids,
                [i < limit for i in ids],
                col,
                cols,
            )
        ca.barrier()
        for n in cutlass.range_constexpr(strip):
            at = batch, tile_row, tile_col + n, first, end
            self.flush_scales(row_scale, col_scale, self.scale_tiles(smem, n), at, rows, cols)

    def scale_tiles(self, smem: cute.Pointer, n: int) -> tuple[ScaleTile, ScaleTile]:
        """Where the n-th tile of a strip stages its scale bytes, by row and by column."""
        return ScaleTile(smem + 2 * n * SCALE_TILE_BYTES), ScaleTile(smem + (2 * n + 1) * SCALE_TILE_BYTES)

    def flush_scales(self, row_scale, col_scale, scales, at, rows, cols):
        """A tile's staged scale bytes, to global memory."""
        batch, tile_row, tile_col, first, end = at
        row_scales, col_scales = scales
        row_tiles, col_tiles = Int64(cute.ceil_div(rows, ROWS)), Int64(cute.ceil_div(cols, self.tile.cols))
        # The last strip may be narrower, and compact rows have one more row of tiles: no scales are there.
        there = (tile_row < row_tiles) & (tile_col < col_tiles)
        writer = Int32(cutlass.select_(there, ca.thread_idx()[0], Int32(-1)))
        row_blocks, col_blocks = cute.ceil_div(rows, BLOCK), cute.ceil_div(cols, BLOCK)
        if self.row and self.blocked:
            index = (batch * row_tiles + tile_row) * col_tiles + tile_col
            row_scales.flush_blocked(row_scale, index, writer)
        elif self.row:
            out = row_scale + Int64(batch) * rows * col_blocks
            row_scales.flush(out, (first, tile_col * 4), (end, col_blocks), col_blocks, False, 4)
        if self.col and self.blocked:
            col_scales.flush_blocked(
                col_scale, (batch * col_tiles + tile_col) * row_tiles + tile_row, writer - 32
            )
        elif self.col:
            out, at = col_scale + Int64(batch) * cols * row_blocks, (tile_col * self.tile.cols, tile_row * 4)
            col_scales.flush(out, at, (cols, row_blocks), row_blocks, False, 4)

    def place_rows(self, row_index, tile_row: Int32, rows: Int32):
        """This lane's rows of x and which of them there are; first and end row of the tile in the output."""
        tile = self.tile
        local_row, _ = tile.place()
        first = tile_row * ROWS
        if self.source == "dense":
            ids = tile.rows(first + local_row)
            return ids, [i < rows for i in ids], first, rows
        if self.source == "gather":
            tokens = [Int32(t) for t in spread(tile, row_index, first, rows, -1)]
            return tokens, [t >= 0 for t in tokens], first, rows
        start, real, first, end = (
            Int32(v) for v in ptx.load_v4(row_index + Int64(tile_row) * 4, Boolean(True))
        )
        local = tile.rows(local_row)
        return [start + r for r in local], [r < real for r in local], first, end
