"""mbarriers, named barriers, cluster barriers and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Fault
from .memory import SHARED_WINDOW, shared_location, who
from .order import Clock
from .shadow import BARRIER_OBJECT, NEVER
from .state import CTA, OFFSET_MASK, RANK_SHIFT, Wait, Yield
from .values import M32, Array, Mask, Value, count_lanes, first, lane, lanes, mask_bits, merge

if TYPE_CHECKING:
    from .machine import Machine
    from .state import Warp

_MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """Pending arrivals and transaction bytes of the current phase, and what its completion publishes."""

    __slots__ = (
        "actor",
        "address",
        "count",
        "cta",
        "fenced",
        "gather",
        "init_clock",
        "known",
        "log",
        "owed",
        "pending",
        "phase",
        "settled",
        "tx",
        "waited",
    )

    def __init__(self, cta: CTA, offset: int, count: int):
        self.cta, self.address = cta, offset
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0
        order = cta.cluster.order
        self.log: dict[int, Any] = {}
        self.actor = order.actor(f"asynchronous copies of mbarrier {offset:#x} of {cta.name}", self.log)
        self.gather, self.settled, self.init_clock = order.clock(), order.clock(), order.clock()
        self.known: set[int] = set()
        """Actors that are ordered after the init."""
        self.owed: dict[str, tuple[int, int, Warp, int]] = {}
        """The latest arrival by tcgen05.commit, and from another CTA: phase, line, warp, its clock value (0 for a commit)."""
        self.waited = 0
        """Phases that a thread of this CTA has seen complete."""
        self.fenced = False
        """The init is visible to the async proxy: its warp executed fence.mbarrier_init or fence.proxy.async."""

    def note(self, site: object) -> int:
        """Clock value of asynchronous accesses counted in the current phase."""
        self.log.setdefault(self.phase + 1, set()).add(site)
        return self.phase + 1

    def settle(self, machine: Machine) -> None:
        """Complete the phase if nothing is pending."""
        machine.progress += 1
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            self.settled.join(self.gather)
            self.settled.v[:, self.actor] = self.phase

    def arrive(self, machine: Machine, n: int, where: str) -> None:
        self.pending -= n
        if self.pending < 0:
            raise Fault(
                f"mbarrier {self.address:#x} of {self.cta.name}: more arrivals than its count {self.count}; {where}"
            )
        self.settle(machine)

    def owe(self, what: str, line: int, warp: Warp, clock: int = 0) -> None:
        """An arrival that this CTA must outlive."""
        self.owed[what] = self.phase, line, warp, clock
        if self.cta.finished and warp.machine.checks:
            self.check_exit()

    def check_exit(self) -> None:
        """The CTA exits. Its shared memory is gone then: somebody must have waited for what arrives on its mbarriers.

        A commit arrives some time after the operations it tracks, so only a wait on this mbarrier tells. An arrival from another
        CTA may also be known by other ways (a cluster barrier).
        """
        for what, (phase, line, warp, clock) in self.owed.items():
            known = clock and any(w.clock.v[0, warp.actor] >= clock for w in self.cta.warps)
            if phase >= self.waited and not known:
                raise Fault(
                    f"{self.cta.name} may exit before {what} arrives on its mbarrier {self.address:#x}: "
                    f"nobody waits for that phase; {who(warp, line)}"
                )

    def complete(self, machine: Machine, size: int, phase: int, where: object) -> None:
        """Asynchronous bytes arrive; they belong to the phase in which their copy was issued."""
        if self.phase != phase:
            raise Fault(
                f"mbarrier {self.address:#x} of {self.cta.name}: {size} bytes arrive in phase {self.phase}, but their copy "
                f"was issued in phase {phase}: the phase did not wait for them (expect_tx too small?); {where}"
            )
        self.tx -= size
        if abs(self.tx) > _MAX_COUNT:
            raise Fault(
                f"mbarrier {self.address:#x} of {self.cta.name}: tx-count {self.tx} out of range; {where}"
            )
        self.settle(machine)

    def state(self) -> str:
        return f"phase {self.phase}, pending {self.pending}/{self.count}, tx {self.tx}"


def _shared(a: int) -> int:
    return a - SHARED_WINDOW if a >> 56 else a


def find_mbarrier(W: Warp, a: int, line: int, ordered: bool = True, asynchronous: bool = False) -> MBarrier:
    """The object at a shared address. `asynchronous`: the async proxy (TMA, tcgen05.commit) is to signal it."""
    cta, o = shared_location(W, _shared(a))
    barrier = cta.mbarriers.get(o)
    if barrier is None:
        raise Fault(f"mbarrier at {o:#x} of {cta.name} was never initialised: {who(W, line)}")
    if asynchronous and not barrier.fenced and W.machine.checks:
        raise Fault(
            f"mbarrier at {o:#x} of {cta.name} is signalled by the async proxy, but its init was not made visible there "
            f"(fence.mbarrier_init or fence.proxy.async after mbarrier.init): {who(W, line)}"
        )
    if not ordered or W.actor in barrier.known:
        return barrier
    if W.machine.checks and (barrier.init_clock.v[0] > W.current().v[0]).any():
        raise Fault(
            f"mbarrier at {o:#x} of {cta.name} is used without synchronisation after its init "
            f"(barrier, or fence.mbarrier_init and a cluster barrier): {who(W, line)}"
        )
    barrier.known.add(W.actor)
    return barrier


def _each(a: Value, m: Mask) -> list[tuple[int, int, int]]:
    """(address, lanes, first lane): lanes that use the same address together count together."""
    if type(a) is not Array:
        return [(a, count_lanes(m), next(iter(lanes(m))))]
    return [(int(a[i]), 1, i) for i in lanes(m)]


def mbarrier_init(W: Warp, a: Value, count: Value, m: Mask, line: int) -> None:
    for address, n, i in _each(a, m):
        cta, o = shared_location(W, _shared(address))
        c = lane(count, i) & M32
        if o % 8 or o + 8 > cta.size:
            raise Fault(f"misplaced mbarrier at {o:#x}: {who(W, line)}")
        if not 1 <= c <= _MAX_COUNT:
            raise Fault(f"mbarrier count {c} is out of range: {who(W, line)}")
        if cta is not W.cta:
            raise Fault(f"mbarrier.init on another CTA's shared memory: {who(W, line)}")
        if o in cta.mbarriers:
            raise Fault(f"mbarrier at {o:#x} of {cta.name} is already initialised: {who(W, line)}")
        if n > 1:
            raise Fault(f"mbarrier.init by {n} lanes at once: {who(W, line)}")
        if cta.shadow:
            where = slice(o, o + 8)
            cta.shadow.write(W.current(), 0, where, 8, W.actor, W.touch(line), line, W.name)
            cta.shadow.mark(where, BARRIER_OBJECT)
        barrier = cta.mbarriers[o] = MBarrier(cta, o, c)
        W.unfenced_inits.append(barrier)
        W.touch(line)
        barrier.init_clock.v[0, W.actor] = len(W.log)
        W.machine.progress += 1


def mbarrier_invalidate(W: Warp, a: Value, m: Mask, line: int) -> None:
    for address, _, _ in _each(a, m):
        find_mbarrier(W, address, line)
        cta, o = shared_location(W, _shared(address))
        barrier = cta.mbarriers.pop(o)
        cta.cluster.order.drop(barrier.gather, barrier.settled, barrier.init_clock)
        if cta.shadow:
            cta.shadow.mark(slice(o, o + 8), NEVER)


def mbarrier_expect_tx(W: Warp, a: Value, size: Value, m: Mask, line: int) -> None:
    for address, n, i in _each(a, m):
        barrier = find_mbarrier(W, address, line)
        barrier.tx += lane(size, i) * n
        W.machine.progress += 1


def mbarrier_complete_tx(W: Warp, a: Value, size: Value, m: Mask, line: int) -> None:
    for address, n, i in _each(a, m):
        barrier = find_mbarrier(W, address, line)
        barrier.complete(W.machine, lane(size, i) * n, barrier.phase, who(W, line))


def release_to(W: Warp, clock: Clock, relaxed: bool) -> None:
    """Publish this warp's accesses; a relaxed operation publishes only what a fence has covered."""
    if not relaxed:
        W.release(clock)
        return
    if W.fenced is not None:
        clock.join(W.fenced)
    np.maximum(clock.v[2], W.clock.v[2], out=clock.v[2])


