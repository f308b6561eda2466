"""The scheduler: runs the warps of a grid, lets asynchronous work happen, and says why nothing can move."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Deadlock, Fault
from .barriers import complete_cluster_barrier
from .blas import single_thread
from .engine import Engine
from .global_races import WatchedMemory
from .hostmem import GlobalMemory
from .state import CTA, Cluster, Group, Wait, Warp
from .values import LANES, M32, count_lanes, count_true, mask_bits

if TYPE_CHECKING:
    from ..program import Program

_SLICE = 4000
_LAZINESS = (0.0, 0.3, 0.9, 0.995)
"""How often a warp passes up its turn under the random schedule."""
"""Instructions a warp runs before others get a turn, unless it waits."""
_TICKS = 4
"""Ticks (and instructions of a warp) in a round of the timed schedule."""
_TIMEOUTS = 3
"""Rounds in which timed waits may time out before the state counts as a deadlock."""


@dataclass
class LaunchConfig:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0


@dataclass
class LaunchRecord:
    """What a launch did."""

    name: str
    config: LaunchConfig
    instructions: int = 0
    seconds: float = 0.0
    """Processor time of the emulation."""
    counts: dict[str, int] = field(default_factory=dict)


class Machine:
    """One emulated GPU. It holds options and statistics; every launch builds its own clusters."""

    def __init__(
        self,
        sms: int = 148,
        schedule: str = "early",
        seed: int = 0,
        checks: bool = True,
        uninitialized: bool = True,
        trace: Any = None,
        max_instructions: int | None = None,
        tmem_fences: bool = False,
        global_races: bool = False,
    ):
        single_thread()
        self.sms, self.checks, self.uninitialized = sms, checks, uninitialized
        self.tmem_fences, self.global_races = tmem_fences, global_races
        self.rng = np.random.default_rng(seed)
        self.engine = Engine(schedule, self.rng)
        self.trace = trace
        self.max_instructions = max_instructions
        self.instructions = 0
        self.progress = 0
        self.launches: list[LaunchRecord] = []
        self.counts: dict[str, int] = {}
        self.memory = GlobalMemory(None)
        self.param_bytes = b""
        self.program: Program | None = None
        self.waiting: list[tuple[int, int, int]] = []
        self.cluster_shape = self.cluster_grid = (1, 1, 1)
        self._stalls = 0
        self._slice = _TICKS if schedule == "timed" else _SLICE

    # ---- statistics
    def count(self, what: str, n: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def count_bytes(self, what: str, address: int, n: int) -> None:
        self.count(what + "_bytes", n)
        if self.trace:
            self.trace.bytes_moved(what, address, n)

    def clock(self) -> int:
        """%clock: a count that grows, not time."""
        return self.now & M32

    @property
    def now(self) -> int:
        return self.engine.now if self.engine.schedule == "timed" else self.instructions

    def describe_line(self, line: int) -> str:
        if self.program is None:
            return f"line {line}"
        return self.program.describe_line(line)

    # ---- launch
    def launch(
        self,
        program: Program,
        config: LaunchConfig,
        param_address: int,
        param_bytes: bytes,
        memory: GlobalMemory,
    ) -> LaunchRecord:
        self.program, self.memory, self.param_bytes = program, memory, param_bytes
        self.param_address = param_address
        self.counts = {}
        record = LaunchRecord(program.kernel_name, config)
        start, started = self.instructions, time.process_time()
        if self.trace:
            self.trace.begin(self, record)
        try:
            self._run_grid(program, config)
        finally:
            self.engine.pending.clear()
            record.instructions = self.instructions - start
            record.seconds = time.process_time() - started
            record.counts = self.counts
            self.launches.append(record)
            if self.trace:
                self.trace.end(self)
        return record

    def cluster_number(self, index: tuple[int, int, int]) -> int:
        """Of a cluster in the grid."""
        nx, ny, _ = self.cluster_grid
        return index[0] + nx * (index[1] + ny * index[2])

    def cluster_index(self, number: int) -> tuple[int, int, int]:
        """The inverse of `cluster_number`."""
        nx, ny, _ = self.cluster_grid
        return number % nx, number // nx % ny, number // nx // ny

    def take_cluster(self) -> tuple[int, int, int] | None:
        """A cluster that has not started, for try_cancel."""
        return self.waiting.pop() if self.waiting else None

    def _run_grid(self, program: Program, config: LaunchConfig) -> None:
        self.cluster_shape = shape = program.required_cluster or config.cluster
        gx, gy, gz = config.grid
        cx, cy, cz = shape
        if gx % cx or gy % cy or gz % cz:
            raise Fault(f"grid {config.grid} is not a multiple of the cluster {shape}")
        self._check_limits(program, config)
        self.cluster_grid = (gx // cx, gy // cy, gz // cz)
        if self.global_races:
            self.memory = WatchedMemory(self.memory.buffers, int(np.prod(self.cluster_grid)))
        self.waiting = [
            (x, y, z) for z in range(gz // cz) for y in range(gy // cy) for x in range(gx // cx)
        ]  # fmt: skip
        self.waiting.reverse()
        resident = max(self.sms // (cx * cy * cz), 1)
        running: list[Cluster] = []
        self._stalls = 0
        engine = self.engine
        random, timed = engine.schedule == "random", engine.schedule == "timed"
        while self.waiting or running:
            first = resident if timed else 2 if random else 1
            while self.waiting and len(running) < min(first, resident):
                running.append(self._start_cluster(program, config, shape, self.waiting.pop()))
            moved = self._round(running, random)
            if timed and engine.advance(_TICKS):
                moved = True
            if moved:
                continue
            if self.waiting and len(running) < resident:
                running.append(self._start_cluster(program, config, shape, self.waiting.pop()))
                continue
            if engine.advance(0) if timed else engine.step():
                continue
            if self._time_out(running):
                continue
            raise Deadlock(self._report(running))
        engine.drain()

    def _check_limits(self, program: Program, config: LaunchConfig) -> None:
        threads = config.block[0] * config.block[1] * config.block[2]
        if not 0 < threads <= 1024:
            raise Fault(f"block of {threads} threads")
        total = program.dynamic_shared + config.shared_bytes
        if total > 233472:
            raise Fault(f"{total} bytes of shared memory (1 KB of it reserved) exceed the 233472 of an SM")
        if min(config.grid) < 1:
            raise Fault(f"empty grid {config.grid}")
        if np.prod(self.cluster_shape) > 16:
            raise Fault(f"cluster {self.cluster_shape} has more than 16 CTAs")

    def _round(self, running: list[Cluster], random: bool) -> bool:
        """Give every warp a turn; True if anything moved."""
        moved = False
        if self.max_instructions and self.instructions > self.max_instructions:
            raise Fault(f"instruction budget of {self.max_instructions} spent\n{self._report(running)}")
        rng, engine = self.rng, self.engine
        for cluster in list(running):
            warps = [w for c in cluster.ctas for w in c.warps if w.groups]
            if random:
                rng.shuffle(warps)  # type: ignore[arg-type]
            for warp in warps:
                groups = warp.groups
                if len(groups) == 1 and groups[0].wait is not None and not groups[0].wait.ready():
                    continue
                if random and self._rests(warp):
                    moved = moved or self._can_move(warp)
                    if (
                        engine.pending and rng.random() < 0.2
                    ):  # the others' copies and products go on meanwhile
                        engine.step()
                        moved = True
                    continue
                budget = int(rng.integers(1, 80)) if random else self._slice
                if self._step(warp, budget):
                    moved = True
                if random and engine.pending and rng.random() < 0.1:
                    engine.step()
                    moved = True
            for cta in cluster.ctas:
                if not cta.finished and not any(w.groups for w in cta.warps):
                    self._finish_cta(cta)
                    moved = True
            if not cluster.alive():
                running.remove(cluster)
                moved = True
        return moved

    def _rests(self, warp: Warp) -> bool:
        """Warps have speeds of their own, redrawn now and then: a slow one lets others run far ahead of it."""
        rng = self.rng
        if warp.laziness is None or rng.random() < 0.004:
            warp.laziness = float(rng.choice(_LAZINESS))
        return rng.random() < warp.laziness

    @staticmethod
    def _can_move(warp: Warp) -> bool:
        return any(g.wait is None or g.wait.ready() for g in warp.groups)

    def _time_out(self, running: list[Cluster]) -> bool:
        """Let timed waits return false, so that a program's own slow path runs; not for ever."""
        if self._stalls >= _TIMEOUTS:
            return False
        self._stalls += 1
        any_timed = False
        for cluster in running:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    for group in warp.groups:
                        wait = group.wait
                        if wait is not None and wait.timeout is not None:
                            wait.timeout()
                            group.block, group.wait = wait.next_block, None
                            any_timed = True
        return any_timed

    def _finish_cta(self, cta: CTA) -> None:
        cta.finished = True
        if cta.allocations:
            raise Fault(
                f"{cta.name} exits with TMEM columns still allocated: {cta.allocations} (start: columns)"
            )
        if self.checks:
            for barrier in cta.mbarriers.values():
                barrier.check_exit()
        for warp in cta.warps:
            unread = [g for g in warp.bulk_groups if not g.read_waited and g.reads]
            lines = sorted({self.describe_line(g.line) for g in unread})
            if unread or warp.open_bulk:
                raise Fault(
                    f"{warp.name} exits while bulk stores may still read its shared memory "
                    f"(no cp.async.bulk.wait_group.read): {'; '.join(lines) or 'uncommitted stores'}"
                )
        complete_cluster_barrier(cta.cluster)

    def _report(self, running: list[Cluster]) -> str:
        out = ["no warp can make progress:"]
        for cluster in running:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    for group in warp.groups:
                        lanes = count_lanes(group.mask)
                        if group.wait is not None:
                            state = f"waits at {group.wait.text()}"
                        else:
                            assert self.program is not None
                            line = self.program.translation.lines[group.block]
                            state = f"at {self.describe_line(line)}; last wait: {warp.last_wait.text() if warp.last_wait else 'none'}"
                        out.append(f"  {warp.name} ({lanes} lanes) {state}")
                for offset, barrier in sorted(cta.mbarriers.items()):
                    out.append(f"  {cta.name} mbarrier {offset:#x}: {barrier.state()}")
        return "\n".join(out)

    # ---- construction
    def _start_cluster(
        self, program: Program, config: LaunchConfig, shape: tuple[int, int, int], index: tuple[int, int, int]
    ) -> Cluster:
        cluster = Cluster(self, index)
        total = program.dynamic_shared + config.shared_bytes
        for z in range(shape[2]):
            for y in range(shape[1]):
                for x in range(shape[0]):
                    at = (index[0] * shape[0] + x, index[1] * shape[1] + y, index[2] * shape[2] + z)
                    cta = CTA(cluster, len(cluster.ctas), at, total, program.translation.granule)
                    cluster.ctas.append(cta)
                    self._start_warps(program, config, shape, cta, (x, y, z), total)
        return cluster

    def _start_warps(
        self,
        program: Program,
        config: LaunchConfig,
        shape: tuple[int, int, int],
        cta: CTA,
        place: tuple[int, int, int],
        shared_bytes: int,
    ) -> None:
        bx, by, bz = config.block
        threads = bx * by * bz
        warps = -(-threads // 32)
        common = dict(program.special_lane)
        grid, index, cluster_index = config.grid, cta.index, cta.cluster.index
        for axis, i in zip("xyz", range(3), strict=True):
            common[f"ntid.{axis}"] = config.block[i]
            common[f"ctaid.{axis}"] = index[i]
            common[f"nctaid.{axis}"] = grid[i]
            common[f"clusterid.{axis}"] = cluster_index[i]
            common[f"nclusterid.{axis}"] = grid[i] // shape[i]
            common[f"cluster_ctaid.{axis}"] = place[i]
            common[f"cluster_nctaid.{axis}"] = shape[i]
        common.update(
            nwarpid=warps,
            smid=(index[0] + grid[0] * (index[1] + grid[1] * index[2])) % self.sms,
            nsmid=self.sms,
            gridid=0,
            cluster_ctarank=cta.rank,
            cluster_nctarank=shape[0] * shape[1] * shape[2],
            dynamic_smem_size=config.shared_bytes,
            total_smem_size=shared_bytes,
            is_explicit_cluster=True,
        )
        for number in range(warps):
            thread = number * 32 + np.arange(32)
            active = thread < threads
            warp = Warp(cta, number, program.initial_registers(), None if active.all() else active)
            warp.special = {
                **common,
                "warpid": number,
                "tid.x": (thread % bx).astype(np.uint64),
                "tid.y": (thread // bx % by).astype(np.uint64) if by > 1 else 0,
                "tid.z": (thread // (bx * by)).astype(np.uint64) if bz > 1 else 0,
            }
            warp.param_base = self.param_address
            if program.translation.local_bytes:
                warp.local = np.zeros((32, program.translation.local_bytes), np.uint8)
            cta.warps.append(warp)

    # ---- one warp
    def _step(self, W: Warp, budget: int) -> bool:
        """Run a warp until it waits, yields or spends its budget; True if anything ran."""
        program = self.program
        assert program is not None
        full, partial, lengths = program.full, program.partial, program.translation.lengths
        R, groups, trace = W.R, W.groups, self.trace
        ran = False
        while budget > 0:
            group = groups[0] if len(groups) == 1 and groups[0].wait is None else self._pick(W)
            if group is None:
                return ran
            block, mask = group.block, group.mask
            W.current_group = group
            result = full[block](W, R) if mask is None else partial[block](W, R, mask)
            n = lengths[block]
            self.instructions += n
            budget -= n
            ran = True
            if trace:
                trace.block(W, block, n)
            kind = type(result)
            if kind is int:
                if result >= 0:
                    group.block = result
                    continue
                self._exit_group(W, group)
                if not groups:
                    return True
            elif kind is tuple:
                taken, rest, target, fall = result
                group.block, group.mask = fall, rest
                groups.append(Group(target, taken))
            elif kind is Wait:
                group.wait = W.last_wait = result
                if trace:
                    trace.wait(W, result)
            else:
                group.block = result.next_block
                return True
        return ran

    def _pick(self, W: Warp) -> Group | None:
        """The runnable group at the lowest block; groups that meet at a block become one."""
        groups = W.groups
        best: Group | None = None
        for group in groups:
            wait = group.wait
            if wait is not None:
                if not wait.ready():
                    continue
                group.wait = None
                group.block = wait.next_block
                if wait.done:
                    wait.done()
                self._stalls = 0
                if self.trace:
                    self.trace.resume(W)
            if best is None or group.block < best.block:
                best = group
        if best is None or len(groups) == 1:
            return best
        same = [
            g
            for g in groups
            if g is not best and g.block == best.block and (g.wait is None or g.wait.next_block == g.block)
        ]
        if same:
            assert best.mask is not None
            mask = best.mask.copy()
            for other in same:
                assert other.mask is not None
                mask |= other.mask
                groups.remove(other)
            best.mask = None if count_true(mask) == 32 else mask
        return best

    def _exit_group(self, W: Warp, group: Group) -> None:
        W.groups.remove(group)
        if group.mask is None:
            W.live[:] = False
        else:
            W.live[group.mask] = False
        W.live_bits = mask_bits(W.live)
        self._stalls = 0
        self.progress += 1
        if W.live.any():
            for barrier in W.cta.barriers.values():
                barrier.count(W)
        complete_cluster_barrier(W.cluster)


def lane_special() -> dict[str, Any]:
    """Special registers that depend on the lane only."""
    bit = np.arange(32)
    u = lambda v: np.asarray(v).astype(np.uint64)  # noqa: E731
    return {
        "laneid": LANES,
        "lanemask_lt": u((1 << bit) - 1),
        "lanemask_le": u((2 << bit) - 1),
        "lanemask_eq": u(1 << bit),
        "lanemask_ge": u(M32 ^ ((1 << bit) - 1)),
        "lanemask_gt": u(M32 ^ ((2 << bit) - 1)),
    }


__all__ = ["mask_bits"]
