"""Which cluster takes which tile: clusters that are done draw the next one's number from a counter in global memory.

Tiles differ in cost: the last ones of a group are short, and a group's weights come from memory once and from L2 after
that. With a fixed share of the tiles some clusters end late; with tickets the last tile is all that they wait for.

Every cluster has its first tile by its own number and draws all others; the first ticket past the last tile is also the
last that it draws. So the clusters of a launch together draw as many tickets as there are tiles, and the one that draws
the last puts the counter back to zero: it is zero between launches without anybody's help.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass.cute import arch

TICKET_BYTES = 4


class Tickets(NamedTuple):
    """Of one CTA. In a cluster the first CTA draws, for all."""

    rank: Int32  # of the CTA in its cluster
    counter: cute.Tensor  # int32 (1,), global
    sTicket: cute.Tensor  # int32 (1,): what was drawn
    drawn: cute.Pointer  # mbarrier: the ticket is in sTicket
    read: cute.Pointer  # mbarrier of the first CTA: every CTA has read it


@cute.jit
def init_tickets(tickets: Tickets, cluster_size: Constexpr[int]):
    """One thread of every CTA, before the cluster's first barrier."""
    arch.mbarrier_init(tickets.drawn, 1)
    arch.mbarrier_init(tickets.read, cluster_size)


@cute.jit
def draw(tickets: Tickets, cluster_size: Constexpr[int], phase: Int32) -> Int32:
    """The cluster's next ticket, the same in every CTA (one whole warp of each).

    phase: 0 at the first draw, then 1, 0, … in turn.
    """
    if cutlass.const_expr(cluster_size == 1):
        ticket = Int32(0)
        if arch.lane_idx() == 0:
            ticket = take(tickets)
        return arch.shuffle_sync(ticket, 0)
    if tickets.rank == 0:
        arch.mbarrier_wait(tickets.read, phase ^ 1)
        with arch.elect_one():
            drawn = take(tickets)
            for peer in cutlass.range_constexpr(cluster_size):
                arch.store_async_dsmem(tickets.sTicket.iterator, drawn, tickets.drawn, peer)
    with arch.elect_one():
        arch.mbarrier_arrive_and_expect_tx(tickets.drawn, TICKET_BYTES)
    arch.mbarrier_wait(tickets.drawn, phase)
    ticket = Int32(tickets.sTicket[0])
    arch.sync_warp()
    with arch.elect_one():
        arch.mbarrier_arrive(tickets.read, 0, scope=MemScopeKind.CLUSTER)
    return ticket


@cute.jit
def take(tickets: Tickets) -> Int32:
    return Int32(arch.atomic_add(tickets.counter.iterator, Int32(1), sem="relaxed", scope="gpu"))


@cute.jit
def leave(tickets: Tickets, cluster_size: Constexpr[int], phase: Int32, last):
    """After the cluster's last draw, which was the last of all if `last`. The first CTA stays until its peers have read it."""
    if tickets.rank == 0:
        if cutlass.const_expr(cluster_size > 1):
            arch.mbarrier_wait(tickets.read, phase ^ 1)
        if last:
            with arch.elect_one():
                tickets.counter[0] = Int32(0)
