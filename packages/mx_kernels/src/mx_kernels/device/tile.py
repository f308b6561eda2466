"""The tile that every quantiser works on: 128 rows × 128 columns (or fewer) per CTA, 32 rows × 8·lanes columns per warp.

A scale block is 32 elements along a row or down a column, so a warp tile holds whole blocks both ways: both block maxima
come from the same registers, with warp shuffles only. `lanes` lanes lie side by side over a row, 8 columns each; a lane
holds every (32/lanes)-th row. A CTA tile 128 wide is one 512-byte tile of blocked scales in either orientation.

    lanes = 8:  lane = 8·lr + lc   holds rows lr, lr+4, … lr+28 and columns 8·lc … 8·lc+7 of its 32 × 64
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Int64, Uint32, select_

from mx_kernels.device import ptx
from mx_kernels.device.mx import BlockScaling

ROWS = 128  # of a CTA tile
BLOCK = 32
VECTOR = 8  # columns of one lane
SCALE_TILE_BYTES = 512


class Rows(ABC):
    """The values a lane holds: 8 columns of each of its rows. `packed`: maxima are taken of pairs of bf16."""

    packed = False

    def words(self, step: int) -> Sequence[Any]:
        """What maxima are taken of: 8 Float32, or 4 pairs of bf16 without their signs."""
        return self.values(step)

    @abstractmethod
    def values(self, step: int) -> Sequence[Any]:
        """The 8 values of a row, Float32."""

    @property
    def maximum(self) -> Callable[[Any, Any], Any]:
        """Of magnitudes, with NaN above all."""
        return ptx.max_u16x2 if self.packed else ptx.max_abs

    def patterns(self, words: Sequence[Any]) -> list[Any]:
        """fp32 patterns of magnitudes: one a word, or two if packed."""
        return _halves(words) if self.packed else [w.bitcast(Uint32) & Uint32(0x7FFF_FFFF) for w in words]


@dataclass(frozen=True)
class FloatRows(Rows):
    """Eight fp32 values a row."""

    rows: list[list[Any]]

    def values(self, step: int) -> Sequence[Any]:
        """See Rows."""
        return self.rows[step]


@dataclass(frozen=True)
class ComputedRows(Rows):
    """Eight fp32 values a row, computed at their first use: the program then goes row by row."""

    compute: Callable[[int], list[Any]]
    _done: dict[int, list[Any]] = field(default_factory=dict)

    def values(self, step: int) -> Sequence[Any]:
        """See Rows."""
        if step not in self._done:
            self._done[step] = self.compute(step)
        return self._done[step]


@dataclass(frozen=True)
class RecomputedRows(Rows):
    """Eight fp32 values a row, from `first` at their first use and from `again` at every other: none are kept."""

    first: Callable[[int], list[Any]]
    again: Callable[[int], list[Any]]
    _used: set[int] = field(default_factory=set)

    def values(self, step: int) -> Sequence[Any]:
        """See Rows."""
        if step in self._used:
            return self.again(step)
        self._used.add(step)
        return self.first(step)


@dataclass(frozen=True)
class Bf16Rows(Rows):
    """Four words of two bf16 values a row."""

    rows: list[list[Any]]
    packed = True

    def words(self, step: int) -> Sequence[Any]:
        """See Rows."""
        return [w & Uint32(0x7FFF_7FFF) for w in self.rows[step]]

    def values(self, step: int) -> Sequence[Any]:
        """See Rows."""
        return [half.bitcast(Float32) for half in _halves(self.rows[step])]


@dataclass(frozen=True)
class WeightedRows(Rows):
    """Rows times a weight each, in fp32.

    Multiplied once for the maxima, once for the codes: cheaper than keeping the products. The compiler would merge the
    two, were the first not of unsigned values (the same magnitudes).
    """

    rows: Rows
    weights: list[Any]

    def words(self, step: int) -> Sequence[Any]:
        """See Rows."""
        words = self.rows.words(step)
        unsigned = [h.bitcast(Float32) for h in _halves(words)] if self.rows.packed else words
        return [v * self.weights[step] for v in unsigned]

    def values(self, step: int) -> Sequence[Any]:
        """See Rows."""
        return [v * self.weights[step] for v in self.rows.values(step)]


@dataclass(frozen=True)
class WarpTile:
    """Which elements a lane holds, and block maxima over the warp. The CTA tile is `height` × `cols`."""

    lanes: int
    cols: int = 128
    height: int = ROWS

    @property
    def steps(self) -> int:
        """Rows that a lane holds."""
        return self.lanes

    @property
    def stride(self) -> int:
        """From one row of a lane to the next."""
        return BLOCK // self.lanes

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.height * self.cols // (VECTOR * self.steps)

    @property
    def across(self) -> int:
        """Warps side by side."""
        return self.cols // (VECTOR * self.lanes)

    def place(self) -> tuple[Int32, Int32]:
        """First row and first column of this lane within the CTA tile."""
        lane, warp = ca.lane_idx(), ca.make_warp_uniform(ca.warp_idx())
        row = warp // self.across * BLOCK + lane // self.lanes
        return row, (warp % self.across * self.lanes + lane % self.lanes) * VECTOR

    def whole_rows(self) -> "Share":
        """What this lane moves where warps side by side share out their rows, not their columns.

        A warp's own rows are 8·lanes columns; as rows of the CTA tile they make wider requests, of which L2 needs fewer.
        """
        lane, warp = ca.lane_idx(), ca.make_warp_uniform(ca.warp_idx())
        each = self.stride // self.across
        rest, chunk = lane // self.lanes, lane % self.lanes
        row, holder = warp % self.across * each + rest % each, rest // each
        first_warp = warp // self.across * self.across
        thread = (first_warp + holder) * 32 + row * self.lanes + chunk
        return Share(first_warp // self.across * BLOCK + row, (holder * self.lanes + chunk) * VECTOR, thread)

    def rows(self, first: Int32) -> list[Int32]:
        """All rows of a lane whose first is `first`."""
        return [first + s * self.stride for s in range(self.steps)]

    def row_maxima(self, values: Rows, steps: Iterable[int]) -> "Shared":
        """Maxima of these rows' blocks of 32 columns, shared out over the block's 4 lanes."""
        maxima = [reduce(values.maximum, values.words(s)) for s in steps]
        if values.packed:  # two rows to a word
            pairs = zip(maxima[::2], maxima[1::2], strict=True)
            maxima = [values.maximum(ptx.low_halves(a, b), ptx.high_halves(a, b)) for a, b in pairs]
        return reduce_scatter(maxima, values.maximum, (2, 1))

    def col_maxima(self, values: Rows) -> "Shared":
        """Maxima of this lane's 8 columns over the warp's 32 rows, shared out over the lanes that hold the columns."""
        columns = zip(*(values.words(s) for s in range(self.steps)), strict=True)
        maxima = [reduce(values.maximum, c) for c in columns]
        across = tuple(d for d in (16, 8, 4, 2, 1) if d >= self.lanes)
        return reduce_scatter(maxima, values.maximum, across)


@dataclass(frozen=True)
class Share:
    """Eight columns of every `stride`-th row of a CTA tile, from `row` on, and the thread that holds these elements."""

    row: Int32
    col: Int32
    thread: Int32


@dataclass(frozen=True)
class Shared:
    """Words that a group of lanes shares out: this lane has `mine`, beginning with number `first` of all.

    The lanes of the group differ in the lane bits `split`; those that differ in the bits `same` hold the same words.
    """

    mine: list[Any]
    first: Any
    split: tuple[int, ...]
    same: tuple[int, ...]

    def is_writer(self) -> Boolean:
        """Of the lanes that hold the same words, one says yes."""
        return (ca.lane_idx() & sum(self.same)) == 0

    def all_gather(self, mine: list[Any]) -> list[Any]:
        """Everyone's `mine`, in order; as many from each."""
        segment = (31 - sum(self.split)) << 8 | 31  # of shfl.idx: these lane bits are the reader's own
        gathered = []
        for owner in range(1 << len(self.split)):
            source = sum(d for k, d in enumerate(reversed(self.split)) if owner >> k & 1)
            gathered += [Uint32(ca.shuffle_sync(m, source, mask_and_clamp=segment)) for m in mine]
        return gathered if self.split else mine


