"""The backward of SwiGLU over ALIGNED rows, quantised or plain, from one read of da and h; tiles as in generic/swiglu.py.

Inputs wait in shared memory (device/stage.py), and the results of a tile are made one after the other: registers are what
this kernel is short of.
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
from mx_kernels.device.launch import carveout, fake_pointer, fake_stream
from mx_kernels.device.mx import BlockScaling
from mx_kernels.device.stage import Lookahead
from mx_kernels.device.swiglu import any_deep, dswiglu, silu_and_dg
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    VECTOR,
    FloatRows,
    RecomputedRows,
    RowAccess,
    ScaleTile,
    Target,
    WarpTile,
    spread,
)
from mx_kernels.generic.config import TileConfig
from mx_kernels.generic.groups import real_rows
from mx_kernels.generic.swiglu import quantizer_of

GATE, UP, GRAD = range(3)  # inputs
OUTPUTS = 5  # quantised: dh by row (gate and up), dh by column (gate and up), a


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

    @property
    def access(self) -> RowAccess:
        """How a lane reads and writes."""
        return RowAccess(self.element_bits, True)

    @property
    def lookahead(self) -> Lookahead:
        """Room for a tile of gate, up and da."""
        return Lookahead(self.tile, self.access, 3)

    @property
    def smem_bytes(self) -> int:
        """A tile of inputs and the scale bytes."""
        return self.lookahead.bytes + OUTPUTS * SCALE_TILE_BYTES

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
            preferred_smem_carveout=carveout(self.smem_bytes, self.config.min_blocks),
            stream=stream,
        )
        self.add_shares(shares, table, dw, rows, col_tiles * self.config.warps_across).launch(
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
        smem = SmemAllocator().allocate(self.smem_bytes, 16)
        scales = smem + self.lookahead.bytes
        tile_col, tile_row, _ = ca.block_idx()
        real = real_rows(table, tile_row)
        if real > 0:
            self.backward_tile(
                da, h, weights, out, shares, smem, scales, tile_row, tile_col, real, rows, width
            )
            if cutlass.const_expr(self.scaling is not None):
                ca.barrier()
                self.flush_scales(out, scales, tile_row, tile_col, rows, width)

    @cute.jit
    def backward_tile(
        self,
        da: cute.Pointer,
        h: cute.Pointer,
        weights: cute.Pointer,
        out: DSwigluOutputs,
        shares: cute.Pointer,
        stage: cute.Pointer,
        scales: cute.Pointer,
        tile_row: Int32,
        tile_col: Int32,
        real: Int32,
        rows: Int32,
        width: Int32,
    ):
        """Copy da, gate and up of all rows to shared memory, compute, store."""
        tile = self.tile
        first_row, first_col = tile_row * ROWS, tile_col * tile.cols
        self.copy(da, h, stage, first_row, first_col, real, width)
        row_weights = [w.bitcast(Float32) for w in spread(tile, weights, first_row, first_row + real, 0)]
        ca.cp_async_wait_group(0)
        at = (
            first_row,
            first_col,
            row_weights,
            Shares(shares, tile_col * self.config.warps_across, rows, tile),
        )
        deep = any_deep(self.lookahead.rows(stage, GATE), tile.steps)
        if cutlass.const_expr(self.scaling is None):
            if deep:
                self.plain_tile(stage, at, out, width, True)
            else:
                self.plain_tile(stage, at, out, width, False)
        else:
            gradients = [Float32(0)] * (2 * VECTOR * tile.steps)  # dg, then du
            if deep:
                gradients = self.activations(stage, at, out, scales, width, True)
            else:
                gradients = self.activations(stage, at, out, scales, width, False)
            self.gradients(gradients, at, out, scales, width)

    def copy(self, da, h, stage, first_row, first_col, real, width):
        """Begin to copy gate, up and da."""
        size = self.element_bits // 8
        local_row, local_col = self.tile.place()
        col = first_col + local_col
        some = self.access.limit(col, width, real)
        valid = [r < some for r in self.tile.rows(local_row)]
        ids = self.tile.rows(first_row + local_row)
        for tensor, base, pitch, at in (
            (GATE, h, 2 * width, col),
            (UP, h, 2 * width, width + col),
            (GRAD, da, width, col),
        ):
            self.lookahead.copy(stage, tensor, [base + (Int64(i) * pitch + at) * size for i in ids], valid)
        ca.cp_async_commit_group()

    def place(self, at: tuple, width: Int32):
        """Output rows of this lane, which it writes, and its first column."""
        first_row, first_col, *_ = at
        local_row, local_col = self.tile.place()
        col = first_col + local_col
        return self.tile.rows(first_row + local_row), [col < width] * self.tile.steps, col

    @cute.jit
    def plain_tile(
        self,
        stage: cute.Pointer,
        at: tuple,
        out: DSwigluOutputs,
        width: Int32,
        deep: cutlass.Constexpr[bool],
    ):
        """Compute and store dh and w·a. `deep`: see device/swiglu.py."""
        access, size = self.access, self.element_bits // 8
        ids, exists, col = self.place(at, width)
        _, _, weights, shares = at
        lane = LaneGradients(self.lookahead, stage, weights, deep, shares, ids)
        for s in cutlass.range_constexpr(self.tile.steps):
            dg, du, a = lane.results(s)
            shares.store(ids[s], dot(lane.inputs(s)[GRAD], a))
            dh = out.dh_row + (Int64(ids[s]) * (2 * width) + col) * size
            access.store_values(dh, dg, exists[s])
            access.store_values(dh + Int64(width) * size, du, exists[s])
            wa = [weights[s] * v for v in a]
            access.store_values(out.a_col + (Int64(ids[s]) * width + col) * size, wa, exists[s])

    @cute.jit
    def activations(
        self,
        stage: cute.Pointer,
        at: tuple,
        out: DSwigluOutputs,
        scales: cute.Pointer,
        width: Int32,
        deep: cutlass.Constexpr[bool],
    ):
        """Quantise a; return dg and du, 8 values a row."""
        ids, exists, col = self.place(at, width)
        _, _, weights, shares = at
        lane = LaneGradients(self.lookahead, stage, weights, deep, shares, ids)
        if cutlass.const_expr(self.columns):
            target = self.targets(out, scales, col, width)[4]
            a = RecomputedRows(lane.compute, lane.activation)
            quantizer_of(self.scaling, self.tile, self.access)(None, (a, target), ids, exists, col, width)
        else:
            for s in cutlass.range_constexpr(self.tile.steps):
                lane.compute(s)
        return lane.dg + [v for s in range(self.tile.steps) for v in lane.du(s)]

    def gradients(self, gradients: list, at: tuple, out: DSwigluOutputs, scales: cute.Pointer, width: Int32):
        """Quantise dg and du, one after the other."""
        ids, exists, col = self.place(at, width)
        targets = self.targets(out, scales, col, width)
        quantizer = quantizer_of(self.scaling, self.tile, self.access)
        rows = [gradients[i : i + VECTOR] for i in range(0, len(gradients), VECTOR)]
        for half in range(2):
            values, first = FloatRows(rows[half * self.tile.steps :][: self.tile.steps]), width * half + col
            by_col = (values, targets[2 + half]) if self.columns else None
            quantizer((values, targets[half]), by_col, ids, exists, first, 2 * width)

    def scale_tiles(self, scales: cute.Pointer) -> list[ScaleTile]:
        """Where scale bytes are staged, by output."""
        return [ScaleTile(scales + i * SCALE_TILE_BYTES) for i in range(OUTPUTS)]

    def targets(self, out: DSwigluOutputs, scales: cute.Pointer, col: Int32, width: Int32) -> list[Target]:
        """Where this lane's column goes, by output."""
        data = (
            out.dh_row + col,
            out.dh_row + (width + col),
            out.dh_col + col,
            out.dh_col + (width + col),
            out.a_col + col,
        )
        return [Target(*t) for t in zip(data, self.scale_tiles(scales), strict=True)]

    def flush_scales(self, out, scales, tile_row, tile_col, rows, width):
        """The staged scale bytes of gate and up halves, to the scales of dh and a."""
        tile, stage = self.tile, self.scale_tiles(scales)
        row_blocks, across, per_tile = rows // BLOCK, width // BLOCK, self.tile.cols // BLOCK
        for half in range(2):
            at = tile_row * ROWS, across * half + tile_col * per_tile
            end = rows, across * (half + 1)
            stage[half].flush(out.dh_row_scale, at, end, 2 * across, self.blocked, per_tile)
        if self.columns:
            for i, scale in enumerate((out.dh_col_scale, out.dh_col_scale, out.a_col_scale)):
                first = width if i == 1 else 0
                at, end = (first + tile_col * tile.cols, tile_row * 4), (first + width, row_blocks)
                stage[2 + i].flush(scale, at, end, row_blocks, self.blocked, 4, height=tile.cols)