def acquire_from(W: Warp, clock: Clock, relaxed: bool) -> None:
    if not relaxed:
        W.acquire(clock)
        return
    if W.unfenced is None:
        W.unfenced = W.cluster.order.clock()
    W.unfenced.join(clock)
    np.maximum(W.clock.v[2], clock.v[2], out=W.clock.v[2])


def mbarrier_arrive(
    W: Warp,
    a: Value,
    count: Value,
    transactions: Value,
    drop: bool,
    no_complete: bool,
    relaxed: bool,
    m: Mask,
    line: int,
) -> int:
    """Returns the state token: the phase arrived in, and the pending count in bits 32…51."""
    state = 0
    for address, n, i in _each(a, m):
        barrier = find_mbarrier(W, address, line)
        state = barrier.phase | barrier.pending << 32
        if no_complete and barrier.pending <= lane(count, i) * n:
            raise Fault(f"mbarrier.arrive.noComplete completes the phase ({barrier.state()}): {who(W, line)}")
        barrier.tx += lane(transactions, i) * n
        if drop:
            barrier.count -= n
        if barrier.cta is not W.cta:
            barrier.owe("mbarrier.arrive of another CTA", line, W, W.touch(line))
        release_to(W, barrier.gather, relaxed)
        barrier.arrive(
            W.machine, lane(count, i) * n, who(W, line) if barrier.pending < lane(count, i) * n else ""
        )
    return state