def reduce_scatter(words: list[Any], maximum: Callable[[Any, Any], Any], bits: tuple[int, ...]) -> Shared:
    """Maxima over the lanes that differ in `bits`. Each exchange halves the words of a lane while there are several.

    What follows from a maximum is then computed by one lane and gathered, not by all of them.
    """
    first, split = Int32(0), 0
    for bit in bits:
        half = len(words) // 2
        send = words
        if half:
            upper, split = (ca.lane_idx() & bit) != 0, split + 1
            low, high = words[:half], words[half:]
            words = [type(a)(select_(upper, b, a)) for a, b in zip(low, high, strict=True)]
            send = [type(a)(select_(upper, a, b)) for a, b in zip(low, high, strict=True)]
            first += Int32(select_(upper, Int32(half), Int32(0)))
        words = [maximum(w, type(w)(ca.shuffle_sync_bfly(s, bit))) for w, s in zip(words, send, strict=True)]
    return Shared(words, first, bits[:split], bits[split:])


def _halves(words: Sequence[Any]) -> list[Uint32]:
    """The fp32 patterns of the two bf16 values in each word."""
    return [half for w in words for half in (w << Uint32(16), w & Uint32(0xFFFF_0000))]


def spread(tile: WarpTile, array: cute.Pointer, first: Int32, end: Int32, default: int) -> list[Any]:
    """The 32-bit entry of each of this lane's rows, from an array over rows; `default` at and past `end`.

    One coalesced load per warp, then shuffles.
    """
    local_row, _ = tile.place()
    row = first + local_row // BLOCK * BLOCK + ca.lane_idx()
    there = row < end
    entry = ptx.load_scalar(array + Int64(row), 32, there)
    entry = Uint32(select_(there, entry, Uint32(default & 0xFFFF_FFFF)))
    return [Uint32(ca.shuffle_sync(entry, r)) for r in tile.rows(local_row % BLOCK)]


