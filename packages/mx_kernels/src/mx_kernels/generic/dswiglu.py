"""The backward of SwiGLU over ALIGNED rows, quantised or plain, from one read of da and h; tiles as in generic/swiglu.py.

Inputs wait in shared memory (device/stage.py) and the results of a tile are made one after the other: registers are what
this kernel is short of. Codes leave through shared memory too, in whole rows of the tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator
from mx_core import RowMap

from mx_kernels.device import ptx
from mx_kernels.device.launch import carveout, fake_pointer, fake_stream
from mx_kernels.device.stage import CodeStage, Lookahead
from mx_kernels.device.swiglu import any_deep, dswiglu, silu_and_dg
from mx_kernels.device.tile import (
    BLOCK,
    ROWS,
    SCALE_TILE_BYTES,
    VECTOR,
    FloatRows,
    RecomputedRows,
    ScaleTile,
    load_shared,
)
from mx_kernels.generic.groups import GroupTable, real_rows
from mx_kernels.generic.swiglu import StagedTiles, quantizer_of

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


class Stages(NamedTuple):
    """What lies in shared memory."""

    inputs: cute.Pointer
    """Gate, up and da; once they have been read, the codes of dh."""
    codes: cute.Pointer
    """Of a."""
    scales: cute.Pointer
    """OUTPUTS tiles of scale bytes."""
    weights: cute.Pointer
    """fp32, a row's."""
    sums: cute.Pointer
    """fp32 (warps across, rows): each warp's share of dw."""


