"""Turns `offs` on the device into a stream of output tiles, for the persistent grouped GEMMs of every architecture.

All clusters walk one fixed sequence of tiles: groups in order, inside a group bands of `supergroup` tiles of N, walked
along M. The clusters that run at the same time so hold a nearly square part of one expert's output, which is what keeps the
operands in L2. A cluster takes every `clusters`-th tile, or the next one whenever it is done (gemm_tickets.py).

Where a group's last rows fill only the first of two CTAs along M, these take one tile of N each (`splits_tails`).

One warp runs `schedule`; a tile is described to the other warps by a `Work` in shared memory (`next_work`). Groups along M
with COMPACT rows get one more group: the rows from offs[-1] on, with no K at all, so that the ordinary epilogue writes
their zeros.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Constexpr, Int32
from cutlass.cute import arch

from mx_kernels.device.gemm_tickets import draw, leave

LANES = 32
UNIT = 128  # rows: ALIGNED groups and the blocked scales of a group start at a multiple
# From one tile description to the next: whole 16-byte vectors, which is how the compiler reads them.
WORK_WORDS = 8


@dataclass(frozen=True)
class TileOrder:
    """What the sequence of tiles depends on at compile time."""

    tile_m: int  # of a cluster
    tile_n: int
    tile_k: int
    groups_along_k: bool  # wgrad: a group is a range of K, not of M
    aligned: bool  # RowMap.ALIGNED: every group starts at a multiple of UNIT rows
    has_tail: bool  # rows from offs[-1] on are zeroed
    skip_empty: bool = (
        False  # groups without rows give no tiles: their output is accumulated into, not written
    )
    supergroup: int = 8
    cluster_size: int = 1
    splits_tails: bool = False  # clusters of 2 x 1, groups along M: see `Work.split`
    stages: int = 4  # tiles that may stand announced


class Work(NamedTuple):
    """One cluster tile of the output."""

    k_tiles: Int32  # K tiles to sum; 0: the tile is zero; -1: no more work
    m_tile: Int32  # cluster tile inside the group (wgrad: of the output)
    n_tile: Int32
    group: Int32
    start: Int32  # the group's first row in the data
    length: Int32  # its number of real rows
    unit: Int32  # its first 128-row unit: where its blocked scales begin
    split: (
        Int32  # 1: the rows are the first CTA's only; both CTAs have them, and n_tile counts pairs of tiles
    )


class Extent(NamedTuple):
    """Sizes of a problem, D (m, n) = A (m, k) · B (n, k)ᵀ for every group."""

    rows: Int32  # rows of the ragged operand: all groups together
    m: Int32  # rows of the output; used when groups run along K
    n: Int32
    k: Int32  # reduced extent; used when groups run along M
    groups: Int32


class Window(NamedTuple):
    """What one lane knows of its group, 32 consecutive groups to a warp."""

    start: Int32  # COMPACT: its first row
    length: Int32
    tiles_end: Int32  # cluster tiles of this window's groups up to and with this one
    tiles: Int32
    units_end: Int32
    units: Int32


@cute.jit
def schedule(
    order: Constexpr[TileOrder],
    pipe,
    sWork: cute.Tensor,
    offs,
    extent: Extent,
    cluster: Int32,
    clusters: Int32,
    tickets=None,
):
    """Walk the cluster's tiles and announce each (one warp); ends with k_tiles = -1.

    They are the tile `cluster` and every `clusters`-th one from there or, with `tickets`, those that are drawn.

    sWork: int32 (WORK_WORDS, stages). offs: int32 (E,) or None for one group of all rows.
    """
    tile, phase = cluster, Int32(0)
    n_tiles = cute.ceil_div(extent.n, order.tile_n)
    groups = extent.groups
    if cutlass.const_expr(order.has_tail):
        groups = groups + 1
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, order.stages)
    first, tiles_before, units_before = Int32(0), Int32(0), Int32(0)
    window = read_window(order, offs, first, groups, n_tiles, extent)
    busy = Boolean(True)
    pipe.producer_acquire(state)
    while busy:
        while first < groups and tile >= tiles_before + arch.shuffle_sync(window.tiles_end, LANES - 1):
            tiles_before += arch.shuffle_sync(window.tiles_end, LANES - 1)
            units_before += arch.shuffle_sync(window.units_end, LANES - 1)
            first += LANES
            window = read_window(order, offs, first, groups, n_tiles, extent)
        busy = first < groups
        # The lane that holds the tile: as many lanes end at or before it as come before that lane.
        lane = arch.popc(arch.vote_ballot_sync(tiles_before + window.tiles_end <= tile)) % LANES
        local = tile - tiles_before - arch.shuffle_sync(window.tiles_end - window.tiles, lane)
        length = arch.shuffle_sync(window.length, lane)
        unit = units_before + arch.shuffle_sync(window.units_end - window.units, lane)
        start = arch.shuffle_sync(window.start, lane)
        if cutlass.const_expr(order.aligned):
            start = unit * UNIT
            length = cutlass.max(cutlass.min(length, extent.rows - start), 0)
        m_extent, k_extent = length, extent.k
        if cutlass.const_expr(order.groups_along_k):
            m_extent, k_extent = extent.m, length
        m_tile, n_tile, split = tile_in_group(order, local, m_extent, n_tiles)
        k_tiles = cute.ceil_div(k_extent, order.tile_k)
        if cutlass.const_expr(order.has_tail):  # noqa: SIM102 (one is the tracer's, the other the kernel's)
            if first + lane == extent.groups:
                k_tiles = Int32(0)
        if not busy:
            k_tiles = Int32(-1)
        work = Work(k_tiles, m_tile, n_tile, first + lane, start, length, unit, split)
        with arch.elect_one():
            for word in cutlass.range_constexpr(WORK_WORDS):
                sWork[word, state.index] = work[word] if word < len(work) else Int32(0)
            pipe.producer_commit(state)
        state.advance()
        if busy:
            # Before drawing: what is drawn early cannot go to whoever is done first.
            pipe.producer_acquire(state)
            if cutlass.const_expr(tickets is None):
                tile += clusters
            else:
                tile = clusters + draw(tickets, order.cluster_size, phase)
                phase ^= 1
    if cutlass.const_expr(tickets is not None):
        # The last tile's number is tiles_before - 1, and as many tickets are drawn.
        leave(tickets, order.cluster_size, phase, tile == clusters + tiles_before - 1)
    pipe.producer_tail(state)


@cute.jit
def read_window(
    order: Constexpr[TileOrder], offs, first: Int32, groups: Int32, n_tiles: Int32, extent: Extent
) -> Window:
    """Groups first … first + 31, one to a lane. Offsets out of order or past the rows are clamped."""
    group = first + arch.lane_idx()
    start, end = Int32(0), Int32(0)
    if group < groups:
        end = extent.rows
        if cutlass.const_expr(offs is not None):
            if group < extent.groups:
                end = cutlass.min(offs[group], extent.rows)
            if group > 0:
                start = cutlass.min(cutlass.max(offs[group - 1], 0), extent.rows)
    length = cutlass.max(end - start, 0)
    m_extent = length
    if cutlass.const_expr(order.groups_along_k):
        m_extent = extent.m
    m_tiles, split_tail = tiles_along_m(order, m_extent)
    tiles = m_tiles * n_tiles - split_tail * (n_tiles // 2)
    if group >= groups:
        tiles = Int32(0)
    if cutlass.const_expr(order.skip_empty):  # noqa: SIM102
        if length == 0:
            tiles = Int32(0)
    units = cute.ceil_div(length, UNIT)
    return Window(start, length, prefix_sum(tiles), tiles, prefix_sum(units), units)


@cute.jit
def place_unit(offs, groups: Int32, rows: Int32, unit: Int32):
    """Where the `unit`-th 128 rows of all groups stand in COMPACT rows, and how many they are: 0 past the last (whole warp)."""
    order = TileOrder(UNIT, UNIT, UNIT, groups_along_k=False, aligned=False, has_tail=False)
    extent = Extent(rows, rows, Int32(0), Int32(0), groups)
    first, before = Int32(0), Int32(0)
    window = read_window(order, offs, first, groups, Int32(1), extent)
    while first + LANES < groups and unit >= before + arch.shuffle_sync(window.units_end, LANES - 1):
        before += arch.shuffle_sync(window.units_end, LANES - 1)
        first += LANES
        window = read_window(order, offs, first, groups, Int32(1), extent)
    lane = arch.popc(arch.vote_ballot_sync(before + window.units_end <= unit))
    skipped = (unit - before - arch.shuffle_sync(window.units_end - window.units, lane % LANES)) * UNIT
    start = arch.shuffle_sync(window.start, lane % LANES) + skipped
    length = cutlass.min(arch.shuffle_sync(window.length, lane % LANES) - skipped, UNIT)
    return start, Int32(cutlass.select_(lane < LANES, length, Int32(0)))


@cute.jit
def prefix_sum(value: Int32) -> Int32:
    """Inclusive sum over the lanes of a warp."""
    lane = arch.lane_idx()
    for power in cutlass.range_constexpr(5):
        below = arch.shuffle_sync_up(value, 1 << power)
        if lane >= (1 << power):
            value = value + below
    return value


@cute.jit
def tiles_along_m(order: Constexpr[TileOrder], m_extent: Int32):
    """Cluster tiles along M, and whether (1 or 0) the last of them is split."""
    m_tiles = cute.ceil_div(m_extent, order.tile_m)
    split_tail = Int32(0)
    if cutlass.const_expr(order.splits_tails):
        rest = m_extent - (m_tiles - 1) * order.tile_m
        split_tail = Int32(cutlass.select_((m_extent > 0) & (rest <= order.tile_m // 2), Int32(1), Int32(0)))
    return m_tiles, split_tail


@cute.jit
def tile_in_group(order: Constexpr[TileOrder], local: Int32, m_extent: Int32, n_tiles: Int32):
    """M tile, N tile and `split` of a group's `local`-th tile: bands of `supergroup` columns, row by row; a split row last."""
    width = order.supergroup
    m_tiles, split = tiles_along_m(order, m_extent)
    m_whole = m_tiles - split
    m_tiles = cutlass.max(m_whole, 1)  # past the last tile there is no group to divide by
    band = local // (width * m_tiles)
    in_band = local - band * width * m_tiles
    columns = cutlass.max(cutlass.min(width, n_tiles - band * width), 1)
    m_tile, n_tile = in_band // columns, band * width + in_band % columns
    if cutlass.const_expr(order.splits_tails):
        if local >= m_whole * n_tiles:
            m_tile, n_tile = m_whole, local - m_whole * n_tiles
        else:
            split = Int32(0)
    return m_tile, n_tile, split


@cute.jit
def next_work(pipe, state, sWork: cute.Tensor):
    """Take the next tile (whole warp) and free its slot. Returns (Work, advanced state)."""
    pipe.consumer_wait(state)
    work = Work(*[Int32(sWork[field, state.index]) for field in range(len(Work._fields))])
    arch.sync_warp()
    with arch.elect_one():
        pipe.consumer_release(state)
    state.advance()
    return work, state