@dataclass(frozen=True)
class RowAccess:
    """How a lane reads and writes its 8 columns of a row.

    `vector`: rows are 16-byte aligned and a multiple of 8 long. Otherwise element by element, with a ragged end.
    """

    element_bits: int
    vector: bool

    def limit(self, col: Int32, cols: Int32, end: Int32) -> Int32:
        """Rows below this exist for a lane at column `col`: `end`, or 0 for a lane past the last column."""
        return Int32(select_(col < cols, end, Int32(0)))

    def load(self, row: cute.Pointer, col: Int32, cols: Int32, valid: Boolean) -> list[Any]:
        """Eight values from `row` (a byte pointer to this lane's column): bf16 in 4 words, fp32 as 8; zeros if not there."""
        size = self.element_bits // 8
        if self.vector:
            words = [w for i in range(0, VECTOR * size, 16) for w in ptx.load_v4(row + i, valid)]
        else:
            words = [
                ptx.load_scalar(row + i * size, self.element_bits, valid & (col + i < cols))
                for i in range(VECTOR)
            ]
            if size == 2:
                words = [ptx.low_halves(a, b) for a, b in zip(words[::2], words[1::2], strict=True)]
        return words if size == 2 else [w.bitcast(Float32) for w in words]

    def as_rows(self, rows: list[list[Any]]) -> Rows:
        """What `load` returned for each of a lane's rows."""
        return Bf16Rows(rows) if self.element_bits == 16 else FloatRows(rows)

    def store_codes(
        self, row: cute.Pointer, col: Int32, cols: Int32, codes: list[Uint32], valid: Boolean
    ) -> None:
        """Eight bytes to `row` (a pointer to this lane's column)."""
        if self.vector:
            ptx.store_words(row, codes, valid)
            return
        for i in range(VECTOR):
            ptx.store_byte(row + i, codes[i // 4] >> Uint32(8 * (i % 4)), valid & (col + i < cols))

    def words(self, values: Sequence[Any]) -> list[Any]:
        """Eight fp32 values, rounded to this element type, as they lie in memory."""
        if self.element_bits == 16:
            return [ptx.pack_bf16(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
        return [v.bitcast(Uint32) for v in values]

    def store_values(self, row: cute.Pointer, values: Sequence[Any], valid: Boolean) -> None:
        """Eight fp32 values, rounded to this element type, to `row` (a byte pointer to this lane's column)."""
        words = self.words(values)
        for i in range(0, len(words), 4):
            ptx.store_words(row + 4 * i, words[i : i + 4], valid)


@dataclass(frozen=True)
class ScaleTile:
    """One orientation's 128 × 4 scale bytes of a CTA tile, staged in shared memory in the blocked order.

    After a barrier, `flush_…` writes them out: as one tile of blocked scales, or as row-major bytes.
    """

    smem: cute.Pointer

    def at(self, r: Int32, c: Int32) -> cute.Pointer:
        """Address of byte (r, c), r < 128 and c < 4; (r + i, c) is 16·i further inside a group of 32 rows."""
        return self.smem + ((r & 31) * 16 + (r >> 5) * 4 + c)

    def flush_blocked(self, out: cute.Pointer, tile_index: Int64, thread: Int32) -> None:
        """512 bytes to tile `tile_index` of blocked scales, by the threads 0 ≤ `thread` < 32."""
        offset = (thread & 31) * 16
        words = load_shared(self.smem + offset, 4)
        ptx.store_words(out + (tile_index * SCALE_TILE_BYTES + offset), words, (thread >= 0) & (thread < 32))

    def flush_band(self, out: cute.Pointer, tile_index: Int64, band: Int32, *, columns: bool) -> None:
        """What 32 rows of elements have of tile `tile_index` of blocked scales, staged as if it were band 0 of 4.

        With blocks along the rows that is 32 rows of 4 bytes, else column `band`: neighbours store neighbouring bytes.
        """
        thread = Int32(ca.thread_idx()[0])
        to = out + tile_index * SCALE_TILE_BYTES
        if columns:
            byte = cute.make_tensor(self.smem + (thread & 127) * 4, cute.make_layout(1))[0]
            ptx.store_byte(to + (thread * 4 + band), byte, thread < ROWS)
        else:
            words = load_shared(self.smem + (thread & 31) * 16, 1)
            ptx.store_words(to + (thread * 16 + band * 4), words, thread < BLOCK)

    def flush(
        self,
        out: cute.Pointer,
        at: tuple[Int32, Int32],
        end: tuple[Int32, Int32],
        of: Int32,
        blocked: bool,
        count: int,
        height: int = ROWS,
    ) -> None:
        """The first `count` bytes of the first `height` rows, a row a thread, to scales of `of` columns.

        Byte (r, c) goes to at + (r, c) if that is before `end` in both coordinates.
        """
        thread = ca.thread_idx()[0]
        r = at[0] + thread
        mine = (thread < height) & (r < end[0])
        staged = cute.make_tensor(self.at(thread & (height - 1), Int32(0)), cute.make_layout(count))
        for i in range(count):
            c = at[1] + i
            ptx.store_byte(out + scale_offset(r, c, of, blocked), staged[i], mine & (c < end[1]))


def load_shared(pointer: cute.Pointer, n: int) -> list[Uint32]:
    """`n` words of shared memory as one access."""
    aligned = cute.make_ptr(Uint32, pointer.toint(), cute.AddressSpace.smem, assumed_align=4 * n)
    words = cute.make_tensor(aligned, cute.make_layout(n)).load()
    return [words[i] for i in range(n)]


def scale_offset(r: Int32, c: Int32, cols: Int32, blocked: bool) -> Int64:
    """Where byte (r, c) lies in scales of `cols` columns."""
    if not blocked:
        return Int64(r) * cols + c
    tile = Int64(r >> 7) * ((cols + 3) >> 2) + (c >> 2)
    return tile * SCALE_TILE_BYTES + ((r & 31) * 16 + (r >> 5 & 3) * 4 + (c & 3))


@dataclass(frozen=True)
class Target(ABC):
    """Where one orientation goes; `scales` stages the scale bytes."""

    scales: ScaleTile

    @abstractmethod
    def store(
        self,
        access: RowAccess,
        step: int,
        place: tuple[Int64, Int32, Int32],
        codes: list[Uint32],
        exists: Boolean,
    ) -> None:
        """Eight codes of a lane's row number `step`; `place`: the row's offset, the lane's column, the matrix's columns."""


@dataclass(frozen=True)
class MemoryTarget(Target):
    """Codes go straight to memory: `data` points to this lane's column of row 0."""

    data: cute.Pointer

    def store(self, access, step, place, codes, exists) -> None:
        """See Target."""
        offset, col, cols = place
        access.store_codes(self.data + offset, col, cols, codes, exists)


@dataclass(frozen=True)
class TileQuantizer:
    """The blocks of the values that a warp holds, to codes in global memory and scale bytes in `ScaleTile`s."""

    scaling: BlockScaling
    tile: WarpTile
    access: RowAccess

    def __call__(
        self,
        row: tuple[Rows, Target] | None,
        col: tuple[Rows, Target] | None,
        ids: list[Int32],
        exists: list[Boolean],
        at: Int32,
        cols: Int32,
    ) -> None:
        """Blocks along the rows of one set of values, down the columns of another or the same.

        All maxima come first and each row is then coded both ways at once, which keeps the fewest registers alive.

        Args:
            row: values and target of the blocks along the rows, if wanted.
            col: the same for blocks down the columns.
            ids: this lane's rows in the output.
            exists: which of them are written.
            at: this lane's first column.
            cols: columns of the output.
        """
        steps = range(self.tile.steps)
        # Rows alone need not wait for each other.
        together = col is not None or (row is not None and row[0].packed)
        row_factors: list[Any] = self._row_factors(row, steps) if row and together else []
        col_factors = self._col_factors(col) if col else []
        for s in steps:
            place = Int64(ids[s]) * Int64(cols), at, cols
            values: Sequence[Any] = []
            if row:
                factor = row_factors[s] if together else self._row_factors(row, [s])[0]
                values = row[0].values(s)
                codes = self.scaling.codes8(values, [factor] * VECTOR)
                row[1].store(self.access, s, place, codes, exists[s])
            if col:
                values = values if row and row[0] is col[0] else col[0].values(s)
                codes = self.scaling.codes8(values, col_factors)
                col[1].store(self.access, s, place, codes, exists[s])

    def _row_factors(self, row: tuple[Rows, Target], steps: Iterable[int]) -> list[Any]:
        """The factors of these rows' blocks; their scale bytes are staged."""
        values, target = row
        local_row, local_col = self.tile.place()
        shared = self.tile.row_maxima(values, steps)
        step = shared.first * (2 if values.packed else 1) + next(iter(steps))
        stage = target.scales.at(local_row, local_col // BLOCK) + step * (16 * self.tile.stride)
        return self._factors(values, shared, stage, 16 * self.tile.stride)

    def _col_factors(self, col: tuple[Rows, Target]) -> list[Any]:
        """The factors of this lane's columns; their scale bytes are staged."""
        values, target = col
        local_row, local_col = self.tile.place()
        shared = self.tile.col_maxima(values)
        column = local_col + shared.first * (2 if values.packed else 1)
        return self._factors(values, shared, target.scales.at(column, local_row // BLOCK), 16)

    def _factors(self, values: Rows, shared: Shared, stage: cute.Pointer, pitch: int) -> list[Any]:
        mine = [self.scaling.factor(amax) for amax in values.patterns(shared.mine)]
        for i, factor in enumerate(mine):
            ptx.store_byte(stage + pitch * i, self.scaling.scale_byte(factor), shared.is_writer(), "shared")
        return shared.all_gather(mine)