@dataclass(frozen=True)
class DSwigluKernel(StagedTiles):
    """da (P, H), h (P, 2H), weights w (P,) → dh = w·∂<da, a>/∂h, a and dw = <da, a>; a = silu(gate)·up.

    `scaling` None: dh and w·a in h's dtype. Else codes and scales of dh along 2H, and with `columns` of dh and a down the
    rows. dw is summed in a fixed order: every CTA's share of a row goes to memory, another kernel adds the shares.

    A CTA takes a band of 32 rows, a quarter of a unit of the group table.
    """

    columns: bool

    staged = 3  # gate, up and da

    def stages(self, smem: Any) -> tuple[Stages, Any]:
        """Where things lie from `smem` on, and where they end."""
        tile = self.tile
        at = [smem]
        for size in (
            self.lookahead.bytes,
            CodeStage.bytes_of(tile) if self.columns else 0,
            0 if self.scaling is None else OUTPUTS * SCALE_TILE_BYTES,
            4 * tile.height,
            4 * tile.height * tile.across,
        ):
            at.append(at[-1] + size)
        return Stages(*at[:-1]), at[-1]

    @property
    def smem_bytes(self) -> int:
        """Of all `Stages`."""
        return self.stages(0)[1]

    def build(self):
        """Function and arguments for `jit.compiled`."""
        data = fake_pointer(Uint8, 16)
        inputs = data, data, fake_pointer(Float32), fake_pointer(Int32)
        scratch = fake_pointer(Int32, 16), fake_pointer(Float32, 16), fake_pointer(Float32)
        return self, *inputs, *[data] * 6, *scratch, Int32(0), Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        da: cute.Pointer,
        h: cute.Pointer,
        weights: cute.Pointer,
        offs: cute.Pointer,
        dh_row: cute.Pointer,
        dh_row_scale: cute.Pointer,
        dh_col: cute.Pointer,
        dh_col_scale: cute.Pointer,
        a_col: cute.Pointer,
        a_col_scale: cute.Pointer,
        table: cute.Pointer,
        shares: cute.Pointer,
        dw: cute.Pointer,
        rows: Int32,
        width: Int32,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        """`rows` P, `width` H. Scratch: table (P / 128, 4), shares (column tiles, P). Data are pointers to bytes."""
        out = DSwigluOutputs(dh_row, dh_row_scale, dh_col, dh_col_scale, a_col, a_col_scale)
        col_tiles = cute.ceil_div(width, self.tile.cols)
        GroupTable(RowMap.ALIGNED)(offs, table, groups, rows, rows // ROWS, stream)
        self.kernel(da, h, weights, table, out, shares, rows, width).launch(
            grid=(col_tiles, ROWS // self.tile.height, rows // ROWS),
            block=(self.tile.threads, 1, 1),
            min_blocks_per_mp=self.config.min_blocks,
            preferred_smem_carveout=carveout(self.smem_bytes, self.config.min_blocks),
            stream=stream,
        )
        self.add_shares(shares, table, dw, rows, col_tiles).launch(
            grid=(rows // ROWS, 1, 1), block=(ROWS, 1, 1), stream=stream
        )

    @cute.kernel
    def add_shares(
        self, shares: cute.Pointer, table: cute.Pointer, dw: cute.Pointer, rows: Int32, count: Int32
    ):
        """Dw of a row is the sum of its shares, first to last; 0 on padding."""
        unit = ca.block_idx()[0]
        row = unit * ROWS + ca.thread_idx()[0]
        shares_SP = cute.make_tensor(shares, cute.make_layout((count, rows), stride=(Int64(rows), 1)))
        total = Float32(0)
        if ca.thread_idx()[0] < real_rows(table, unit):
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
        stages, _ = self.stages(SmemAllocator().allocate(self.smem_bytes, 16))
        tile_col, band, unit = ca.block_idx()
        real = real_rows(table, unit)
        if real > 0:
            real -= band * self.tile.height
            at = unit * ROWS + band * self.tile.height, tile_col * self.tile.cols
            self.copy(da, h, stages.inputs, at, real, width)
            self.stage_weights(weights, stages.weights, at, real)
            ca.cp_async_wait_group(0)
            ca.barrier()
            self.backward_tile(stages, out, at, width)
            ca.barrier()
            self.flush_sums(shares, stages.sums, at, tile_col, rows)
            if cutlass.const_expr(self.scaling is not None):
                self.flush_codes(stages, out, at, rows, width)
                self.flush_scales(stages, out, unit, band, tile_col, rows, width)

    def copy(self, da, h, stage, at, real, width):
        """Begin to copy gate, up and da; zeros past the real rows."""
        size = self.element_bits // 8
        share = self.tile.whole_rows()
        col = at[1] + share.col
        some = self.access.limit(col, width, real)
        valid = [r < some for r in self.tile.rows(share.row)]
        ids = self.tile.rows(at[0] + share.row)
        for tensor, base, pitch, c in (
            (GATE, h, 2 * width, col),
            (UP, h, 2 * width, width + col),
            (GRAD, da, width, col),
        ):
            pointers = [base + (Int64(i) * pitch + c) * size for i in ids]
            self.lookahead.copy(stage, tensor, pointers, valid, share.thread)
        ca.cp_async_commit_group()

    def stage_weights(self, weights, stage, at, real):
        """The rows' weights, 0 past the real ones."""
        row = Int32(ca.thread_idx()[0])
        weight = ptx.load_scalar(weights + Int64(at[0] + row), 32, row < real)
        ptx.store_words(stage + row * 4, [weight], row < self.tile.height, "shared")

    @cute.jit
    def backward_tile(self, stages: Stages, out: DSwigluOutputs, at: tuple, width: Int32):
        """Compute; store, or stage the codes."""
        deep = any_deep(self.lookahead.rows(stages.inputs, GATE), self.tile.steps)
        if cutlass.const_expr(self.scaling is None):
            if deep:
                self.plain_tile(stages, out, at, width, True)
            else:
                self.plain_tile(stages, out, at, width, False)
        else:
            gradients = [Float32(0)] * (2 * VECTOR * self.tile.steps)  # dg, then du
            if deep:
                gradients = self.activations(stages, at, width, True)
            else:
                gradients = self.activations(stages, at, width, False)
            ca.barrier()  # the inputs have been read: codes take their place
            self.gradients(gradients, stages, at, width)

    def place(self, at: tuple, width: Int32):
        """Output rows of this lane, which it writes, and its first column."""
        local_row, local_col = self.tile.place()
        col = at[1] + local_col
        return self.tile.rows(at[0] + local_row), [col < width] * self.tile.steps, col

    @cute.jit
    def plain_tile(
        self, stages: Stages, out: DSwigluOutputs, at: tuple, width: Int32, deep: cutlass.Constexpr[bool]
    ):
        """Compute and store dh and w·a. `deep`: see device/swiglu.py."""
        access, size = self.access, self.element_bits // 8
        ids, exists, col = self.place(at, width)
        lane = LaneGradients(self.lookahead, stages, deep)
        for s in cutlass.range_constexpr(self.tile.steps):
            dg, du, a = lane.results(s)
            lane.put_share(s, dot(lane.inputs(s)[GRAD], a))
            dh = out.dh_row + (Int64(ids[s]) * (2 * width) + col) * size
            access.store_values(dh, dg, exists[s])
            access.store_values(dh + Int64(width) * size, du, exists[s])
            wa = [lane.weight(s) * v for v in a]
            access.store_values(out.a_col + (Int64(ids[s]) * width + col) * size, wa, exists[s])

    @cute.jit
    def activations(self, stages: Stages, at: tuple, width: Int32, deep: cutlass.Constexpr[bool]):
        """Quantise a; return dg and du, 8 values a row."""
        ids, exists, col = self.place(at, width)
        lane = LaneGradients(self.lookahead, stages, deep)
        if cutlass.const_expr(self.columns):
            a = RecomputedRows(lane.compute, lane.activation)
            target = self.targets(stages)[4]
            quantizer_of(self.scaling, self.tile, self.access)(None, (a, target), ids, exists, col, width)
        else:
            for s in cutlass.range_constexpr(self.tile.steps):
                lane.compute(s)
        return lane.dg + [v for s in range(self.tile.steps) for v in lane.du(s)]

    def gradients(self, gradients: list, stages: Stages, at: tuple, width: Int32):
        """Quantise dg and du, one after the other."""
        ids, exists, col = self.place(at, width)
        targets = self.targets(stages)
        quantizer = quantizer_of(self.scaling, self.tile, self.access)
        rows = [gradients[i : i + VECTOR] for i in range(0, len(gradients), VECTOR)]
        for half in range(2):
            values, first = FloatRows(rows[half * self.tile.steps :][: self.tile.steps]), width * half + col
            by_col = (values, targets[2 + half]) if self.columns else None
            quantizer((values, targets[half]), by_col, ids, exists, first, 2 * width)

    def targets(self, stages: Stages) -> list[CodeStage]:
        """Where codes and scale bytes are staged, by output."""
        size = CodeStage.bytes_of(self.tile)
        codes = [stages.inputs + i * size for i in range(4)] + [stages.codes]
        return [CodeStage(s, c, self.tile) for s, c in zip(self.scale_tiles(stages), codes, strict=True)]

    def scale_tiles(self, stages: Stages) -> list[ScaleTile]:
        """Where scale bytes are staged, by output."""
        return [ScaleTile(stages.scales + i * SCALE_TILE_BYTES) for i in range(OUTPUTS)]

    def flush_sums(self, shares, sums, at, tile_col, rows):
        """The CTA's share of each row's dw: its line of shares (column tiles, P)."""
        thread, height = Int32(ca.thread_idx()[0]), self.tile.height
        total = Float32(0)
        for i in range(self.tile.across):
            total += load_shared(sums + ((thread & (height - 1)) + i * height) * 4, 1)[0].bitcast(Float32)
        to = shares + (Int64(tile_col) * rows + (at[0] + thread))
        ptx.store_words(to, [total.bitcast(Uint32)], thread < height)

    def flush_codes(self, stages, out, at, rows, width):
        """The staged codes, to dh and a."""
        for i, target in enumerate(self.targets(stages)[: OUTPUTS if self.columns else 2]):
            data = (out.dh_row, out.dh_col, out.a_col)[i // 2]
            half, pitch = width * (i % 2), width if i == 4 else 2 * width
            target.flush(data, (at[0], half + at[1]), (rows, half + width), pitch)

    @cute.jit
    def flush_scales(
        self,
        stages: Stages,
        out: DSwigluOutputs,
        unit: Int32,
        band: Int32,
        tile_col: Int32,
        rows: Int32,
        width: Int32,
    ):
        """The staged scale bytes, to the scales of dh and a; the quick way where tiles of blocked scales are whole."""
        stage = self.scale_tiles(stages)[: OUTPUTS if self.columns else 2]
        scale = out.dh_row_scale, out.dh_row_scale, out.dh_col_scale, out.dh_col_scale, out.a_col_scale
        row_blocks, across = rows // BLOCK, width // BLOCK
        if self.blocked and width % ROWS == 0:
            tiles, units = width // ROWS, rows // ROWS
            for i in cutlass.range_constexpr(len(stage)):
                tile = tiles * (i % 2) + tile_col
                index = Int64(tile) * units + unit if i >= 2 else Int64(unit) * (2 * tiles) + tile
                stage[i].flush_band(scale[i], index, band, columns=i >= 2)
        else:
            block = unit * 4 + band
            for i in cutlass.range_constexpr(len(stage)):
                half = i % 2
                if cutlass.const_expr(i < 2):
                    start, end = (block * BLOCK, across * half + tile_col * 4), (rows, across * (half + 1))
                    stage[i].flush(scale[i], start, end, 2 * across, self.blocked, 4, height=BLOCK)
                else:
                    first = width * half
                    start, end = (first + tile_col * ROWS, block), (first + width, row_blocks)
                    stage[i].flush(scale[i], start, end, row_blocks, self.blocked, 1)


class LaneGradients:
    """The results of a lane's rows, one row after the other.

    Beside dg only silu(g) is kept, of which a and du are made when they are needed: a third fewer registers than three
    results. The deep form (device/swiglu.py), which hardly ever runs, keeps a and computes du once more from the start.
    """

    def __init__(
        self,
        lookahead: Lookahead,
        stages: Stages,
        deep: bool,
    ):
        self.lookahead, self.stages, self.deep = lookahead, stages, deep
        self.kept: list[list] = []
        self.dg: list = []

    def weight(self, step: int) -> Any:
        """The row's weight."""
        row = self.lookahead.tile.place()[0] + step * self.lookahead.tile.stride
        return load_shared(self.stages.weights + row * 4, 1)[0].bitcast(Float32)

    def put_share(self, step: int, dot: Float32) -> None:
        """Add up what the warp has of a row's dw; the first of the lanes that hold the row stages the sum."""
        tile = self.lookahead.tile
        row, col = tile.place()
        for distance in (d for d in (1, 2, 4, 8) if d < tile.lanes):
            dot += ca.shuffle_sync_bfly(dot, distance)
        of_warp = VECTOR * tile.lanes
        at = col // of_warp * tile.height + row + step * tile.stride
        ptx.store_words(
            self.stages.sums + at * 4, [dot.bitcast(Uint32)], Boolean(col % of_warp == 0), "shared"
        )

    def inputs(self, step: int) -> list:
        """Gate, up and da of a row, 8 Float32 each."""
        return [self.lookahead.values(self.stages.inputs, tensor, step) for tensor in (GATE, UP, GRAD)]

    def results(self, step: int) -> tuple[list, ...]:
        """dg, du and a of a row."""
        return by_column(dswiglu, *self.inputs(step), weight=self.weight(step), deep=self.deep)

    def compute(self, step: int) -> list:
        """Take the next row: a. Its share of dw is stored, dg is kept."""
        gates, ups, grads = self.inputs(step)
        if self.deep:
            dg, _, kept = by_column(dswiglu, gates, ups, grads, weight=self.weight(step), deep=True)
        else:
            kept, dg = by_column(silu_and_dg, gates, ups, grads, weight=self.weight(step))
        self.kept.append(kept)
        self.dg += dg
        a = kept if self.deep else [u * silu for u, silu in zip(ups, kept, strict=True)]
        self.put_share(step, dot(grads, a))
        return a

    def activation(self, step: int) -> list:
        """The activation once more."""
        if self.deep:
            return self.kept[step]
        ups = self.lookahead.values(self.stages.inputs, UP, step)
        return [u * silu for u, silu in zip(ups, self.kept[step], strict=True)]

    def du(self, step: int) -> list:
        """du; what was kept is then no longer needed."""
        if self.deep:
            return self.results(step)[1]
        grads = self.lookahead.values(self.stages.inputs, GRAD, step)
        return [self.weight(step) * d * silu for d, silu in zip(grads, self.kept[step], strict=True)]


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
