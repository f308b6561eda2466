"""A prefix sum over the threads of a CTA."""

import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Int32


@cute.jit
def exclusive_scan(value: Int32, warp_sums: cute.Tensor, warps: cutlass.Constexpr[int]):
    """Sum of `value` over the threads before this one, and over all.

    Two barriers; `warp_sums` is shared memory of `warps` words that may be used again after the next barrier.
    """
    lane, warp = ca.lane_idx(), ca.warp_idx()
    inclusive = value
    for i in cutlass.range_constexpr(5):
        below = ca.shuffle_sync_up(inclusive, 1 << i, mask_and_clamp=0)
        inclusive += cutlass.select_(lane >= (1 << i), below, Int32(0))
    if lane == 31:
        warp_sums[warp] = inclusive
    ca.barrier()
    before, total = Int32(0), Int32(0)
    for w in cutlass.range_constexpr(warps):
        s = warp_sums[w]
        before += cutlass.select_(w < warp, s, Int32(0))
        total += s
    ca.barrier()
    return before + inclusive - value, total
