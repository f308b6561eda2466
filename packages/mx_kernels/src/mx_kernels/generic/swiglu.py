"""SwiGLU over ALIGNED rows, quantised or plain, from one read of its input.

The kernel takes tiles of 128 rows, of which the group table tells how many are real (generic/groups.py): the others come
out as zeros, and a tile without any is left alone.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.mx import BlockScaling
from mx_kernels.device.swiglu import any_deep, swiglu
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    ComputedRows,
    RowAccess,
    Rows,
    ScaleTile,
    Target,
    TileQuantizer,
    WarpTile,
)
from mx_kernels.generic.config import TileConfig
from mx_kernels.generic.groups import real_rows


@dataclass(frozen=True)
class SwigluKernel:
    """h (P, 2H) → silu(gate)·up (P, H). `scaling` None: in h's dtype, else codes and scales along H."""

    scaling: BlockScaling | None
    element_bits: int
    blocked: bool
    config: TileConfig

    @property
    def tile(self) -> WarpTile:
        """Who holds what."""
        return WarpTile(self.config.lanes, self.config.cols)

    def build(self):
        """Function and arguments for `jit.compiled`."""
        pointers = [fake_pointer(Uint8, 16)] * 3
        return self, pointers[0], fake_pointer(Int32, 16), *pointers[1:], Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        h: cute.Pointer,
        table: cute.Pointer,
        out: cute.Pointer,
        scale: cute.Pointer,
        rows: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        """`rows` P, `width` H; h and out are pointers to bytes."""
        self.kernel(h, table, out, scale, rows, width).launch(
            grid=(cute.ceil_div(width, self.tile.cols), rows // ROWS, 1),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=16,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        h: cute.Pointer,
        table: cute.Pointer,
        out: cute.Pointer,
        scale: cute.Pointer,
        rows: Int32,
        width: Int32,
    ):
        scales = ScaleTile(SmemAllocator().allocate(SCALE_TILE_BYTES, 16))
        tile_col, tile_row, _ = ca.block_idx()
        real = real_rows(table, tile_row)
        if real > 0:
            self.forward_tile(h, out, scales, tile_row, tile_col, real, width)
            if cutlass.const_expr(self.scaling is not None):
                ca.barrier()
                blocks = width // BLOCK
                per_tile = self.tile.cols // BLOCK
                padded = cute.ceil_div(blocks, 4) * 4 if self.blocked else blocks
                scales.flush(
                    scale,
                    (tile_row * ROWS, tile_col * per_tile),
                    (rows, padded),
                    blocks,
                    self.blocked,
                    per_tile,
                )

    @cute.jit
    def forward_tile(
        self,
        h: cute.Pointer,
        out: cute.Pointer,
        scales: ScaleTile,
        tile_row: Int32,
        tile_col: Int32,
        real: Int32,
        width: Int32,
    ):
        """Load gate and up of all rows, then compute, quantise and store row by row."""
        tile, access = self.tile, RowAccess(self.element_bits, True)
        size = self.element_bits // 8
        local_row, local_col = tile.place()
        col = tile_col * tile.cols + local_col
        ids = tile.rows(tile_row * ROWS + local_row)
        exists = [col < width] * tile.steps
        some = access.limit(col, width, real)
        valid = [r < some for r in tile.rows(local_row)]

        pointers = [h + (Int64(i) * (2 * width) + col) * size for i in ids]
        gates = access.as_rows([access.load(p, col, width, v) for p, v in zip(pointers, valid, strict=True)])
        ups = access.as_rows(
            [
                access.load(p + Int64(width) * size, col, width, v)
                for p, v in zip(pointers, valid, strict=True)
            ]
        )

        at = ids, exists, col
        if any_deep(gates, tile.steps):
            self.finish(gates, ups, out, scales, at, width, True)
        else:
            self.finish(gates, ups, out, scales, at, width, False)

    @cute.jit
    def finish(
        self,
        gates: Rows,
        ups: Rows,
        out: cute.Pointer,
        scales: ScaleTile,
        at: tuple,
        width: Int32,
        deep: cutlass.Constexpr[bool],
    ):
        """Compute, quantise and store row by row. `deep`: see device/swiglu.py."""
        tile, access = self.tile, RowAccess(self.element_bits, True)
        ids, exists, col = at

        def activate(s: int) -> list:
            return [swiglu(g, u, deep) for g, u in zip(gates.values(s), ups.values(s), strict=True)]

        values = ComputedRows(activate)
        if cutlass.const_expr(self.scaling is None):
            size = self.element_bits // 8
            for s in cutlass.range_constexpr(tile.steps):
                access.store_values(out + (Int64(ids[s]) * width + col) * size, values.values(s), exists[s])
        else:
            quantizer = quantizer_of(self.scaling, tile, access)
            quantizer((values, Target(out + col, scales)), None, ids, exists, col, width)


def quantizer_of(scaling: BlockScaling | None, tile: WarpTile, access: RowAccess) -> TileQuantizer:
    """The quantiser of a kernel that has one."""
    assert scaling is not None
    return TileQuantizer(scaling, tile, access)
