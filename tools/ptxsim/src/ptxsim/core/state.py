"""What a running grid consists of: clusters, CTAs, warps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .engine import Op, Pipe
from .order import Clock, Order
from .shadow import Shadow, SharedShadow
from .values import Array, Mask, mask_bits

if TYPE_CHECKING:
    from .barriers import MBarrier, NamedBarrier
    from .machine import Machine

TMEM_LANES, TMEM_COLUMNS = 128, 512
TMEM_POISON = 0x7FC0DEAD
SHARED_POISON = 0xFF
RANK_SHIFT = 24
"""Bits 24 and up of a shared address hold the rank of the CTA in its cluster."""
OFFSET_MASK = (1 << RANK_SHIFT) - 1


class Cluster:
    def __init__(self, machine: Machine, index: tuple[int, int, int]):
        self.machine, self.index = machine, index
        self.number = machine.cluster_number(index)
        self.ctas: list[CTA] = []
        self.order = Order(machine.describe_line)
        self.arrived: dict[Warp, Any] = {}
        self.generation = 0
        self.gather, self.settled = self.order.clock(), self.order.clock()

    def alive(self) -> bool:
        return any(w.groups for c in self.ctas for w in c.warps)


class CTA:
    """Shared memory, tensor memory and barriers of one thread block."""

    def __init__(
        self, cluster: Cluster, rank: int, index: tuple[int, int, int], shared_bytes: int, granule: int
    ):
        machine = cluster.machine
        self.machine, self.cluster, self.rank, self.index = machine, cluster, rank, index
        self.name = f"CTA ({index[0]},{index[1]},{index[2]})"
        size = -(-shared_bytes // 1024) * 1024
        raw = np.full(size + 64, SHARED_POISON, np.uint8)
        start = -raw.ctypes.data % 64
        self.bytes = raw[start : start + size]
        self.size = shared_bytes
        self.views = {
            1: self.bytes,
            2: self.bytes.view("<u2"),
            4: self.bytes.view("<u4"),
            8: self.bytes.view("<u8"),
        }
        self.chunks = self.bytes.reshape(-1, 16)
        self.shadow: SharedShadow | None = None
        self.tmem_shadow: Shadow | None = None
        if machine.checks:
            what = f"shared memory of {self.name}"
            self.shadow = SharedShadow(cluster.order, size, granule, what, machine.uninitialized)
        self._tmem: Array | None = None
        self.columns_used = np.zeros(TMEM_COLUMNS, bool)
        self.allocations: dict[int, int] = {}
        self.relinquished = False
        self.allocating: tuple[Callable[[], int | None], Callable[[], None]] | None = None
        """A tcgen05.alloc in progress: where it could go, and taking it."""
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.locations: dict[int, Clock] = {}
        self.warps: list[Warp] = []
        self.finished = False

    @property
    def tmem(self) -> Array:
        """Tensor memory, [lane, column] of 32-bit words."""
        if self._tmem is None:
            self._tmem = np.full((TMEM_LANES, TMEM_COLUMNS), TMEM_POISON, np.uint32)
            if self.machine.checks:
                self.tmem_shadow = Shadow(
                    self.cluster.order,
                    4 * TMEM_COLUMNS,
                    f"TMEM of {self.name}",
                    lambda g: (
                        f"column {g % TMEM_COLUMNS}, lanes {g // TMEM_COLUMNS * 32}…{g // TMEM_COLUMNS * 32 + 31}"
                    ),
                    self.machine.uninitialized,
                )
        return self._tmem

    @property
    def pair(self) -> list[CTA]:
        """The two CTAs that a `cta_group::2` operation spans."""
        even = self.rank & ~1
        return self.cluster.ctas[even : even + 2]


class Group:
    """Lanes of a warp that run together: next block, mask, and what they wait for."""

    __slots__ = ("block", "mask", "wait")

    def __init__(self, block: int, mask: Mask):
        self.block, self.mask = block, mask
        self.wait: Wait | None = None


class Wait:
    """Returned by a block that cannot go on: `ready()` says when, `done()` runs then."""

    __slots__ = ("description", "done", "next_block", "ready", "timeout")

    def __init__(self, ready, next_block: int, description, done=None, timeout=None):
        self.ready, self.next_block, self.description = ready, next_block, description
        self.done, self.timeout = done, timeout

    def text(self) -> str:
        return self.description() if callable(self.description) else self.description


class Yield:
    """Returned by a block that lets other warps run before it goes on."""

    __slots__ = ("next_block",)

    def __init__(self, next_block: int):
        self.next_block = next_block


class Warp:
    """32 lanes, their registers, and the asynchronous streams they feed."""

    def __init__(self, cta: CTA, number: int, registers: list, active: Mask):
        self.machine, self.cta, self.number = cta.machine, cta, number
        self.cluster = cta.cluster
        self.R = registers
        self.live = np.ones(32, bool) if active is None else active.copy()
        self.live_bits = mask_bits(active)
        self.groups = [Group(0, active)]
        self.shared_base = cta.rank << RANK_SHIFT
        self.param_base = 0
        self.special: dict[str, Any] = {}
        self.local: Array | None = None
        self.carry: Any = 0
        self.name = f"{cta.name} warp {number}"
        self.spurious: int | None = None
        self.laziness: float | None = None
        self.unfenced_inits: list[Any] = []
        self.last_wait: Wait | None = None

        self.log: list[int] = []
        self.actor = self.cluster.order.actor(self.name, self.log)
        self.clock = self.cluster.order.clock()
        self.fenced: Clock | None = None
        self.unfenced: Clock | None = None
        self.tensor: Clock | None = None
        """Row 0: what later tcgen05 operations of this warp are ordered after by tcgen05.fence and tcgen05.wait."""

        self.streams: dict[str, Stream] = {}
        self.bulk_groups: deque[BulkGroup] = deque()
        self.open_bulk: list[tuple[int, Op, Op]] = []
        """Uncommitted bulk stores: lane, read, write."""
        self.current_group = self.groups[0]
        self.pending_registers: dict[int, str] = {}
        self.loading: dict[int, Op] = {}
        """Registers that a tcgen05.ld will write."""
        self.strong = False
        """The global access that follows is relaxed, acquire, release or volatile (`global_races`)."""
        self.loads_used = 0
        """Clock value at which the last of them was read."""
        self.cluster_generation = 0
        self.wgmma_owner: dict[int, Any] = {}
        self.unfenced_registers: dict[str, tuple[str, int]] | None = None
        """Accesses since the last wgmma.fence (None: there was none), where a kernel may lack one: shape if by a wgmma, line."""

    def touch(self, line: int) -> int:
        """A new access by this warp: its clock value."""
        self.log.append(line)
        return len(self.log)

    def stream(self, kind: str, pipe_kind: str) -> Stream:
        """The warp's asynchronous stream of a kind, made on first use."""
        found = self.streams.get(kind)
        if found is None:
            found = self.streams[kind] = Stream(self, kind, pipe_kind)
        return found

    def release(self, clock: Clock) -> None:
        """Everything this warp did or knows happens before whoever acquires `clock`."""
        v = self.clock.v
        v[0, self.actor] = len(self.log)
        np.maximum(clock.v, v, out=clock.v)

    def acquire(self, clock: Clock) -> None:
        np.maximum(self.clock.v, clock.v, out=self.clock.v)

    def current(self) -> Clock:
        """This warp's clock, own entry up to date."""
        self.clock.v[0, self.actor] = len(self.log)
        return self.clock


