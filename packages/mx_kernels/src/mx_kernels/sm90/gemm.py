"""The Hopper grouped GEMM: D (m, n) = A (m, k) · B (n, k)ᵀ for every group, in BF16 with FP32 sums.

One kernel class for all: the mode says along which axis groups run and which operands are K-major, the formats say
whether a dequantising warpgroup stands between the copies and the multiplication.
Which matrices A, B and D are in each mode: device/gemm_tensors.py.

Warps: one that loads (gemm_load.py), one that schedules (device/gemm_scheduler.py) and, for MXFP8, two that look ahead at the
scales (gemm_scale_range.py) in the first warpgroup; for MXFP8 a warpgroup that dequantises B (gemm_operands.py); then the
consumers (gemm_mma.py), which also store (gemm_epilogue.py).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind
from cutlass.memory import SmemAllocator

from mx_kernels.device.gemm_scheduler import WORK_WORDS, Extent, TileOrder, schedule
from mx_kernels.device.gemm_tensors import gemm_tensors
from mx_kernels.device.gemm_tickets import Tickets, init_tickets
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.sm90.config import CONSUMERS, MMA_ROWS, SCALE_TILE, STORE_BUFFER_ROWS, TILE_K, GemmKey
from mx_kernels.sm90.gemm_load import LoadRole, Loads
from mx_kernels.sm90.gemm_mma import MmaRole
from mx_kernels.sm90.gemm_role import Cta
from mx_kernels.sm90.gemm_scale_range import OPERANDS, TOP_STAGES

OUT_TYPES = {"bf16": BFloat16, "fp32": Float32}
WARPGROUP = 128


class Registers(NamedTuple):
    """Per thread of each role, in multiples of 8; together what 64 Ki registers allow."""

    producer: int
    consumer: int
    dequantizer: int = 0


class GroupedGemm(LoadRole, MmaRole):
    """Kernel of one GemmKey. Compile an instance with `cute.compile`; every size is dynamic."""

    def __init__(self, key: GemmKey):
        assert not (key.scaled and key.groups_along_k), "operands of this wgrad are dequantised first"
        self.key = key
        self.out_type = OUT_TYPES[key.out_dtype]
        self.threads = (1 + key.scaled + CONSUMERS) * WARPGROUP
        self.registers = Registers(40, 208, 56) if key.scaled else Registers(40, 232)
        self.element = Uint8 if key.scaled else BFloat16
        self.order = TileOrder(
            *key.tile.cluster_tile,
            tile_k=TILE_K,
            groups_along_k=key.groups_along_k,
            aligned=key.aligned,
            has_tail=key.has_tail,
            skip_empty=key.accumulate,
            supergroup=key.tile.supergroup,
            cluster_size=key.tile.cluster_size,
            splits_tails=(key.tile.cluster_m, key.tile.cluster_n) == (2, 1) and not key.groups_along_k,
            stages=2,  # a third would be drawn too early to even out the clusters' ends
        )

    def build(self):
        """Function and arguments for `jit.compiled`."""
        operand = (fake_pointer(self.element, 16), fake_pointer(Uint8, 16))
        sizes = [Int32(1)] * 5
        return (
            self,
            *operand,
            *operand,
            fake_pointer(Int32),
            fake_pointer(self.out_type, 16),
            fake_pointer(Int32),
            *sizes,
            fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        a_scale: cute.Pointer,
        b: cute.Pointer,
        b_scale: cute.Pointer,
        offs: cute.Pointer,
        d: cute.Pointer,
        counter: cute.Pointer,
        rows: Int32,
        n: Int32,
        k: Int32,
        groups: Int32,
        clusters: Int32,
        stream,
    ):
        """Launch `clusters` persistent clusters, no more than fit on the device at a time.

        Operands are contiguous, codes are bytes; the weights are (groups, n, k) in every mode. Scales are blocked;
        BF16 leaves them unread. offs: int32 (groups,); without groups (one group of all rows) unread. counter: int32 (1,),
        zero, and zero again after the launch; no other launch may use it at the same time.
        """
        key = self.key
        tile = key.tile
        extent, (mA, mB, mD) = gemm_tensors(key.mode, a, b, d, rows, n, k, groups)
        a_load = self.make_load(mA, tile.tile_m, key.a_k_major, self.a_slices)
        b_load = self.make_load(mB, tile.tile_n, key.b_k_major, self.b_slices)
        store, mD = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
            if key.accumulate
            else cpasync.CopyBulkTensorTileS2GOp(),
            mD,
            self.store_layout(MMA_ROWS, 3),
            (MMA_ROWS, key.store_n, 1),
        )
        a_tiles, b_tiles, dequantized, gOffs = None, None, None, None
        if cutlass.const_expr(key.scaled):
            a_row_tiles = cute.ceil_div(extent.m, 128)
            if cutlass.const_expr(key.has_tail):
                a_row_tiles = (rows + 127 * groups) // 128  # scales are ALIGNED, whatever the data's rows are
            a_tiles = self.scale_tiles(a_scale, a_row_tiles, extent.k, 1)
            b_tiles = self.scale_tiles(b_scale, cute.ceil_div(extent.n, 128), extent.k, groups)
            dequantized = self.operand_layout(BFloat16, tile.tile_n, key.b_k_major, key.b_stages)
        if cutlass.const_expr(key.grouped):
            gOffs = cute.make_tensor(offs, cute.make_layout(groups))
        self.kernel(
            a_load,
            b_load,
            a_tiles,
            b_tiles,
            store,
            mD,
            gOffs,
            cute.make_tensor(counter, cute.make_layout(1)),
            extent,
            self.operand_layout(self.element, tile.tile_m, key.a_k_major, key.stages),
            self.operand_layout(self.element, tile.tile_n, key.b_k_major, key.stages),
            dequantized,
            self.store_layout(CONSUMERS * STORE_BUFFER_ROWS, 2),
            self.tiled_mma(Float16, tile.tile_n),
            self.tiled_mma(BFloat16, tile.tile_n),
        ).launch(
            grid=(tile.cluster_m, tile.cluster_n, clusters),
            block=(self.threads, 1, 1),
            cluster=(tile.cluster_m, tile.cluster_n, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        a_load: Loads,
        b_load: Loads,
        a_tiles,
        b_tiles,
        store: cute.CopyAtom,
        mD: cute.Tensor,
        offs,
        counter: cute.Tensor,
        extent: Extent,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        dequantized_layout,
        store_layout: cute.ComposedLayout,
        half_mma: cute.TiledMma,
        mma: cute.TiledMma,
    ):
        """One CTA: shared memory and barriers, then each warp takes its role."""
        key = self.key
        cluster_shape = (key.tile.cluster_m, key.tile.cluster_n)
        warp = arch.make_warp_uniform(arch.warp_idx())
        cta_x, cta_y, cluster = arch.block_idx()
        _, _, clusters = arch.grid_dim()
        cta = self.cta_in_cluster(cta_x, cta_y)
        if warp == 0:
            cpasync.prefetch_descriptor(a_load.atom)
            cpasync.prefetch_descriptor(b_load.atom)
            cpasync.prefetch_descriptor(store)

        memory = SmemAllocator()
        sA = memory.allocate_tensor(self.element, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = memory.allocate_tensor(self.element, b_layout.outer, 1024, swizzle=b_layout.inner)
        sD = memory.allocate_tensor(self.out_type, store_layout.outer, 1024, swizzle=store_layout.inner)
        sSFA, sSFB, sDequantized, sHalf = None, None, None, None
        if cutlass.const_expr(key.scaled):
            sDequantized = memory.allocate_tensor(
                BFloat16, dequantized_layout.outer, 1024, swizzle=dequantized_layout.inner
            )
            sHalf = cute.make_tensor(  # the same memory
                cute.recast_ptr(sDequantized.iterator, dequantized_layout.inner, Float16),
                dequantized_layout.outer,
            )
            sSFA = memory.allocate_tensor(
                Uint8, cute.make_layout((SCALE_TILE, key.sfa_tiles, key.stages)), 128
            )
            sSFB = memory.allocate_tensor(
                Uint8, cute.make_layout((SCALE_TILE, key.sfb_tiles, key.stages)), 128
            )
        sWork = memory.allocate_tensor(Int32, cute.make_layout((WORK_WORDS, self.order.stages)), 16)
        ticket_barriers = memory.allocate_tensor(Int64, cute.make_layout(2), 8).iterator
        tickets = Tickets(
            cta.rank,
            counter,
            memory.allocate_tensor(Int32, cute.make_layout(1), 4),
            ticket_barriers,
            ticket_barriers + 1,
        )
        if arch.thread_idx()[0] == 0:
            init_tickets(tickets, key.tile.cluster_size)
        readers = (CONSUMERS + key.scaled) * WARPGROUP
        ab_pipe = pipeline.PipelineTmaAsync.create(
            num_stages=key.stages,
            producer_group=self.agents(1),
            consumer_group=self.agents(readers),
            tx_count=key.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cluster_shape, 1)),
            enable_multicast_signaling=True,
            defer_sync=True,
        )
        work_pipe = pipeline.PipelineAsync.create(
            num_stages=self.order.stages,
            producer_group=self.agents(1),
            consumer_group=self.agents(1 + readers // 32 + key.scaled * len(OPERANDS)),
            defer_sync=True,
        )
        work = (work_pipe, sWork)
        b_pipe, tops = None, None
        if cutlass.const_expr(key.scaled):
            b_pipe = pipeline.PipelineAsync.create(
                num_stages=key.b_stages,
                producer_group=self.agents(4),
                consumer_group=self.agents(CONSUMERS * 4),
                defer_sync=True,
            )
            top_pipe = pipeline.PipelineAsync.create(
                num_stages=TOP_STAGES,
                producer_group=self.agents(len(OPERANDS)),
                consumer_group=self.agents(readers // 32),
                defer_sync=True,
            )
            tops = (
                top_pipe,
                memory.allocate_tensor(Int32, cute.make_layout((len(OPERANDS), TOP_STAGES)), 16),
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)

        if warp < 4:
            arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                smem = (sA, sB, sSFA, sSFB)
                self.load(ab_pipe, work_pipe, sWork, smem, a_load, b_load, a_tiles, b_tiles, cta)
            if warp == 1:
                schedule(self.order, work_pipe, sWork, offs, extent, cluster, clusters, tickets)
            if cutlass.const_expr(key.scaled):
                if warp == 2:
                    self.find_tops("a", work, tops, a_tiles, extent, cta)
                if warp == 3:
                    self.find_tops("b", work, tops, b_tiles, extent, cta)
        elif warp >= self.threads // 32 - CONSUMERS * 4:
            arch.setmaxregister_increase(self.registers.consumer)
            if cutlass.const_expr(key.scaled):
                smem = (sA, sSFA, sD)
                self.consume_scaled(
                    ab_pipe, b_pipe, work, tops, smem, (half_mma, sHalf), (mma, sDequantized), store, mD, cta
                )
            else:
                self.consume(ab_pipe, work_pipe, sWork, sA, sB, sD, mma, store, mD, cta)
        else:
            if cutlass.const_expr(key.scaled):
                arch.setmaxregister_decrease(self.registers.dequantizer)
                self.dequantize(ab_pipe, b_pipe, work, tops, sB, sSFB, sDequantized)

    @cute.jit
    def scale_tiles(self, scale: cute.Pointer, row_tiles: Int32, k: Int32, groups: Int32) -> cute.Tensor:
        """Blocked scales as (512 bytes of a tile, R tiles, C tiles, groups)."""
        column_tiles = cute.ceil_div(k, 128)
        row_stride = Int64(column_tiles) * SCALE_TILE
        stride = (1, row_stride, SCALE_TILE, row_stride * row_tiles)
        return cute.make_tensor(
            scale, cute.make_layout((SCALE_TILE, row_tiles, column_tiles, groups), stride=stride)
        )

    def operand_layout(self, element, rows: int, k_major: bool, stages: int) -> cute.ComposedLayout:
        """(rows, TILE_K, stages), swizzled over the whole of a row (K-major) or of 128 bytes of a K position."""
        if k_major:
            kind = SmemLayoutAtomKind.K_SW64 if element.width == 8 else SmemLayoutAtomKind.K_SW128
        else:
            kind = SmemLayoutAtomKind.MN_SW128
        atom = warpgroup.make_smem_layout_atom(kind, element)
        return cute.tile_to_shape(atom, (rows, TILE_K, stages), (0, 1, 2) if k_major else (1, 0, 2))

    def store_layout(self, rows: int, rank: int) -> cute.ComposedLayout:
        """(rows, store_n) of the output, one swizzle row wide; rank 3: with a mode of one for the copy engine."""
        atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.out_type)
        return cute.tile_to_shape(atom, (rows, self.key.store_n, 1)[:rank], (0, 1, 2)[:rank])

    def make_load(self, view: cute.Tensor, rows: int, k_major: bool, slices: int) -> Loads:
        """TMA load of one (rows, TILE_K) tile in as many slices as there are CTAs that can share it."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if slices > 1 else cpasync.CopyBulkTensorTileG2SOp()
        layout = self.operand_layout(self.element, rows, k_major, 1)
        atom, tensor = cpasync.make_tiled_tma_atom(op, view, layout, (rows, TILE_K, 1), num_multicast=slices)
        return Loads(atom, tensor)

    @cute.jit
    def cta_in_cluster(self, x: Int32, y: Int32) -> Cta:
        """Coordinates and multicast masks; ranks run along m first."""
        tile = self.key.tile
        m, n = x % tile.cluster_m, y % tile.cluster_n
        a_mask = Int32(sum(1 << (tile.cluster_m * i) for i in range(tile.cluster_n))) << m
        b_mask = Int32((1 << tile.cluster_m) - 1) << (n * tile.cluster_m)
        return Cta(m, n, m + tile.cluster_m * n, a_mask, b_mask)

    @staticmethod
    def agents(count: int) -> pipeline.CooperativeGroup:
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