def mbarrier_wait(
    W: Warp,
    R: list,
    m: Mask,
    slot: int,
    a: Value,
    phase: Value,
    parity: bool,
    blocking: bool,
    relaxed: bool,
    next_block: int,
    line: int,
) -> int | Wait | Yield:
    """try_wait may suspend the warp; under adversarial schedules it may also return false early, as the ISA allows."""
    machine = W.machine
    address, phase = first(a, m), first(phase, m)
    barrier = find_mbarrier(W, address, line)
    if barrier.cta is not W.cta:
        raise Fault(f"wait on another CTA's mbarrier: {who(W, line)}")
    if parity:
        phase &= 1

        def ready() -> bool:
            return (barrier.phase & 1) != phase

    else:
        phase &= M32

        def ready() -> bool:
            return barrier.phase != phase

    def succeed() -> None:
        barrier.waited = barrier.phase
        acquire_from(W, barrier.settled, relaxed)
        R[slot] = merge(m, True, R[slot])

    def fail() -> None:
        R[slot] = merge(m, False, R[slot])

    if ready():
        succeed()
        return next_block
    if not blocking:
        fail()
        return Yield(next_block)
    if (
        machine.engine.schedule != "early"
        and W.spurious != line
        and (machine.engine.schedule != "random" or machine.rng.random() < 0.5)
    ):
        W.spurious = line
        fail()
        return Yield(next_block)
    W.spurious = None
    wanted = f"parity {phase}" if parity else f"token of phase {phase}"
    return Wait(
        ready,
        next_block,
        lambda: f"{machine.describe_line(line)}: mbarrier {barrier.address:#x}, {wanted} ({barrier.state()})",
        succeed,
        fail,
    )