@dataclass(frozen=True)
class Shares:
    """This warp's shares of the rows' dw: its line of shares (warps over H, P)."""

    pointer: cute.Pointer
    first: Int32  # of this CTA's lines
    rows: Int32
    tile: WarpTile

    def store(self, row: Int32, dot: Float32) -> None:
        """Add up what the lanes that hold this row have of it; the first of them stores."""
        _, local_col = self.tile.place()
        for distance in (d for d in (1, 2, 4, 8) if d < self.tile.lanes):
            dot += ca.shuffle_sync_bfly(dot, distance)
        warp_cols = VECTOR * self.tile.lanes
        line = Int64(self.first + local_col // warp_cols) * self.rows
        ptx.store_words(self.pointer + (line + row), [dot.bitcast(Uint32)], local_col % warp_cols == 0)


class LaneGradients:
    """The results of a lane's rows, one row after the other.

    Beside dg only silu(g) is kept, of which a and du are made when they are needed: a third fewer registers than three
    results. The deep form (device/swiglu.py), which hardly ever runs, keeps a and computes du once more from the start.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        stage: cute.Pointer,
        weights: list,
        deep: bool,
        shares: Shares,
        ids: list[Int32],
    ):
        self.lookahead, self.stage, self.weights, self.deep = lookahead, stage, weights, deep
        self.shares, self.ids = shares, ids
        self.kept: list[list] = []
        self.dg: list = []

    def inputs(self, step: int) -> list:
        """Gate, up and da of a row, 8 Float32 each."""
        return [self.lookahead.values(self.stage, tensor, step) for tensor in (GATE, UP, GRAD)]

    def results(self, step: int) -> tuple[list, ...]:
        """dg, du and a of a row."""
        return by_column(dswiglu, *self.inputs(step), weight=self.weights[step], deep=self.deep)

    def compute(self, step: int) -> list:
        """Take the next row: a. Its share of dw is stored, dg is kept."""
        gates, ups, grads = self.inputs(step)
        if self.deep:
            dg, _, kept = by_column(dswiglu, gates, ups, grads, weight=self.weights[step], deep=True)
        else:
            kept, dg = by_column(silu_and_dg, gates, ups, grads, weight=self.weights[step])
        self.kept.append(kept)
        self.dg += dg
        a = kept if self.deep else [u * silu for u, silu in zip(ups, kept, strict=True)]
        self.shares.store(self.ids[step], dot(grads, a))
        return a

    def activation(self, step: int) -> list:
        """The activation once more."""
        if self.deep:
            return self.kept[step]
        ups = self.lookahead.values(self.stage, UP, step)
        return [u * silu for u, silu in zip(ups, self.kept[step], strict=True)]

    def du(self, step: int) -> list:
        """du; what was kept is then no longer needed."""
        if self.deep:
            return self.results(step)[1]
        grads = self.lookahead.values(self.stage, GRAD, step)
        return [self.weights[step] * d * silu for d, silu in zip(grads, self.kept[step], strict=True)]


def by_column(function, *columns, **options) -> tuple[list, ...]:
    """The results of a function of one column, for the 8 columns of a row."""
    results = [function(*values, **options) for values in zip(*columns, strict=True)]
    return tuple(list(r) for r in zip(*results, strict=True))


def dot(x: list, y: list) -> Float32:
    """Sum of the products, first to last."""
    total = Float32(0)
    for a, b in zip(x, y, strict=True):
        total = ptx.fma(a, b, total)
    return total
