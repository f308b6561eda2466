"""The Hopper grouped GEMM: D (m, n) = A (m, k) · B (n, k)ᵀ for every group, in BF16 with FP32 sums.

One kernel class for all: the group mode says along which axis groups run and which operands are K-major, the formats say
whether a dequantising warpgroup stands between the copies and the multiplication.

| mode | A (m, k) | B (n, k) | groups are ranges of |
|---|---|---|---|
| fprop | x (rows, K) | w[e] (N, K) | rows = m |
| dgrad | dy (rows, N) | w[e]ᵀ (K, N) | rows = m |
| wgrad | dyᵀ (N, rows) | xᵀ (K, rows) | rows = k |

Warps: one that loads (gemm_load.py) and one that schedules (device/gemm_scheduler.py) in the first warpgroup, then the
consumers (gemm_mma.py), which also store (gemm_epilogue.py).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind
from cutlass.memory import SmemAllocator

from mx_kernels.device.gemm_scheduler import SCHEDULE_STAGES, Extent, TileOrder, Work, schedule
from mx_kernels.sm90.config import CONSUMERS, STORE_ROWS, STORE_STAGES, TILE_K, GemmKey
from mx_kernels.sm90.gemm_epilogue import EpilogueRole
from mx_kernels.sm90.gemm_load import LoadRole, Loads
from mx_kernels.sm90.gemm_mma import MmaRole

OUT_TYPES = {"bf16": BFloat16, "fp32": Float32}
RAGGED = 1 << 30  # extent of the mode that moves a ragged view: more rows than any tensor has
WARPGROUP = 128


class Cta(NamedTuple):
    """Where a CTA stands in its cluster, and who receives its multicasts."""

    m: Int32
    n: Int32
    a_mask: Int32
    b_mask: Int32


class Registers(NamedTuple):
    """Per thread of each role, in multiples of 8; together what 64 Ki registers allow."""

    producer: int
    consumer: int


class GroupedGemm(LoadRole, MmaRole, EpilogueRole):
    """Kernel of one GemmKey. Compile an instance with `cute.compile`; every size is dynamic."""

    def __init__(self, key: GemmKey):
        self.key = key
        self.out_type = OUT_TYPES[key.out_dtype]
        self.threads = (1 + CONSUMERS) * WARPGROUP
        self.registers = Registers(producer=40, consumer=232)
        self.order = TileOrder(
            *key.tile.cluster_tile,
            tile_k=TILE_K,
            groups_along_k=key.groups_along_k,
            aligned=key.grouped and key.aligned,
            has_tail=key.has_tail,
            supergroup=key.tile.supergroup,
        )

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, offs, out: cute.Tensor, clusters: Int32, stream):
        """Launch `clusters` persistent clusters.

        Args:
            a: (rows, K or N), contiguous rows.
            b: (E, N, K) weights; wgrad: (rows, K).
            offs: int32 (E,), or None for one group of all rows.
            out: (rows, N or K); wgrad: (E, N, K).
            clusters: persistent clusters to launch.
            stream: where.
        """
        tile = self.key.tile
        extent = self.extent(a, b, out)
        a_layout = self.operand_layout(tile.tile_m, self.key.a_k_major, self.key.stages)
        b_layout = self.operand_layout(tile.tile_n, self.key.b_k_major, self.key.stages)
        store_layout = self.store_layout(CONSUMERS * STORE_STAGES)
        a_load = self.make_load(self.a_view(a), tile.tile_m, self.key.a_k_major, tile.cluster_n)
        b_load = self.make_load(self.b_view(b), tile.tile_n, self.key.b_k_major, tile.cluster_m)
        store, mD = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
            if self.key.accumulate
            else cpasync.CopyBulkTensorTileS2GOp(),
            self.d_view(out),
            self.store_layout(1),
            (STORE_ROWS, self.key.store_n, 1),
        )
        self.kernel(
            a_load, b_load, store, mD, offs, extent, a_layout, b_layout, store_layout, self.tiled_mma()
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
        store: cute.CopyAtom,
        mD: cute.Tensor,
        offs,
        extent: Extent,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        store_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
    ):
        """One CTA: shared memory and barriers, then each warp takes its role."""
        tile = self.key.tile
        warp = arch.make_warp_uniform(arch.warp_idx())
        cta_x, cta_y, cluster = arch.block_idx()
        _, _, clusters = arch.grid_dim()
        cta = self.cta_in_cluster(cta_x, cta_y)
        if warp == 0:
            cpasync.prefetch_descriptor(a_load.atom)
            cpasync.prefetch_descriptor(b_load.atom)
            cpasync.prefetch_descriptor(store)

        memory = SmemAllocator()
        sA = memory.allocate_tensor(BFloat16, a_layout.outer, 1024, swizzle=a_layout.inner)
        sB = memory.allocate_tensor(BFloat16, b_layout.outer, 1024, swizzle=b_layout.inner)
        sD = memory.allocate_tensor(self.out_type, store_layout.outer, 1024, swizzle=store_layout.inner)
        sWork = memory.allocate_tensor(
            Int32, cute.make_layout((len(Work._fields), SCHEDULE_STAGES), stride=(1, len(Work._fields))), 16
        )
        cta_layout = cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1))
        ab_pipe = pipeline.PipelineTmaAsync.create(
            num_stages=self.key.stages,
            producer_group=self.agents(1),
            consumer_group=self.agents(CONSUMERS * WARPGROUP),
            tx_count=self.key.stage_bytes,
            cta_layout_vmnk=cta_layout,
            enable_multicast_signaling=True,
            defer_sync=True,
        )
        work_pipe = pipeline.PipelineAsync.create(
            num_stages=SCHEDULE_STAGES,
            producer_group=self.agents(1),
            consumer_group=self.agents(1 + CONSUMERS * 4),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(tile.cluster_m, tile.cluster_n), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(tile.cluster_m, tile.cluster_n))

        if warp < 4:
            arch.setmaxregister_decrease(self.registers.producer)
            if warp == 0:
                self.load(ab_pipe, work_pipe, sWork, sA, sB, a_load, b_load, extent, cta)
            if warp == 1:
                schedule(self.order, work_pipe, sWork, offs, extent, cluster, clusters)
        else:
            arch.setmaxregister_increase(self.registers.consumer)
            self.consume(ab_pipe, work_pipe, sWork, sA, sB, sD, mma, store, mD, extent, cta)

    @cute.jit
    def extent(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor) -> Extent:
        """The sizes of one call."""
        rows = a.shape[0]
        if cutlass.const_expr(self.key.mode == "wgrad"):
            return Extent(rows, a.shape[1], b.shape[1], rows, out.shape[0])
        if cutlass.const_expr(self.key.mode == "dgrad"):
            return Extent(rows, rows, b.shape[2], b.shape[1], b.shape[0])
        return Extent(rows, rows, b.shape[1], b.shape[2], b.shape[0])

    @cute.jit
    def ragged_rows(self, x: cute.Tensor) -> cute.Tensor:
        """x (rows, C) as (rows, C, RAGGED), so that one descriptor clips at the end of any range of rows.

        Entry (rows - length + r, c, start + length) is row start + r: reads past the range's `length` rows fall past
        the first mode and give zeros, and writes there are dropped.
        """
        stride = Int64(x.stride[0])
        origin = x.iterator - Int64(x.shape[0]) * stride
        return cute.make_tensor(
            origin.align(16), cute.make_layout((x.shape[0], x.shape[1], RAGGED), stride=(stride, 1, stride))
        )

    @cute.jit
    def a_view(self, a: cute.Tensor) -> cute.Tensor:
        """A as (m, k, l), ragged along the rows."""
        if cutlass.const_expr(self.key.groups_along_k):
            return self.transposed(self.ragged_rows(a))
        return self.ragged_rows(a)

    @cute.jit
    def b_view(self, b: cute.Tensor) -> cute.Tensor:
        """B as (n, k, l): ragged in wgrad, else l is the expert."""
        if cutlass.const_expr(self.key.groups_along_k):
            return self.transposed(self.ragged_rows(b))
        view = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        if cutlass.const_expr(self.key.mode == "dgrad"):
            return self.transposed(view)
        return view

    @cute.jit
    def d_view(self, out: cute.Tensor) -> cute.Tensor:
        """D as (m, n, l): ragged along m, or in wgrad l is the expert."""
        if cutlass.const_expr(self.key.groups_along_k):
            return cute.make_tensor(out.iterator, cute.select(out.layout, mode=[1, 2, 0]))
        return self.ragged_rows(out)

    @cute.jit
    def transposed(self, x: cute.Tensor) -> cute.Tensor:
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))

    def operand_layout(self, rows: int, k_major: bool, stages: int) -> cute.ComposedLayout:
        """(rows, TILE_K, stages) of BF16 with 128-byte swizzle, as wgmma descriptors want it."""
        kind = SmemLayoutAtomKind.K_SW128 if k_major else SmemLayoutAtomKind.MN_SW128
        order = (0, 1, 2) if k_major else (1, 0, 2)
        return cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(kind, BFloat16), (rows, TILE_K, stages), order
        )

    def store_layout(self, buffers: int) -> cute.ComposedLayout:
        """(64, store_n, buffers): slabs of the output, one swizzle row wide."""
        atom = warpgroup.make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, self.out_type)
        return cute.tile_to_shape(atom, (STORE_ROWS, self.key.store_n, buffers), (0, 1, 2))

    def make_load(self, view: cute.Tensor, rows: int, k_major: bool, sharers: int) -> Loads:
        """TMA load of one (rows, TILE_K) tile, split among the `sharers` CTAs that all receive it."""
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
        layout = self.operand_layout(rows, k_major, 1)
        atom, tensor = cpasync.make_tiled_tma_atom(op, view, layout, (rows, TILE_K, 1), num_multicast=sharers)
        return Loads(atom, tensor)

    def tiled_mma(self) -> cute.TiledMma:
        """One warpgroup's instruction: 64 rows by the whole tile_n."""
        major = {True: OperandMajorMode.K, False: OperandMajorMode.MN}
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (64, self.key.tile.tile_n, 16),
            warpgroup.OperandSource.SMEM,
            major[self.key.a_k_major],
            major[self.key.b_k_major],
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    @cute.jit
    def cta_in_cluster(self, x: Int32, y: Int32) -> Cta:
        """Coordinates and multicast masks; ranks run along m first."""
        tile = self.key.tile
        m, n = x % tile.cluster_m, y % tile.cluster_n
        a_mask = Int32(sum(1 << (tile.cluster_m * i) for i in range(tile.cluster_n))) << m
        b_mask = Int32((1 << tile.cluster_m) - 1) << (n * tile.cluster_m)
        return Cta(m, n, a_mask, b_mask)

    @staticmethod
    def agents(count: int) -> pipeline.CooperativeGroup:
        return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