class NamedBarrier:
    """One of the 16 barriers of a CTA: lanes arrived by warp, threads counted when a whole warp has arrived."""

    def __init__(self, cta: CTA):
        self.arrived: dict[Warp, int] = {}
        self.counted: set[Warp] = set()
        self.threads = 0
        self.expected: int | None = None
        self.generation = 0
        self.gather, self.settled = cta.cluster.order.clock(), cta.cluster.order.clock()
        self.predicates: dict[Warp, Any] = {}
        self.reduction = self.result = (0, True, False)
        """Count, conjunction and disjunction of the votes so far; of the last complete round, which others may read late."""
        self.kind: str | None = None

    def complete(self) -> None:
        self.generation += 1
        self.result = self.reduction
        self.threads, self.expected, self.kind = 0, None, None
        self.arrived.clear()
        self.counted.clear()
        self.settled.join(self.gather)

    def count(self, W: Warp) -> None:
        """A warp counts once all of its live lanes have come."""
        if W in self.counted or W not in self.arrived or W.live_bits & ~self.arrived[W]:
            return
        self.counted.add(W)
        self.threads += 32
        if self.threads == self.expected:
            self.complete()


def _named(W: Warp, m: Mask, index: Value, count: Value | None, line: int) -> tuple[NamedBarrier, int]:
    cta = W.cta
    i = first(index, m)
    everyone = 32 * len(cta.warps)
    n = everyone if count is None else first(count, m)
    if not 0 <= i < 16:
        raise Fault(f"barrier {i} does not exist (0…15): {who(W, line)}")
    if n % 32 or not 0 < n <= everyone:
        raise Fault(
            f"barrier {i}: thread count {n} must be a multiple of 32 up to {everyone}: {who(W, line)}"
        )
    barrier = cta.barriers.get(i)
    if barrier is None:
        barrier = cta.barriers[i] = NamedBarrier(cta)
    if barrier.expected not in (None, n):
        raise Fault(f"barrier {i}: thread counts differ ({barrier.expected} and {n}): {who(W, line)}")
    barrier.expected = n
    return barrier, i


def _enter(W: Warp, barrier: NamedBarrier, i: int, m: Mask, line: int) -> None:
    bits = mask_bits(m)
    before = barrier.arrived.get(W, 0)
    if before & bits:
        raise Fault(f"barrier {i}: {W.name} arrives twice before the barrier completes: {who(W, line)}")
    barrier.arrived[W] = before | bits
    W.release(barrier.gather)
    W.machine.progress += 1
    barrier.count(W)
    if barrier.expected is not None and barrier.threads > barrier.expected:
        raise Fault(f"barrier {i}: more than {barrier.expected} threads arrive: {who(W, line)}")


def barrier_arrive(W: Warp, m: Mask, index: Value, count: Value | None, line: int) -> None:
    barrier, i = _named(W, m, index, count, line)
    _enter(W, barrier, i, m, line)


def barrier_sync(
    W: Warp, m: Mask, index: Value, count: Value | None, next_block: int, line: int
) -> int | Wait:
    barrier, i = _named(W, m, index, count, line)
    generation = barrier.generation
    _enter(W, barrier, i, m, line)
    if barrier.generation != generation:
        W.acquire(barrier.settled)
        return next_block
    return Wait(
        lambda: barrier.generation != generation,
        next_block,
        lambda: (
            f"{W.machine.describe_line(line)}: barrier {i} ({barrier.threads}/{barrier.expected} threads arrived)"
        ),
        lambda: W.acquire(barrier.settled),
    )


