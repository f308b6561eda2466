"""SwiGLU over ALIGNED rows, quantised or plain, from one read of its input.

The group table tells how many rows of a unit of 128 are real (generic/groups.py): the others come out as zeros, and a unit
without any is left alone. Quantised, a CTA takes a unit and its rows wait in registers; plain, it takes a quarter, and rows
and results wait in shared memory.
"""

from dataclasses import dataclass
from typing import ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator
from mx_core import RowMap

from mx_kernels.device.launch import carveout, fake_pointer, fake_stream
from mx_kernels.device.mx import BlockScaling
from mx_kernels.device.stage import Lookahead
from mx_kernels.device.swiglu import any_deep, swiglu
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    ComputedRows,
    MemoryTarget,
    RowAccess,
    Rows,
    ScaleTile,
    TileQuantizer,
    WarpTile,
)
from mx_kernels.generic.config import TileConfig
from mx_kernels.generic.groups import GroupTable, real_rows

GATE, UP = range(2)  # inputs


@dataclass(frozen=True)
class StagedTiles:
    """What the kernels of SwiGLU and of its backward are specialised on, and how they divide their rows."""

    scaling: BlockScaling | None
    element_bits: int
    blocked: bool
    config: TileConfig

    staged: ClassVar[int]
    """Inputs of a tile that wait in shared memory."""

    @property
    def tile(self) -> WarpTile:
        """Who holds what."""
        return WarpTile(self.config.lanes, self.config.cols, self.config.height)

    @property
    def access(self) -> RowAccess:
        """How a lane reads and writes."""
        return RowAccess(self.element_bits, True)

    @property
    def lookahead(self) -> Lookahead:
        """Room for a tile of each staged input."""
        return Lookahead(self.tile, self.access, self.staged)


@dataclass(frozen=True)
class SwigluKernel(StagedTiles):
    """h (P, 2H) → silu(gate)·up (P, H). `scaling` None: in h's dtype, else codes and scales along H."""

    staged = 2  # gate and up, in the plain form

    @property
    def smem_bytes(self) -> int:
        """Scale bytes, or the inputs."""
        return self.lookahead.bytes if self.scaling is None else SCALE_TILE_BYTES

    def build(self):
        """Function and arguments for `jit.compiled`."""
        h, *out = [fake_pointer(Uint8, 16)] * 3
        groups = fake_pointer(Int32), fake_pointer(Int32, 16)
        return self, h, *groups, *out, Int32(0), Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        h: cute.Pointer,
        offs: cute.Pointer,
        table: cute.Pointer,
        out: cute.Pointer,
        scale: cute.Pointer,
        rows: Int32,
        width: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        """`rows` P, `width` H; h and out are pointers to bytes; table (P / 128, 4) is scratch."""
        GroupTable(RowMap.ALIGNED)(offs, table, groups, rows, rows // ROWS, stream)
        self.kernel(h, table, out, scale, rows, width).launch(
            grid=(cute.ceil_div(width, self.tile.cols), ROWS // self.tile.height, rows // ROWS),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=carveout(self.smem_bytes, self.config.min_blocks),
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
        smem = SmemAllocator().allocate(self.smem_bytes, 16)
        tile_col, band, unit = ca.block_idx()
        real = real_rows(table, unit)
        if real > 0:
            real -= band * self.tile.height
            at = unit * ROWS + band * self.tile.height, tile_col * self.tile.cols
            if cutlass.const_expr(self.scaling is None):
                self.plain_tile(h, smem, at, real, width)
                ca.barrier()
                self.lookahead.flush(smem, GATE, out, at, (rows, width), width)
            else:
                self.quantized_tile(h, out, ScaleTile(smem), at, real, width)
                ca.barrier()
                blocks, per_tile = width // BLOCK, self.tile.cols // BLOCK
                padded = cute.ceil_div(blocks, 4) * 4 if self.blocked else blocks
                first = unit * ROWS, tile_col * per_tile
                ScaleTile(smem).flush(scale, first, (rows, padded), blocks, self.blocked, per_tile)

    def rows_at(self, h, at, row, col, real, width):
        """Pointers to gate and to up of the rows from `row` on at column `col` of the tile, and which of them are real."""
        size, c = self.element_bits // 8, at[1] + col
        some = self.access.limit(c, width, real)
        gates = [h + (Int64(i) * (2 * width) + c) * size for i in self.tile.rows(at[0] + row)]
        return gates, [p + Int64(width) * size for p in gates], [i < some for i in self.tile.rows(row)]

    @cute.jit
    def plain_tile(self, h: cute.Pointer, stage: cute.Pointer, at: tuple, real: Int32, width: Int32):
        """Copy gate and up, compute, put the results in gate's place."""
        share = self.tile.whole_rows()
        gates, ups, valid = self.rows_at(h, at, share.row, share.col, real, width)
        for tensor, pointers in ((GATE, gates), (UP, ups)):
            self.lookahead.copy(stage, tensor, pointers, valid, share.thread)
        ca.cp_async_commit_group()
        ca.cp_async_wait_group(0)
        ca.barrier()
        if any_deep(self.lookahead.rows(stage, GATE), self.tile.steps):
            self.put_tile(stage, True)
        else:
            self.put_tile(stage, False)

    @cute.jit
    def put_tile(self, stage: cute.Pointer, deep: cutlass.Constexpr[bool]):
        """Row by row: compute and put. `deep`: see device/swiglu.py."""
        for s in cutlass.range_constexpr(self.tile.steps):
            gate, up = (self.lookahead.values(stage, tensor, s) for tensor in (GATE, UP))
            self.lookahead.put(stage, GATE, s, [swiglu(g, u, deep) for g, u in zip(gate, up, strict=True)])

    @cute.jit
    def quantized_tile(
        self, h: cute.Pointer, out: cute.Pointer, scales: ScaleTile, at: tuple, real: Int32, width: Int32
    ):
        """Load gate and up of all rows, then compute, quantise and store row by row."""
        local_row, local_col = self.tile.place()
        gates, ups, valid = self.rows_at(h, at, local_row, local_col, real, width)
        col = at[1] + local_col
        gates, ups = (
            self.access.as_rows([self.access.load(p, col, width, v) for p, v in zip(ps, valid, strict=True)])
            for ps in (gates, ups)
        )
        place = self.tile.rows(at[0] + local_row), [col < width] * self.tile.steps, col
        if any_deep(gates, self.tile.steps):
            self.quantize(gates, ups, MemoryTarget(scales, out + col), place, width, True)
        else:
            self.quantize(gates, ups, MemoryTarget(scales, out + col), place, width, False)

    @cute.jit
    def quantize(
        self,
        gates: Rows,
        ups: Rows,
        target: MemoryTarget,
        place: tuple,
        width: Int32,
        deep: cutlass.Constexpr[bool],
    ):
        """Compute, quantise and store row by row. `deep`: see device/swiglu.py."""

        def activate(s: int) -> list:
            return [swiglu(g, u, deep) for g, u in zip(gates.values(s), ups.values(s), strict=True)]

        quantizer = quantizer_of(self.scaling, self.tile, self.access)
        ids, exists, col = place
        quantizer((ComputedRows(activate), target), None, ids, exists, col, width)


def quantizer_of(scaling: BlockScaling | None, tile: WarpTile, access: RowAccess) -> TileQuantizer:
    """The quantiser of a kernel that has one."""
    assert scaling is not None
    return TileQuantizer(scaling, tile, access)
