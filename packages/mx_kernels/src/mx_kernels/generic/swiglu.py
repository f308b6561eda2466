"""SwiGLU over ALIGNED rows, forward and backward, quantised or plain; from one read of its inputs.

Both kernels take tiles of 128 rows, of which the group table tells how many are real (generic/groups.py): the others come
out as zeros, and a tile without any is left alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from mx_kernels.device import ptx
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.mx import BlockScaling
from mx_kernels.device.swiglu import any_deep, dswiglu, swiglu
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    VECTOR,
    ComputedRows,
    FloatRows,
    RowAccess,
    Rows,
    ScaleTile,
    Target,
    TileQuantizer,
    WarpTile,
    spread,
)
from mx_kernels.generic.config import TileConfig

REAL = 1  # column of the group table


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


class DSwigluOutputs(NamedTuple):
    """Where the backward kernel writes. Quantised: codes and scales. Plain: dh in `dh_row`, w·a in `a_col`, no scales."""

    dh_row: cute.Pointer
    dh_row_scale: cute.Pointer
    dh_col: cute.Pointer
    dh_col_scale: cute.Pointer
    a_col: cute.Pointer
    a_col_scale: cute.Pointer


@dataclass(frozen=True)
class DSwigluKernel:
    """da (P, H), h (P, 2H), weights w (P,) → dh = w·∂<da, a>/∂h, a and dw = <da, a>; a = silu(gate)·up.

    `scaling` None: dh and w·a in h's dtype. Else codes and scales of dh along 2H, and with `columns` of dh and a down the
    rows. dw is summed in a fixed order: every warp's share of a row goes to memory, a second kernel adds the shares.
    """

    scaling: BlockScaling | None
    element_bits: int
    columns: bool
    blocked: bool
    config: TileConfig

    @property
    def tile(self) -> WarpTile:
        """Who holds what."""
        return WarpTile(self.config.lanes, self.config.cols)

    def build(self):
        """Function and arguments for `jit.compiled`."""
        data = fake_pointer(Uint8, 16)
        inputs = data, data, fake_pointer(Float32), fake_pointer(Int32, 16)
        sums = fake_pointer(Float32, 16), fake_pointer(Float32)
        return self, *inputs, *[data] * 6, *sums, Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        da: cute.Pointer,
        h: cute.Pointer,
        weights: cute.Pointer,
        table: cute.Pointer,
        dh_row: cute.Pointer,
        dh_row_scale: cute.Pointer,
        dh_col: cute.Pointer,
        dh_col_scale: cute.Pointer,
        a_col: cute.Pointer,
        a_col_scale: cute.Pointer,
        shares: cute.Pointer,
        dw: cute.Pointer,
        rows: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        """`rows` P, `width` H; shares (config.warps_over(H), P) is scratch. Data are pointers to bytes."""
        out = DSwigluOutputs(dh_row, dh_row_scale, dh_col, dh_col_scale, a_col, a_col_scale)
        col_tiles = cute.ceil_div(width, self.tile.cols)
        self.kernel(da, h, weights, table, out, shares, rows, width).launch(
            grid=(col_tiles, rows // ROWS, 1),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=16,
            stream=stream,
        )
        count = col_tiles * (self.tile.cols // (VECTOR * self.tile.lanes))
        self.add_shares(shares, table, dw, rows, count).launch(
            grid=(rows // ROWS, 1, 1), block=(ROWS, 1, 1), stream=stream
        )

    @cute.kernel
    def add_shares(
        self, shares: cute.Pointer, table: cute.Pointer, dw: cute.Pointer, rows: Int32, count: Int32
    ):
        """Dw of a row is the sum of its shares, first to last; 0 on padding."""
        tile_row = ca.block_idx()[0]
        row = tile_row * ROWS + ca.thread_idx()[0]
        shares_SP = cute.make_tensor(shares, cute.make_layout((count, rows), stride=(Int64(rows), 1)))
        total = Float32(0)
        if ca.thread_idx()[0] < real_rows(table, tile_row):
            for i in cutlass.range(count, unroll=8):
                total += shares_SP[i, row]
        cute.make_tensor(dw, cute.make_layout(rows))[row] = total

    @cute.kernel
    def kernel(
        self,
        da: cute.Pointer,
        h: cute.Pointer,
        weights: cute.Pointer,
        table: cute.Pointer,
        out: DSwigluOutputs,
        shares: cute.Pointer,
        rows: Int32,
        width: Int32,
    ):
        smem = SmemAllocator().allocate(5 * SCALE_TILE_BYTES, 16)
        tile_col, tile_row, _ = ca.block_idx()
        real = real_rows(table, tile_row)
        if real > 0:
            self.backward_tile(da, h, weights, out, shares, smem, tile_row, tile_col, real, rows, width)
            if cutlass.const_expr(self.scaling is not None):
                ca.barrier()
                self.flush_scales(out, smem, tile_row, tile_col, rows, width)

    @cute.jit
    def backward_tile(
        self,
        da: cute.Pointer,
        h: cute.Pointer,
        weights: cute.Pointer,
        out: DSwigluOutputs,
        shares: cute.Pointer,
        smem: cute.Pointer,
        tile_row: Int32,
        tile_col: Int32,
        real: Int32,
        rows: Int32,
        width: Int32,
    ):
        """Load da, gate and up of all rows, compute, store."""
        tile, access = self.tile, RowAccess(self.element_bits, True)
        size = self.element_bits // 8
        local_row, local_col = tile.place()
        first = tile_row * ROWS
        col = tile_col * tile.cols + local_col
        ids = tile.rows(first + local_row)
        exists = [col < width] * tile.steps
        some = access.limit(col, width, real)
        valid = [r < some for r in tile.rows(local_row)]

        def load(base, pitch, at):
            pointers = [base + (Int64(i) * pitch + at) * size for i in ids]
            return access.as_rows(
                [access.load(p, col, width, v) for p, v in zip(pointers, valid, strict=True)]
            )

        gates, ups, grads = load(h, 2 * width, col), load(h, 2 * width, width + col), load(da, width, col)
        row_weights = [w.bitcast(Float32) for w in spread(tile, weights, first, first + real, 0)]

        inputs = gates, ups, grads, row_weights
        at = ids, exists, col, local_col, tile_col
        if any_deep(gates, tile.steps):
            self.finish(inputs, out, shares, smem, at, rows, width, True)
        else:
            self.finish(inputs, out, shares, smem, at, rows, width, False)

    @cute.jit
    def finish(
        self,
        inputs: tuple,
        out: DSwigluOutputs,
        shares: cute.Pointer,
        smem: cute.Pointer,
        at: tuple,
        rows: Int32,
        width: Int32,
        deep: cutlass.Constexpr[bool],
    ):
        """Compute, quantise, store. `deep`: see device/swiglu.py."""
        tile, access, size = self.tile, RowAccess(self.element_bits, True), self.element_bits // 8
        gates, ups, grads, row_weights = inputs
        ids, exists, col, local_col, tile_col = at

        def compute(s: int):
            return dswiglu_row(gates.values(s), ups.values(s), grads.values(s), row_weights[s], deep)

        if cutlass.const_expr(self.scaling is None):
            dots = []
            for s in cutlass.range_constexpr(tile.steps):
                dg, du, a, dot = compute(s)
                dots.append(dot)
                dh = out.dh_row + (Int64(ids[s]) * (2 * width) + col) * size
                access.store_values(dh, dg, exists[s])
                access.store_values(dh + Int64(width) * size, du, exists[s])
                wa = [row_weights[s] * v for v in a]
                access.store_values(out.a_col + (Int64(ids[s]) * width + col) * size, wa, exists[s])
            self.store_shares(shares, dots, tile_col, local_col, ids, rows)
        else:
            dg, du, a, dots = zip(*(compute(s) for s in range(tile.steps)), strict=True)
            self.store_shares(shares, dots, tile_col, local_col, ids, rows)
            quantizer = quantizer_of(self.scaling, tile, access)
            stage = [ScaleTile(smem + i * SCALE_TILE_BYTES) for i in range(5)]
            if cutlass.const_expr(self.columns):
                by_col = FloatRows(list(a)), Target(out.a_col + col, stage[4])
                quantizer(None, by_col, ids, exists, col, width)
            for half, values in enumerate((FloatRows(list(dg)), FloatRows(list(du)))):
                first = width * half + col
                row = values, Target(out.dh_row + first, stage[half])
                by_col = (values, Target(out.dh_col + first, stage[2 + half])) if self.columns else None
                quantizer(row, by_col, ids, exists, first, 2 * width)

    def store_shares(self, shares, dots, tile_col, local_col, ids, rows):
        """This warp's share of each row's dw, from the first of the lanes that hold the row."""
        warp_cols = VECTOR * self.tile.lanes
        share = tile_col * (self.tile.cols // warp_cols) + local_col // warp_cols
        for s, dot in enumerate(dots):
            for distance in (d for d in (1, 2, 4, 8) if d < self.tile.lanes):
                dot += ca.shuffle_sync_bfly(dot, distance)
            where = shares + (Int64(share) * rows + ids[s])
            ptx.store_words(where, [dot.bitcast(Uint32)], local_col % warp_cols == 0)

    def flush_scales(self, out, smem, tile_row, tile_col, rows, width):
        """The staged scale bytes of gate and up halves, to the scales of dh and a."""
        tile, row_blocks = self.tile, rows // BLOCK
        halves, per_tile = width // BLOCK, self.tile.cols // BLOCK
        stage = [ScaleTile(smem + i * SCALE_TILE_BYTES) for i in range(5)]
        for half in range(2):
            at = tile_row * ROWS, halves * half + tile_col * per_tile
            end = rows, halves * (half + 1)
            stage[half].flush(out.dh_row_scale, at, end, 2 * halves, self.blocked, per_tile)
        if self.columns:
            for half, scale in enumerate((out.dh_col_scale, out.dh_col_scale, out.a_col_scale)):
                first = width if half == 1 else 0
                at = first + tile_col * tile.cols, tile_row * 4
                end = first + width, row_blocks
                stage[2 + half].flush(scale, at, end, row_blocks, self.blocked, 4, height=tile.cols)


def quantizer_of(scaling: BlockScaling | None, tile: WarpTile, access: RowAccess) -> TileQuantizer:
    """The quantiser of a kernel that has one."""
    assert scaling is not None
    return TileQuantizer(scaling, tile, access)


def dswiglu_row(gates, ups, grads, weight, deep):
    """dg, du, a of 8 columns of a row, and their part of <da, a>."""
    dot, results = Float32(0), []
    for g, u, da in zip(gates, ups, grads, strict=True):
        results.append(dswiglu(g, u, da, weight, deep))
        dot = ptx.fma(da, results[-1][2], dot)
    dg, du, a = (list(column) for column in zip(*results, strict=True))
    return dg, du, a, dot


@cute.jit
def real_rows(table: cute.Pointer, tile_row: Int32):
    """How many of a tile's rows are real."""
    return cute.make_tensor(table, cute.make_layout(1 << 30))[tile_row * 4 + REAL]
