"""A small Hopper GEMM in the CuTe DSL: one TMA warp, one wgmma warpgroup. D = A · Bᵀ, f32 accumulation and output.

    python -m ptxsim run tools/ptxsim/examples/hopper_gemm.py     # in the emulator
    python tools/ptxsim/examples/hopper_gemm.py                   # on a GPU of capability 9.0

It is one of the emulator's test kernels: an H200's bits for it are recorded in `tests/emulator/data`.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import torch
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

MMA_WARPS = 4  # warps 0 to 3, one warpgroup; warp 4 feeds them
TMA_WARP = 4
THREADS = 32 * (MMA_WARPS + 1)


@dataclass(frozen=True)
class HopperGemm:
    """Tile and depth; the operand types and majors come from the tensors."""

    tile_mnk: tuple[int, int, int] = (128, 128, 64)
    stages: int = 3

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        """Launch for a (M, K), b (N, K), d (M, N) f32; M, N, K multiples of the tile."""
        a_layout, b_layout = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        tile_m, tile_n, tile_k = self.tile_mnk
        mma = sm90.make_trivial_tiled_mma(
            a.element_type, b.element_type, a_layout.sm90_mma_major_mode(), b_layout.sm90_mma_major_mode(), Float32, (1, 1, 1), (64, tile_n)
        )  # fmt: skip
        smem_a = sm90.make_smem_layout_a(a_layout, self.tile_mnk, a.element_type, self.stages)
        smem_b = sm90.make_smem_layout_b(b_layout, self.tile_mnk, b.element_type, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        one = (None, None, 0)  # the layout of one stage
        tma_a, a_tma = cpasync.make_tiled_tma_atom(load, a, cute.slice_(smem_a, one), (tile_m, tile_k))
        tma_b, b_tma = cpasync.make_tiled_tma_atom(load, b, cute.slice_(smem_b, one), (tile_n, tile_k))
        grid = (cute.ceil_div(d.shape[0], tile_m), cute.ceil_div(d.shape[1], tile_n), 1)
        self.kernel(mma, tma_a, a_tma, tma_b, b_tma, d, smem_a, smem_b).launch(
            grid=grid, block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor, d: cute.Tensor,
        smem_a: cute.ComposedLayout, smem_b: cute.ComposedLayout,
    ):  # fmt: skip
        """One output tile per block."""
        tile_m, tile_n, tile_k = self.tile_mnk
        block_m, block_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        smem = SmemAllocator()
        sA = smem.allocate_tensor(tma_a.value_type, smem_a.outer, 1024, swizzle=smem_a.inner)
        sB = smem.allocate_tensor(tma_b.value_type, smem_b.outer, 1024, swizzle=smem_b.inner)
        stage_bytes = (tile_m + tile_n) * tile_k * tma_a.value_type.width // 8
        producer, consumer = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, MMA_WARPS),
            tx_count=stage_bytes,
        ).make_participants()

        gA = cute.local_tile(a, (tile_m, tile_k), (block_m, None))  # (tile_m, tile_k, k tiles)
        gB = cute.local_tile(b, (tile_n, tile_k), (block_n, None))
        gD = cute.local_tile(d, (tile_m, tile_n), (block_m, block_n))
        k_tiles = Int32(cute.size(gA, mode=[2]))

        if warp == TMA_WARP:
            self.load(producer, tma_a, gA, sA, tma_b, gB, sB, k_tiles)
        else:
            self.multiply(consumer, mma, sA, sB, gD, k_tiles)

    @cute.jit
    def load(self, producer, tma_a, gA, sA, tma_b, gB, sB, k_tiles: Int32):
        """The TMA warp: every K tile of A and B through the stages."""
        tAsA, tAgA = cpasync.tma_partition(
            tma_a, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        tBsB, tBgB = cpasync.tma_partition(
            tma_b, 0, cute.make_layout(1), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        for k in cutlass.range(k_tiles, unroll=1):
            slot = producer.acquire_and_advance()
            cute.copy(tma_a, tAgA[(None, k)], tAsA[(None, slot.index)], tma_bar_ptr=slot.barrier)
            cute.copy(tma_b, tBgB[(None, k)], tBsB[(None, slot.index)], tma_bar_ptr=slot.barrier)
            slot.commit()
        producer.tail()

    @cute.jit
    def multiply(self, consumer, mma, sA, sB, gD, k_tiles: Int32):
        """The warpgroup: one wgmma group per K tile, then its registers straight to global memory."""
        thread = mma.get_slice(cute.arch.thread_idx()[0])
        tCrA = mma.make_fragment_A(thread.partition_A(sA))
        tCrB = mma.make_fragment_B(thread.partition_B(sB))
        tCgD = thread.partition_C(gD)
        acc = cute.make_rmem_tensor(tCgD.shape, Float32)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for _ in cutlass.range(k_tiles, unroll=1):
            slot = consumer.wait_and_advance()
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, acc, tCrA[(None, None, k, slot.index)], tCrB[(None, None, k, slot.index)], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            slot.release()
        cute.autovec_copy(acc, tCgD)


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, a_major: str, b_major: str, seed: int
) -> tuple[torch.Tensor, ...]:
    """Normal a (M, K) and b (N, K) of the dtype, "k" or "m"/"n" major; NaN-filled d (M, N) f32. On the CPU."""
    rng = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, k, generator=rng).to(dtype) for rows in (m, n))
    a = a if a_major == "k" else a.T.contiguous().T
    b = b if b_major == "k" else b.T.contiguous().T
    return a, b, torch.full((m, n), float("nan"))


def gemm(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, kernel: HopperGemm) -> None:
    """Compile for these tensors and run."""
    from cutlass.cute.runtime import from_dlpack

    tensors = [
        from_dlpack(t.view(torch.uint8) if t.element_size() == 1 else t, assumed_align=16) for t in (a, b, d)
    ]
    for tensor, t in zip(tensors, (a, b, d), strict=True):
        if t.dtype == torch.float8_e4m3fn:
            tensor.element_type = cutlass.Float8E4M3FN
    cute.compile(kernel, *tensors)(*tensors)


if __name__ == "__main__":
    a, b, d = (t.cuda() for t in operands(256, 256, 256, torch.bfloat16, "k", "k", seed=0))
    gemm(a, b, d, HopperGemm())
    torch.cuda.synchronize()
    want = a.double() @ b.double().T
    print("largest error", (d.double() - want).abs().max().item(), "of", want.abs().max().item())