class Stream:
    """Asynchronous operations of one warp that complete in groups: an actor whose clock counts the groups."""

    def __init__(self, warp: Warp, kind: str, pipe_kind: str):
        self.warp, self.kind = warp, kind
        self.log: dict[int, set[int]] = {}
        self.actor = warp.cluster.order.actor(f"{kind} of {warp.name}", self.log)
        self.epoch = 1
        self.pipe = Pipe(pipe_kind, f"{kind} {warp.name}")
        self.ops: deque[tuple[int, Op]] = deque()
        self.issued: Any = None
        """The issuing warp's clock at the latest operation."""

    def note(self, line: int) -> int:
        """Clock value of an operation issued now."""
        self.log.setdefault(self.epoch, set()).add(line)
        return self.epoch

    def complete(self, clock: Clock, epoch: int) -> None:
        """Whoever holds `clock` knows that groups up to `epoch` are complete."""
        v = clock.v
        if v[0, self.actor] < epoch:
            v[:, self.actor] = epoch


class BulkGroup:
    """One committed group of bulk stores of one lane."""

    __slots__ = ("epoch", "lane", "line", "read_waited", "reads", "writes")

    def __init__(self, lane: int, epoch: int, line: int, reads: list[Op], writes: list[Op]):
        self.lane, self.epoch, self.line, self.reads, self.writes = lane, epoch, line, reads, writes
        self.read_waited = False
