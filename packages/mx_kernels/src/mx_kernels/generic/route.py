"""From the experts that tokens chose to the rows they get, and the router weights moved there.

The T·k choices are cut into chunks, one a CTA. The first kernel counts every chunk's choices of every expert; the second
finds from all counts where this chunk's first choice of an expert goes, then places its choices in order. Inside a chunk
every warp does the same with its own stretch, 32 choices at a time: lanes with the same expert find each other by a
match. Nothing depends on timing, so the result is stable and the same in every run.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.scan import exclusive_scan
from mx_kernels.device.tile import ROWS
from mx_kernels.generic.combine import fill
from mx_kernels.generic.config import ROUTE_THREADS as THREADS

WARPS = THREADS // 32


@dataclass(frozen=True)
class RouteKernel:
    """topk_ids (T, k) → slot_of (T, k), token_of (P,), offs (E,). Ids outside [0, E) get slot -1."""

    id_bits: int
    k: int
    experts: int

    def build(self):
        """Function and arguments for `jit.compiled`."""
        pointers = [fake_pointer(cutlass.Int64 if self.id_bits == 64 else Int32)] + [fake_pointer(Int32)] * 4
        return self, *pointers, Int32(0), Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        ids: cute.Pointer,
        slot_of: cute.Pointer,
        token_of: cute.Pointer,
        offs: cute.Pointer,
        counts: cute.Pointer,
        choices: Int32,
        rows: Int32,
        chunk: Int32,
        stream: cuda.CUstream,
    ):
        """`choices` T·k, `rows` P, `chunk` from config.chunk_size; counts (chunks, E) is scratch."""
        chunks = cute.ceil_div(choices, chunk)
        ids_N = cute.make_tensor(ids, cute.make_layout(choices))
        slot_of_N = cute.make_tensor(slot_of, cute.make_layout(choices))
        token_of_P = cute.make_tensor(token_of, cute.make_layout(rows))
        offs_E = cute.make_tensor(offs, cute.make_layout(self.experts))
        counts_CE = cute.make_tensor(
            counts, cute.make_layout((chunks, self.experts), stride=(self.experts, 1))
        )
        launch = {"grid": (chunks, 1, 1), "block": (THREADS, 1, 1), "stream": stream}
        self.count(ids_N, token_of_P, counts_CE, choices, rows, chunk).launch(**launch)
        self.place(ids_N, slot_of_N, token_of_P, offs_E, counts_CE, choices, chunks, chunk).launch(**launch)

    @cute.kernel
    def count(
        self,
        ids_N: cute.Tensor,
        token_of_P: cute.Tensor,
        counts_CE: cute.Tensor,
        choices: Int32,
        rows: Int32,
        chunk: Int32,
    ):
        """Count this chunk's choices of every expert; fill this CTA's part of token_of with -1."""
        counted = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.experts))
        cta, thread = ca.block_idx()[0], ca.thread_idx()[0]
        clear(counted, self.experts)
        ca.barrier()
        i, end = cta * chunk + thread, cutlass.min((cta + 1) * chunk, choices)
        while i < end:
            expert = self.expert_of(ids_N[i])
            if expert >= 0:
                ca.atomic_add((counted.iterator + expert).llvm_ptr, Int32(1))
            i += THREADS
        row = cta * THREADS + thread
        while row < rows:
            token_of_P[row] = Int32(-1)
            row += ca.grid_dim()[0] * THREADS
        ca.barrier()
        expert = thread
        while expert < self.experts:
            counts_CE[cta, expert] = counted[expert]
            expert += THREADS

    @cute.kernel
    def place(
        self,
        ids_N: cute.Tensor,
        slot_of_N: cute.Tensor,
        token_of_P: cute.Tensor,
        offs_E: cute.Tensor,
        counts_CE: cute.Tensor,
        choices: Int32,
        chunks: Int32,
        chunk: Int32,
    ):
        """Give this chunk's choices their rows."""
        smem = SmemAllocator()
        next_slot = smem.allocate_tensor(
            Int32, cute.make_layout((WARPS, self.experts), stride=(self.experts, 1))
        )
        first_slot = smem.allocate_tensor(Int32, cute.make_layout(self.experts))
        # Aligned: loads of all its words are widened to 16 bytes, which must not reach past the end.
        warp_sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        cta, thread, warp = ca.block_idx()[0], ca.thread_idx()[0], ca.warp_idx()
        clear(next_slot, WARPS * self.experts)
        self.first_slots(counts_CE, offs_E, first_slot, warp_sums, chunks)
        ca.barrier()

        # This warp's stretch: count, then (with what the warps before it counted) place.
        stretch = chunk // WARPS
        start = cta * chunk + warp * stretch
        self.walk(ids_N, next_slot, slot_of_N, token_of_P, start, stretch, choices, False)
        ca.barrier()
        expert = thread
        while expert < self.experts:
            slot = first_slot[expert]
            for w in cutlass.range_constexpr(WARPS):
                counted = next_slot[w, expert]
                next_slot[w, expert] = slot
                slot += counted
            expert += THREADS
        ca.barrier()
        self.walk(ids_N, next_slot, slot_of_N, token_of_P, start, stretch, choices, True)

    @cute.jit
    def first_slots(
        self,
        counts_CE: cute.Tensor,
        offs_E: cute.Tensor,
        first_slot: cute.Tensor,
        warp_sums: cute.Tensor,
        chunks: Int32,
    ):
        """Where this chunk's first choice of every expert goes: aligned group start plus all earlier chunks' choices."""
        cta, thread = ca.block_idx()[0], ca.thread_idx()[0]
        units_before, choices_before = Int32(0), Int32(0)
        for block in cutlass.range_constexpr(cute.ceil_div(self.experts, THREADS)):
            expert = block * THREADS + thread
            earlier, total = Int32(0), Int32(0)
            if expert < self.experts:
                for c in cutlass.range(chunks, unroll=8):
                    counted = counts_CE[c, expert]
                    total += counted
                    earlier += cutlass.select_(c < cta, counted, Int32(0))
            unit, units = exclusive_scan(cute.ceil_div(total, ROWS), warp_sums, WARPS)
            offset, all_choices = exclusive_scan(total, warp_sums, WARPS)
            if expert < self.experts:
                first_slot[expert] = (units_before + unit) * ROWS + earlier
                if cta == 0:
                    offs_E[expert] = choices_before + offset + total
            units_before += units
            choices_before += all_choices

    @cute.jit
    def walk(
        self,
        ids_N: cute.Tensor,
        next_slot: cute.Tensor,
        slot_of_N: cute.Tensor,
        token_of_P: cute.Tensor,
        start: Int32,
        stretch: Int32,
        choices: Int32,
        place: cutlass.Constexpr[bool],
    ):
        """Advance next_slot[warp] over a stretch of choices, 32 at a time in order; `place` also writes the slots."""
        warp, lane = ca.warp_idx(), ca.lane_idx()
        i = start + lane
        end = start + lane + stretch
        while i < end:
            expert = Int32(-1)
            if i < choices:
                expert = self.expert_of(ids_N[i])
            peers = ca.match_sync(0xFFFF_FFFF, expert)
            earlier = ca.popc(peers & ca.lanemask_lt())
            slot = Int32(-1)
            if expert >= 0:
                slot = next_slot[warp, expert] + Int32(earlier)
            ca.sync_warp()
            if (expert >= 0) & (earlier == 0):
                next_slot[warp, expert] = slot + Int32(ca.popc(peers))
            ca.sync_warp()
            if cutlass.const_expr(place):  # noqa: SIM102 - one is known while compiling
                if i < choices:
                    slot_of_N[i] = slot
                    if slot >= 0:
                        token_of_P[slot] = i // self.k
            i += 32

    @cute.jit
    def expert_of(self, id: cutlass.Numeric):
        """The id as Int32, -1 if it is outside [0, E)."""
        inside = (id >= 0) & (id < self.experts)
        return Int32(cutlass.select_(inside, Int32(id), Int32(-1)))


