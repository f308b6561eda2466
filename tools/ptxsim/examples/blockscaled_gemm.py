"""A small block-scaled MXFP8 GEMM for Blackwell in the CuTe DSL, with one or two CTAs to an MMA.

    D[m, n] = Σ_k A[m, k] · 2^(SFA[m, k/32] - 127) · B[n, k] · 2^(SFB[n, k/32] - 127)      A, B: E4M3, SF: E8M0, D: bf16

    python -m ptxsim run tools/ptxsim/examples/blockscaled_gemm.py [--ctas 2]

Six warps, persistent over output tiles: warp 5 brings operands and scales by TMA; warp 4 copies the scales into tensor
memory and issues the MMAs; warps 0 to 3 drain one of two accumulators while the other fills, and store by TMA. With two
CTAs a pair shares one 256-row MMA: each holds 128 rows of A and SFA, half of B, and all of SFB.

It is the emulator's test kernel and the subject of its mutation run (docs/ptxsim_evidence.md). The project's own grouped
GEMM, with its tiles, clusters and group modes, is in `mx_kernels/sm100`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import cutlass
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E8M0FNU, Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100
from cutlass.utils import blockscaled_layout

BLOCK = 32  # elements to a scale
EPILOGUE_WARPS = 4  # warps 0 to 3
MMA_WARP, TMA_WARP = 4, 5
THREADS = 32 * (EPILOGUE_WARPS + 2)
ACCUMULATORS = 2
EPILOGUE_TILE = (128, 32)
EPILOGUE_STAGES = 2
TMEM_COLUMNS = 512  # two accumulators of 128, the scales of one K tile, rounded up to a power of two
EPILOGUE_BARRIER, TMEM_BARRIER = 1, 2  # named barriers


@dataclass(frozen=True)
class BlockscaledGemm:
    """ctas: 1 or 2 to an MMA. The output tile is (128 · ctas) × 128; a K tile is 128 (four scales)."""

    ctas: int = 1
    stages: int = 3

    @property
    def tile_mnk(self) -> tuple[int, int, int]:
        return (128 * self.ctas, 128, 128)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        sfa: cute.Tensor,
        b: cute.Tensor,
        sfb: cute.Tensor,
        d: cute.Tensor,
        max_ctas: Int32,
    ):
        """Launch for a (M, K, 1), b (N, K, 1) E4M3, either major; sfa, sfb: the 128×4-blocked scale bytes; d (M, N, 1) bf16, N-major."""
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        majors = [LayoutEnum.from_tensor(t).mma_major_mode() for t in (a, b)]

        def tiled_mma(cta_group, tile_mn):
            return sm100.make_blockscaled_trivial_tiled_mma(
                Float8E4M3FN, Float8E4M3FN, *majors, Float8E8M0FNU, BLOCK, cta_group, tile_mn
            )

        tile = self.tile_mnk
        mma = tiled_mma(group, tile[:2])
        mma_sfb = tiled_mma(tcgen05.CtaGroup.ONE, (128, 128))  # every CTA needs the scales of all N columns

        smem_a = sm100.make_smem_layout_a(mma, tile, Float8E4M3FN, self.stages)
        smem_b = sm100.make_smem_layout_b(mma, tile, Float8E4M3FN, self.stages)
        smem_sfa = blockscaled_layout.make_smem_layout_sfa(mma, tile, BLOCK, self.stages)
        smem_sfb = blockscaled_layout.make_smem_layout_sfb(mma, tile, BLOCK, self.stages)
        smem_d = sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, EPILOGUE_TILE, EPILOGUE_STAGES)

        cluster = (self.ctas, 1, 1)
        vmnk = cute.tiled_divide(cute.make_layout(cluster), (mma.thr_id.shape,))
        vmnk_sfb = cute.tiled_divide(cute.make_layout(cluster), (mma_sfb.thr_id.shape,))
        sfa = cute.make_tensor(sfa.iterator, blockscaled_layout.tile_atom_to_shape_SF(a.shape, BLOCK))
        sfb = cute.make_tensor(sfb.iterator, blockscaled_layout.tile_atom_to_shape_SF(b.shape, BLOCK))

        one = (None, None, None, 0)  # the layout of one stage
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        load_a = sm100.cluster_shape_to_tma_atom_A(cluster[:2], mma.thr_id)
        load_b = sm100.cluster_shape_to_tma_atom_B(cluster[:2], mma.thr_id)
        load_sfb = sm100.cluster_shape_to_tma_atom_SFB(cluster[:2], mma.thr_id)
        tma_a, a = make_a(load_a, a, cute.slice_(smem_a, one), tile, mma, vmnk.shape)
        tma_b, b = make_b(load_b, b, cute.slice_(smem_b, one), tile, mma, vmnk.shape)
        tma_sfa, sfa = make_a(
            load_a, sfa, cute.slice_(smem_sfa, one), tile, mma, vmnk.shape, internal_type=cutlass.Int16
        )
        tile_sfb = (128, *tile[1:])
        tma_sfb, sfb = make_b(load_sfb, sfb, cute.slice_(smem_sfb, one), tile_sfb, mma_sfb, vmnk_sfb.shape, internal_type=cutlass.Int16)  # fmt: skip
        tma_d, d = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), d, cute.slice_(smem_d, (None, None, 0)), EPILOGUE_TILE)  # fmt: skip

        tiles = cute.ceil_div(d.shape[0], tile[0]) * cute.ceil_div(d.shape[1], tile[1])
        grid = (cutlass.min(tiles, max_ctas // self.ctas) * self.ctas, 1, 1)
        self.kernel(
            mma, mma_sfb, tma_a, a, tma_b, b, tma_sfa, sfa, tma_sfb, sfb, tma_d, d, vmnk, vmnk_sfb, smem_a, smem_b, smem_sfa, smem_sfb, smem_d
        ).launch(grid=grid, block=(THREADS, 1, 1), cluster=cluster)  # fmt: skip

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, mma_sfb: cute.TiledMma, tma_a: cute.CopyAtom, a: cute.Tensor, tma_b: cute.CopyAtom, b: cute.Tensor,
        tma_sfa: cute.CopyAtom, sfa: cute.Tensor, tma_sfb: cute.CopyAtom, sfb: cute.Tensor, tma_d: cute.CopyAtom, d: cute.Tensor,
        vmnk: cute.Layout, vmnk_sfb: cute.Layout, smem_a: cute.ComposedLayout, smem_b: cute.ComposedLayout,
        smem_sfa: cute.Layout, smem_sfb: cute.Layout, smem_d: cute.ComposedLayout,
    ):  # fmt: skip
        """Shared and tensor memory, pipelines, and one role to a warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        leader = rank % self.ctas == 0

        smem = SmemAllocator()
        sD = smem.allocate_tensor(BFloat16, smem_d.outer, 1024, swizzle=smem_d.inner)
        sA = smem.allocate_tensor(Float8E4M3FN, smem_a.outer, 1024, swizzle=smem_a.inner)
        sB = smem.allocate_tensor(Float8E4M3FN, smem_b.outer, 1024, swizzle=smem_b.inner)
        sSFA = smem.allocate_tensor(Float8E8M0FNU, smem_sfa, 128)
        sSFB = smem.allocate_tensor(Float8E8M0FNU, smem_sfb, 128)
        one = (None, None, None, 0)
        layouts = (
            (Float8E4M3FN, smem_a),
            (Float8E4M3FN, smem_b),
            (Float8E8M0FNU, smem_sfa),
            (Float8E8M0FNU, smem_sfb),
        )
        stage_bytes = self.ctas * sum(
            cute.size_in_bytes(dtype, cute.slice_(layout, one)) for dtype, layout in layouts
        )

        one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        operands = pipeline.PipelineTmaUmma.create(
            num_stages=self.stages, producer_group=one_thread, consumer_group=one_thread, tx_count=stage_bytes,
            cta_layout_vmnk=vmnk, defer_sync=True,
        )  # fmt: skip
        accumulators = pipeline.PipelineUmmaAsync.create(
            num_stages=ACCUMULATORS, producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * self.ctas),
            cta_layout_vmnk=vmnk, defer_sync=True,
        )  # fmt: skip
        tmem = TmemAllocator(
            barrier_for_retrieve=pipeline.NamedBarrier(TMEM_BARRIER, 32 * (EPILOGUE_WARPS + 1)), allocator_warp_id=0, is_two_cta=self.ctas == 2
        )  # fmt: skip
        pipeline.pipeline_init_arrive(vmnk, is_relaxed=True)
        pipeline.pipeline_init_wait(vmnk)

        tile = self.tile_mnk
        whole = (None, None, None)
        gA = cute.local_tile(a, (tile[0], tile[2]), whole)  # (tile_m, tile_k, m tiles, k tiles, 1)
        gB = cute.local_tile(b, (tile[1], tile[2]), whole)
        gSFA = cute.local_tile(sfa, (tile[0], tile[2]), whole)
        gSFB = cute.local_tile(sfb, (tile[1], tile[2]), whole)
        k_tiles, m_tiles = Int32(cute.size(gA, mode=[3])), Int32(cute.size(gA, mode=[2]))
        tiles = m_tiles * Int32(cute.size(gB, mode=[2]))
        first, step = cute.arch.block_idx()[0] // self.ctas, cute.arch.grid_dim()[0] // self.ctas

        if warp == TMA_WARP:
            thread, thread_sfb = mma.get_slice(rank % self.ctas), mma_sfb.get_slice(0)
            part_a = self.partition(tma_a, thread.partition_A(gA), sA)
            part_b = self.partition(tma_b, thread.partition_B(gB), sB)
            part_sfa = self.partition(tma_sfa, thread.partition_A(gSFA), sSFA)
            part_sfb = self.partition(tma_sfb, thread_sfb.partition_B(gSFB), sSFB, rank, self.ctas)
            mask_sfb = None
            if cutlass.const_expr(self.ctas == 2):
                mask_sfb = cpasync.create_tma_multicast_mask(
                    vmnk_sfb, vmnk_sfb.get_flat_coord(rank), mcast_mode=1
                )
            self.load(operands, tma_a, part_a, tma_b, part_b, tma_sfa, part_sfa, tma_sfb, part_sfb, mask_sfb, first, step, tiles, m_tiles, k_tiles)  # fmt: skip

        if warp == MMA_WARP:
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            if leader:
                self.multiply(
                    operands,
                    accumulators,
                    mma,
                    base,
                    sA,
                    sB,
                    sSFA,
                    sSFB,
                    smem_sfa,
                    smem_sfb,
                    first,
                    step,
                    tiles,
                    k_tiles,
                )

        if warp < EPILOGUE_WARPS:
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            self.epilogue(accumulators, mma, base, tma_d, d, sD, rank, first, step, tiles, m_tiles)
            tmem.relinquish_alloc_permit()
            tmem.free(base)

    @cute.jit
    def partition(self, tma, gX, sX, rank: Int32 = 0, ranks: cutlass.Constexpr[int] = 1):
        """(shared stages, global tiles) as the TMA atom sees them; with ranks > 1 each CTA brings one part for all."""
        s, g = cpasync.tma_partition(
            tma, rank, cute.make_layout(ranks), cute.group_modes(sX, 0, 3), cute.group_modes(gX, 0, 3)
        )
        return cute.filter_zeros(s), cute.filter_zeros(g)

    @cute.jit
    def load(
        self, operands, tma_a, part_a, tma_b, part_b, tma_sfa, part_sfa, tma_sfb, part_sfb, mask_sfb,
        first: Int32, step: Int32, tiles: Int32, m_tiles: Int32, k_tiles: Int32,
    ):  # fmt: skip
        """TMA warp: four copies for each K tile of each output tile."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        sA, gA = part_a
        sB, gB = part_b
        sSFA, gSFA = part_sfa
        sSFB, gSFB = part_sfb
        tile = first
        while tile < tiles:
            m, n = tile % m_tiles, tile // m_tiles
            for k in cutlass.range(k_tiles, unroll=1):
                operands.producer_acquire(state)
                full, slot = operands.producer_get_barrier(state), (None, state.index)
                cute.copy(tma_a, gA[(None, m, k, 0)], sA[slot], tma_bar_ptr=full)
                cute.copy(tma_b, gB[(None, n, k, 0)], sB[slot], tma_bar_ptr=full)
                cute.copy(tma_sfa, gSFA[(None, m, k, 0)], sSFA[slot], tma_bar_ptr=full)
                cute.copy(tma_sfb, gSFB[(None, n, k, 0)], sSFB[slot], tma_bar_ptr=full, mcast_mask=mask_sfb)
                state.advance()
            tile += step
        operands.producer_tail(state)

    @cute.jit
    def multiply(
        self, operands, accumulators, mma, base, sA, sB, sSFA, sSFB, smem_sfa, smem_sfb,
        first: Int32, step: Int32, tiles: Int32, k_tiles: Int32,
    ):  # fmt: skip
        """MMA warp of the leading CTA: scales into tensor memory, then four MMAs of K = 32, for each K tile."""
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        tCtAcc = self.accumulator(mma, base)
        columns = tcgen05.find_tmem_tensor_col_offset(tCtAcc)
        one = (None, None, None, 0)
        sf_pointer = cute.recast_ptr(base + columns, dtype=Float8E8M0FNU)
        tCtSFA = cute.make_tensor(
            sf_pointer,
            blockscaled_layout.make_tmem_layout_sfa(mma, self.tile_mnk, BLOCK, cute.slice_(smem_sfa, one)),
        )
        columns += tcgen05.find_tmem_tensor_col_offset(tCtSFA)
        sf_pointer = cute.recast_ptr(base + columns, dtype=Float8E8M0FNU)
        tCtSFB = cute.make_tensor(
            sf_pointer,
            blockscaled_layout.make_tmem_layout_sfb(mma, self.tile_mnk, BLOCK, cute.slice_(smem_sfb, one)),
        )
        copy_sfa, from_sfa, to_sfa = self.scale_copy(sSFA, tCtSFA)
        copy_sfb, from_sfb, to_sfb = self.scale_copy(sSFB, tCtSFB)

        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACCUMULATORS)
        tile = first
        while tile < tiles:
            acc = tCtAcc[(None, None, None, done.index)]
            accumulators.producer_acquire(done)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                operands.consumer_wait(full)
                stage = (None, None, None, None, full.index)
                cute.copy(copy_sfa, from_sfa[stage], to_sfa)
                cute.copy(copy_sfb, from_sfb[stage], to_sfb)
                for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    a_k, b_k, scales = (
                        (None, None, k, full.index),
                        (None, None, k, full.index),
                        (None, None, k),
                    )
                    mma.set(tcgen05.Field.SFA, tCtSFA[scales].iterator)
                    mma.set(tcgen05.Field.SFB, tCtSFB[scales].iterator)
                    cute.gemm(mma, acc, tCrA[a_k], tCrB[b_k], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                operands.consumer_release(full)  # a commit: arrives when the MMAs have read the stage
                full.advance()
            accumulators.producer_commit(done)
            done.advance()
            tile += step
        accumulators.producer_tail(done)

    @cute.jit
    def accumulator(self, mma, base):
        """(MMA, 1, 1, ACCUMULATORS) in tensor memory."""
        shape = mma.partition_shape_C(self.tile_mnk[:2])
        return cute.make_tensor(base, mma.make_fragment_C(cute.append(shape, ACCUMULATORS)).layout)

    @cute.jit
    def scale_copy(self, sSF, tSF):
        """tcgen05.cp of one stage's scales: the copy, its shared-memory descriptors by stage, its destination."""
        shared, tensor_memory = cute.filter_zeros(sSF), cute.filter_zeros(tSF)
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), Float8E8M0FNU)
        copy = tcgen05.make_s2t_copy(atom, tensor_memory)
        thread = copy.get_slice(0)
        return (
            copy,
            tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(shared)),
            thread.partition_D(tensor_memory),
        )

    @cute.jit
    def epilogue(
        self,
        accumulators,
        mma,
        base,
        tma_d,
        d,
        sD,
        rank: Int32,
        first: Int32,
        step: Int32,
        tiles: Int32,
        m_tiles: Int32,
    ):
        """Warps 0 to 3: accumulator → registers → bf16 → shared memory → TMA store, 32 columns at a time."""
        thread_index, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tCtAcc = self.accumulator(mma, base)
        tAcc = cute.flat_divide(
            tCtAcc[((None, None), 0, 0, None)], EPILOGUE_TILE
        )  # (128, 32, 1, 4, ACCUMULATORS)
        from_tmem = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), Float32),
            tAcc[(None, None, 0, 0, 0)],
        )
        thread = from_tmem.get_slice(thread_index)
        tTR_tAcc = thread.partition_S(tAcc)
        to_smem = cute.make_tiled_copy_D(
            sm100.get_smem_store_op(LayoutEnum.ROW_MAJOR, BFloat16, Float32, from_tmem), from_tmem
        )
        tRS_sD = to_smem.get_slice(thread_index).partition_D(sD)
        gD = cute.local_tile(d[(None, None, 0)], (128, 128), (None, None))  # (128, 128, m, n), by CTA
        gD_epi = cute.flat_divide(gD, EPILOGUE_TILE)  # (128, 32, 1, 4, m, n)
        registers = cute.make_rmem_tensor(
            thread.partition_D(gD_epi)[(None, None, None, 0, 0, 0, 0)].shape, Float32
        )
        rounded = cute.make_rmem_tensor(registers.shape, BFloat16)
        tRS_rD = to_smem.retile(rounded)
        bSG_sD, bSG_gD = cpasync.tma_partition(tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD_epi, 0, 2))  # fmt: skip
        sync = pipeline.NamedBarrier(EPILOGUE_BARRIER, 32 * EPILOGUE_WARPS)

        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
        tile = first
        while tile < tiles:
            m, n = (tile % m_tiles) * self.ctas + rank, tile // m_tiles
            accumulators.consumer_wait(full)
            for j in cutlass.range_constexpr(128 // EPILOGUE_TILE[1]):
                stage = j % EPILOGUE_STAGES
                cute.copy(from_tmem, tTR_tAcc[(None, None, None, 0, j, full.index)], registers)
                cute.arch.fence_view_async_tmem_load()
                rounded.store(registers.load().to(BFloat16))
                if warp == 0:  # the store that last read this buffer has done so
                    cute.arch.cp_async_bulk_wait_group(EPILOGUE_STAGES - 1, read=True)
                sync.arrive_and_wait()
                cute.copy(to_smem, tRS_rD, tRS_sD[(None, None, None, stage)])
                cute.arch.fence_proxy("async.shared", space="cta")
                sync.arrive_and_wait()
                if warp == 0:
                    cute.copy(tma_d, bSG_sD[(None, stage)], bSG_gD[(None, 0, j, m, n)])
                    cute.arch.cp_async_bulk_commit_group()
            with cute.arch.elect_one():
                accumulators.consumer_release(full)
            full.advance()
            tile += step
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def operands(
    m: int, n: int, k: int, *, a_major: str = "k", b_major: str = "k", seed: int = 0, exact: bool = False
):
    """Random a (M, K), sfa (M, K/32), b (N, K), sfb (N, K/32) on the CPU; `exact`: all sums are exact in fp32."""
    rng = torch.Generator().manual_seed(seed)

    def one(rows: int, major: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = (
            torch.randint(-4, 5, (rows, k), generator=rng).float()
            if exact
            else torch.randn(rows, k, generator=rng)
        )
        low, high = (126, 130) if exact else (120, 135)
        scale = torch.randint(low, high, (rows, k // BLOCK), generator=rng, dtype=torch.uint8)
        x = x.to(torch.float8_e4m3fn)
        return (x if major == "k" else x.T.contiguous().T), scale

    (a, sfa), (b, sfb) = one(m, a_major), one(n, b_major)
    return a, sfa, b, sfb


def blocked(scale: torch.Tensor) -> torch.Tensor:
    """(R, C) scale bytes → the 128×4-blocked bytes that tcgen05 reads (R a multiple of 128, C of 4)."""
    r, c = scale.shape
    return scale.view(r // 128, 4, 32, c // 4, 4).permute(0, 3, 2, 1, 4).contiguous().flatten()


def reference(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor) -> torch.Tensor:
    """The float64 sum, (M, N)."""
    scaled = [
        x.double() * torch.exp2(sf.double() - 127).repeat_interleave(BLOCK, 1)
        for x, sf in ((a.float(), sfa), (b.float(), sfb))
    ]
    return scaled[0] @ scaled[1].T


def arguments(
    a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, sfb: torch.Tensor, max_ctas: int = 148
) -> tuple[tuple, torch.Tensor]:
    """What `BlockscaledGemm` is compiled for and called with, and its output d (M, N, 1), filled with NaN."""
    from cutlass.cute.runtime import from_dlpack

    def view(t: torch.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
        tensor = from_dlpack(t.view(torch.uint8) if t.element_size() == 1 else t, assumed_align=16)
        tensor.element_type = dtype
        return tensor

    d = torch.full((a.shape[0], b.shape[0], 1), float("nan"), dtype=torch.bfloat16, device=a.device)
    operands = (
        view(a.unsqueeze(-1), Float8E4M3FN),
        view(blocked(sfa), Float8E8M0FNU),
        view(b.unsqueeze(-1), Float8E4M3FN),
        view(blocked(sfb), Float8E8M0FNU),
        view(d, BFloat16),
    )
    return (*operands, Int32(max_ctas)), d


def gemm(
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    kernel: BlockscaledGemm,
    max_ctas: int = 148,
) -> torch.Tensor:
    """Compile for these tensors, run, and return d (M, N) bf16."""
    mnk, tile = (a.shape[0], b.shape[0], a.shape[1]), kernel.tile_mnk
    if any(x % t for x, t in zip(mnk, tile, strict=True)):
        raise ValueError(f"expected M, N, K that are multiples of {tile}, got {mnk}")
    values, d = arguments(a, sfa, b, sfb, max_ctas)
    cute.compile(kernel, *values)(*values)
    return d[..., 0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ctas", type=int, default=1, choices=(1, 2))
    parser.add_argument("--mnk", type=int, nargs=3, default=(512, 256, 512))
    args = parser.parse_args()
    inputs = [t.cuda() for t in operands(*args.mnk)]
    d = gemm(*inputs, BlockscaledGemm(args.ctas))
    torch.cuda.synchronize()
    want = reference(*(t.cpu() for t in inputs))
    print("largest error", (d.cpu().double() - want).abs().max().item(), "of", want.abs().max().item())
