"""The Blackwell grouped GEMM: one kernel class for fprop, dgrad, wgrad and the dense one-group case.

For every group, D (m, n) = A (m, k) · B (n, k)ᵀ with fp32 accumulation; MX operands carry one E8M0 scale for 32 elements
along k. What differs between the modes is which axis the groups cut and which axis of an operand is contiguous:

| mode  | A            | B             | D            | groups cut | contiguous in A, B |
|-------|--------------|---------------|--------------|------------|--------------------|
| fprop | x (rows, K)  | w (E, N, K)   | y (rows, N)  | m          | k, k               |
| dgrad | dy (rows, N) | w (E, N, K)   | dx (rows, K) | m          | k, n               |
| wgrad | dy (rows, N) | x (rows, K)   | dw (E, N, K) | k          | m, n               |

One persistent CTA of seven warps per SM; warps talk through mbarrier pipelines only:

    offs ─► scheduler warp ══ work ═════╦════════════════╦══════════════════╗
                                        ▼                ▼                  ▼
    A, B, scales ──TMA──► [load warp] ══ ab ══► [MMA warp] ══ acc ══► [4 epilogue warps] ──TMA──► D
                           smem ring            smem → TMEM (scales)    TMEM → registers → smem
                                                tcgen05.mma → TMEM

| pipeline | buffer                        | full when                         | empty when                             |
|----------|-------------------------------|-----------------------------------|----------------------------------------|
| work     | tile descriptions in smem     | the scheduler's elected lane has arrived | load, MMA and epilogue warps have read it |
| ab       | stages of A, B, SFA, SFB      | all TMA bytes have landed (of both CTAs of a pair, on the leader's barrier) | the MMAs that read it are done, in every CTA that shares the multicast |
| acc      | accumulators in TMEM          | all MMAs of the tile are done     | the epilogue warps (of both CTAs of a pair) have read the columns the next MMA writes |

One descriptor of a ragged operand serves all groups: see device/gemm_tensors.py. Loads give zeros past a group's last row,
and stores are clipped there, so COMPACT and ALIGNED rows differ in the scheduler's `start` only.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Constexpr, Float8E8M0FNU, Float32, Int16, Int32, Int64, Uint8, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers

from mx_kernels.device.gemm_scheduler import WORK_WORDS, TileOrder, schedule
from mx_kernels.device.gemm_tensors import gemm_tensors
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.sm100.config import TMEM_COLUMNS, GemmKey
from mx_kernels.sm100.epilogue import EpilogueRole
from mx_kernels.sm100.layouts import EPILOGUE_WARPS, WARP_ROWS
from mx_kernels.sm100.load import Load, LoadRole
from mx_kernels.sm100.mma import MmaRole

MMA_WARP, LOAD_WARP, SCHEDULER_WARP = 4, 5, 6
WARPS = 7
TMEM_BARRIER = 1  # named barrier of the warps that use tensor memory


class CtaCoord(NamedTuple):
    """Where this CTA stands in its cluster, and with whom it shares loads."""

    v: Int32  # which CTA of the pair
    m: Int32  # MMA tile of the cluster, along M and N
    n: Int32
    x: Int32  # CTA of the cluster along M (2m + v for pairs)
    is_leader: Boolean  # issues the MMAs of its pair
    a_mask: Int16 | None  # CTAs that receive this one's multicast of A, B and B's scales; None: no multicast
    b_mask: Int16 | None
    sfb_mask: Int16 | None


class GroupedGemm(LoadRole, MmaRole, EpilogueRole):
    """The kernel of one GemmKey; `build` gives what compiles it, `__call__` says what the compiled function takes."""

    def __init__(self, key: GemmKey):
        super().__init__(key)
        self.order = TileOrder(
            *key.tile.cluster_tile,
            tile_k=key.tile_k,
            groups_along_k=key.groups_along_k,
            aligned=key.aligned,
            has_tail=key.has_tail,
            skip_empty=key.accumulate,
            supergroup=key.tile.supergroup,
        )

    def build(self):
        """Function and arguments for `jit.compiled`."""
        scale = fake_pointer(Uint8, 16) if self.key.scaled else None
        offs = fake_pointer(Int32) if self.key.grouped else None
        a, b, out = (fake_pointer(dtype, 16) for dtype in (self.a_type, self.b_type, self.out_type))
        return self, a, scale, b, scale, offs, out, *[Int32(1)] * 5, fake_stream()

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        sfa: cute.Pointer | None,
        b: cute.Pointer,
        sfb: cute.Pointer | None,
        offs: cute.Pointer | None,
        d: cute.Pointer,
        rows: Int32,
        n: Int32,
        k: Int32,
        groups: Int32,
        clusters: Int32,
        stream,
    ):
        """Launch on `clusters` clusters of CTAs (no more than fit on the device at a time).

        `rows`, `n` and `k` are the extents as the operator's table names them: the weights are (groups, n, k) in
        every mode. Scales are blocked, or None for bf16; offs is None for the dense case.
        """
        extent, (mA, mB, mD) = gemm_tensors(self.key.mode, a, b, d, rows, n, k, groups)
        mma = self.make_mma()
        vmnk = self.cluster_layout(mma)
        op_a = blackwell_helpers.cluster_shape_to_tma_atom_A(self.cluster_shape, mma.thr_id)
        op_b = blackwell_helpers.cluster_shape_to_tma_atom_B(self.cluster_shape, mma.thr_id)
        sa, sb = (cute.slice_(layout, (None, None, None, 0)) for layout in self.operand_layouts(mma))
        load_a = Load(*cute.nvgpu.make_tiled_tma_atom_A(op_a, mA, sa, self.mma_tile, mma, vmnk.shape))
        load_b = Load(*cute.nvgpu.make_tiled_tma_atom_B(op_b, mB, sb, self.mma_tile, mma, vmnk.shape))
        load_sfa, load_sfb = None, None
        if cutlass.const_expr(self.key.scaled):
            row_tiles, column_tiles = cute.ceil_div(extent.m, 128), cute.ceil_div(extent.k, 128)
            if cutlass.const_expr(self.key.has_tail):
                row_tiles = (rows + 127 * groups) // 128  # scales are ALIGNED, whatever the data's rows are
            load_sfa = self.scale_load(sfa, row_tiles, column_tiles, 1, 1, self.key.tile.cluster_n)
            row_tiles = cute.ceil_div(extent.n, 128)
            load_sfb = self.scale_load(
                sfb, row_tiles, column_tiles, groups, self.key.memory.sfb_tiles, self.key.tile.cluster_m
            )
        op = cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(self.key.accumulate):
            op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        store_d, mD = cpasync.make_tiled_tma_atom(
            op, mD, cute.slice_(self.store_layout(), (None, None, 0)), (WARP_ROWS, self.key.store_n)
        )
        gOffs = None
        if cutlass.const_expr(offs is not None):
            gOffs = cute.make_tensor(offs, cute.make_layout(groups))
        self.kernel(mma, (load_a, load_b, load_sfa, load_sfb), store_d, mD, gOffs, extent).launch(
            grid=(self.key.tile.cluster_m, self.key.tile.cluster_n, clusters),
            block=(32 * WARPS, 1, 1),
            cluster=self.cluster_shape,
            stream=stream,
            min_blocks_per_mp=1,
        )

    # ---------------------------------------------------------------- host side: tensors, layouts, descriptors

    @cute.jit
    def scale_load(
        self, data, row_tiles, column_tiles, groups, box_rows: Constexpr[int], sharers: Constexpr[int]
    ):
        """TMA of whole 512-byte scale tiles: (128 words, row tiles, column tiles, groups)."""
        words = cute.recast_ptr(data, dtype=Uint32)
        column_stride, row_stride = 128, 128 * Int64(column_tiles)
        layout = cute.make_layout(
            (128, row_tiles, column_tiles, groups),
            stride=(1, row_stride, column_stride, row_stride * row_tiles),
        )
        op = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        if cutlass.const_expr(sharers > 1):
            op = cpasync.CopyBulkTensorTileG2SMulticastOp(self.cta_group)
        box = (128, box_rows, 1)
        atom, tensor = cpasync.make_tiled_tma_atom(
            op, cute.make_tensor(words, layout), cute.make_layout(box), box, sharers
        )
        return Load(atom, tensor)

    # ---------------------------------------------------------------- device side

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, loads, store_d, mD, gOffs, extent):
        """Set up memory, barriers and pipelines, then give every warp its role."""
        warp = arch.make_warp_uniform(arch.warp_idx())
        vmnk = self.cluster_layout(mma)
        cta = self.cta_coord(vmnk)
        smem = SmemAllocator()
        sWork = smem.allocate_tensor(Int32, cute.make_layout((WORK_WORDS, self.order.stages)), 16)
        sA, sB, sD = self.allocate_operands(smem, mma)
        sSFA, sSFB, sSFA_mma, sSFB_mma = self.allocate_scales(smem, mma)
        ab_pipe, acc_pipe, work_pipe = self.make_pipelines(vmnk)
        tmem_users = pipeline.NamedBarrier(TMEM_BARRIER, 32 * (EPILOGUE_WARPS + 1))
        tmem = TmemAllocator(
            barrier_for_retrieve=tmem_users, allocator_warp_id=MMA_WARP, is_two_cta=self.key.tile.pair == 2
        )
        # By the MMA warp, before the cluster meets: the leader's first MMA writes the peer's tensor memory too.
        tmem.allocate(TMEM_COLUMNS)
        shape = cute.make_layout(self.cluster_shape)
        pipeline.pipeline_init_arrive(shape)
        pipeline.pipeline_init_wait(shape)

        if warp == LOAD_WARP:
            for load in loads:
                if cutlass.const_expr(load is not None):
                    cpasync.prefetch_descriptor(load.atom)
            cpasync.prefetch_descriptor(store_d)
        if warp == SCHEDULER_WARP:
            _, _, cluster = arch.block_idx()
            _, _, clusters = arch.grid_dim()
            schedule(self.order, work_pipe, sWork, gOffs, extent, cluster, clusters)
        if warp == LOAD_WARP:
            stages = (sA, sB, sSFA, sSFB)
            self.load(ab_pipe, work_pipe, sWork, stages, mma, loads, cta)
        if warp == MMA_WARP:
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            stages = (sA, sB, sSFA_mma, sSFB_mma)
            self.multiply(ab_pipe, acc_pipe, work_pipe, sWork, stages, mma, base, cta)
            tmem.relinquish_alloc_permit()
            tmem_users.arrive_and_wait()  # the epilogue warps have read their last columns
            tmem.free(base)
        if warp < EPILOGUE_WARPS:
            tmem.wait_for_alloc()
            base = tmem.retrieve_ptr(Float32)
            self.store(acc_pipe, work_pipe, sWork, sD, base, store_d, mD, extent, cta)
            tmem_users.arrive_and_wait()

    @cute.jit
    def cta_coord(self, vmnk: cute.Layout) -> CtaCoord:
        """Coordinates and multicast masks of this CTA."""
        rank = arch.make_warp_uniform(arch.block_idx_in_cluster())
        coord = vmnk.get_flat_coord(rank)
        x = rank % self.key.tile.cluster_m
        a_mask, b_mask, sfb_mask = None, None, None
        if cutlass.const_expr(self.key.tile.cluster_n > 1):
            a_mask = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=2)
        if cutlass.const_expr(self.key.tile.cluster_m > self.key.tile.pair):
            b_mask = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=1)
        if cutlass.const_expr(self.key.tile.cluster_m > 1):
            # every CTA of a cluster column needs all scales of B, both CTAs of a pair included
            sfb_mask = (Int32((1 << self.key.tile.cluster_m) - 1) << (rank - x)).to(Int16)
        return CtaCoord(coord[0], coord[1], coord[2], x, coord[0] == 0, a_mask, b_mask, sfb_mask)

    @cute.jit
    def allocate_operands(self, smem, mma):
        """Shared memory of A, B (stages last) and the epilogue's buffers."""
        layout_a, layout_b = self.operand_layouts(mma)
        layout_d = self.store_layout()
        return (
            smem.allocate_tensor(self.a_type, layout_a.outer, 1024, swizzle=layout_a.inner),
            smem.allocate_tensor(self.b_type, layout_b.outer, 1024, swizzle=layout_b.inner),
            smem.allocate_tensor(self.out_type, layout_d.outer, 1024, swizzle=layout_d.inner),
        )

    @cute.jit
    def allocate_scales(self, smem, mma):
        """Shared memory of the scales, as 512-byte tiles for TMA and as MMA operands: (sSFA, sSFB, sSFA_mma, sSFB_mma)."""
        sfa, sfb, sfa_mma, sfb_mma = None, None, None, None
        if cutlass.const_expr(self.key.scaled):
            layout_a, layout_b = self.scale_layouts(mma)
            sfa_mma = smem.allocate_tensor(Float8E8M0FNU, layout_a, 1024)
            sfb_mma = smem.allocate_tensor(Float8E8M0FNU, layout_b, 1024)
            stages, tiles = self.key.memory.stages, self.key.memory.sfb_tiles
            sfa = cute.make_tensor(
                cute.recast_ptr(sfa_mma.iterator, dtype=Uint32), cute.make_layout((128, 1, 1, stages))
            )
            sfb = cute.make_tensor(
                cute.recast_ptr(sfb_mma.iterator, dtype=Uint32), cute.make_layout((128, tiles, 1, stages))
            )
        return sfa, sfb, sfa_mma, sfb_mma

    @cute.jit
    def make_pipelines(self, vmnk: cute.Layout):
        """The pipelines ab, acc and work of the module's docstring. Groups count arrivals."""
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        tile, memory = self.key.tile, self.key.memory
        # one commit of every MMA whose operands this CTA shares
        sharers = tile.cluster_n + tile.tiles_m - 1
        ab = pipeline.PipelineTmaUmma.create(
            num_stages=memory.stages,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharers),
            tx_count=memory.stage_bytes * tile.pair,
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        acc = pipeline.PipelineUmmaAsync.create(
            num_stages=memory.acc_stages,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * tile.pair),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        work = pipeline.PipelineAsync.create(
            num_stages=self.order.stages,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS + 2),
            defer_sync=True,
        )
        return ab, acc, work