@cute.jit
def clear(x: cute.Tensor, size: cutlass.Constexpr[int]):
    """Zeros to `size` words of shared memory, by all threads."""
    words = cute.make_tensor(x.iterator, cute.make_layout(size))
    i = ca.thread_idx()[0]
    while i < size:
        words[i] = Int32(0)
        i += THREADS


@dataclass(frozen=True)
class SlotWeightsKernel:
    """weights (T, k), slot_of (T, k) → (P,), 0 where no slot points."""

    def build(self):
        """Function and arguments for `jit.compiled`."""
        weights = fake_pointer(Float32)
        return self, weights, fake_pointer(Int32), weights, Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        weights: cute.Pointer,
        slot_of: cute.Pointer,
        out: cute.Pointer,
        choices: Int32,
        rows: Int32,
        stream: cuda.CUstream,
    ):
        """`choices` T·k, `rows` P."""
        out_P = cute.make_tensor(out, cute.make_layout(rows))
        weights_N = cute.make_tensor(weights, cute.make_layout(choices))
        slot_of_N = cute.make_tensor(slot_of, cute.make_layout(choices))
        fill(out_P, Float32(0), rows).launch(
            grid=(cute.ceil_div(rows, 128), 1, 1), block=(128, 1, 1), stream=stream
        )
        self.scatter(weights_N, slot_of_N, out_P, choices).launch(
            grid=(cute.ceil_div(choices, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def scatter(self, weights_N: cute.Tensor, slot_of_N: cute.Tensor, out_P: cute.Tensor, choices: Int32):
        """A choice a thread."""
        i = ca.block_idx()[0] * THREADS + ca.thread_idx()[0]
        if i < choices:
            slot = Int32(slot_of_N[i])
            if slot >= 0:
                out_P[slot] = weights_N[i]