def barrier_reduce(
    W: Warp,
    R: list,
    m: Mask,
    index: Value,
    count: Value | None,
    op: str,
    p: Value,
    slot: int,
    next_block: int,
    line: int,
) -> int | Wait:
    """barrier.red: the count, conjunction or disjunction of a predicate over all threads."""
    barrier, i = _named(W, m, index, count, line)
    generation = barrier.generation
    votes = np.broadcast_to(np.asarray(p, dtype=bool), 32) if m is None else np.asarray(p, dtype=bool) & m
    active = np.ones(32, bool) if m is None else m
    ones = int(np.count_nonzero(np.broadcast_to(votes, 32) & active & W.live))
    total = int(np.count_nonzero(active & W.live))
    n, everyone, anyone = barrier.reduction if barrier.threads else (0, True, False)
    result = (n + ones, everyone and ones == total, anyone or ones > 0)
    barrier.reduction = result
    _enter(W, barrier, i, m, line)

    def finish() -> None:
        W.acquire(barrier.settled)
        popc, conjunction, disjunction = barrier.result
        R[slot] = merge(m, {"popc": popc, "and": conjunction, "or": disjunction}[op], R[slot])

    if barrier.generation != generation:
        finish()
        return next_block
    return Wait(
        lambda: barrier.generation != generation,
        next_block,
        lambda: (
            f"{W.machine.describe_line(line)}: barrier {i} ({barrier.threads}/{barrier.expected} threads arrived)"
        ),
        finish,
    )


def cluster_arrive(W: Warp, m: Mask, relaxed: bool, next_block: int, line: int) -> int:
    cluster = W.cluster
    bits = mask_bits(m)
    before = cluster.arrived.get(W, 0)
    if before & bits:
        raise Fault(f"barrier.cluster.arrive twice without a wait: {who(W, line)}")
    cluster.arrived[W] = before | bits
    W.cluster_generation = cluster.generation
    release_to(W, cluster.gather, relaxed)
    W.machine.progress += 1
    complete_cluster_barrier(cluster)
    return next_block


def complete_cluster_barrier(cluster: Any) -> None:
    """All non-exited threads have arrived: open the barrier."""
    if not cluster.arrived:
        return
    for cta in cluster.ctas:
        for warp in cta.warps:
            if warp.groups and warp.live_bits & ~cluster.arrived.get(warp, 0):
                return
    cluster.arrived.clear()
    cluster.generation += 1
    cluster.settled.join(cluster.gather)


def cluster_wait(W: Warp, m: Mask, relaxed: bool, next_block: int, line: int) -> int | Wait:
    cluster, generation = W.cluster, W.cluster_generation

    def finish() -> None:
        acquire_from(W, cluster.settled, relaxed)

    if cluster.generation != generation:
        finish()
        return next_block
    if W not in cluster.arrived:
        raise Fault(f"barrier.cluster.wait without an arrive: {who(W, line)}")
    return Wait(
        lambda: cluster.generation != generation,
        next_block,
        lambda: (
            f"{W.machine.describe_line(line)}: barrier.cluster.wait ({len(cluster.arrived)} warps arrived)"
        ),
        finish,
    )


def fence_generic(W: Warp) -> None:
    """fence.acq_rel / fence.sc / fence.mbarrier_init: make later relaxed arrivals publish what came before."""
    if W.unfenced is not None:
        W.acquire(W.unfenced)
    if W.fenced is None:
        W.fenced = W.cluster.order.clock()
    W.release(W.fenced)


def fence_mbarrier_init(W: Warp) -> None:
    """This warp's mbarrier.init operations are visible to the async proxy and, by a relaxed arrival, to the cluster."""
    for barrier in W.unfenced_inits:
        barrier.fenced = True
    W.unfenced_inits.clear()


def fence_proxy_async(W: Warp) -> None:
    """Everything that happens before now is visible to the async proxy."""
    fence_mbarrier_init(W)
    v = W.current().v
    np.maximum(v[1], v[0], out=v[1])


def _location(W: Warp, space: str, a: Value, m: Mask) -> Clock:
    address = first(a, m)
    if space == "shared" or address >> 56:
        cta, key = shared_location(W, _shared(address))
    else:
        cta, key = W.cta.cluster.ctas[0], address
    clock = cta.locations.get(key)
    if clock is None:
        clock = cta.locations[key] = W.cluster.order.clock()
    return clock


def release_location(W: Warp, space: str, a: Value, m: Mask) -> None:
    W.release(_location(W, space, a, m))


def acquire_location(W: Warp, space: str, a: Value, m: Mask) -> None:
    W.acquire(_location(W, space, a, m))


__all__ = ["OFFSET_MASK", "RANK_SHIFT"]
