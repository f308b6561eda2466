"""Layouts that follow from a GemmKey: of the MMA, the cluster, and every buffer in shared and tensor memory.

They are static, so host and device side make them anew where they need them instead of passing them along.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Constexpr, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers, blockscaled_layout

from mx_kernels.sm100.config import STORE_STAGES, GemmKey

EPILOGUE_WARPS = 4  # warp w reaches TMEM lanes 32 (w % 4) …
WARP_ROWS = 32
SCALE_BLOCK = 32  # elements that share a scale

DTYPES = {"bf16": BFloat16, "fp32": Float32, "mxfp8_e4m3": Float8E4M3FN, "mxfp8_e5m2": Float8E5M2}


class KernelLayouts:
    """Base of the warp roles: what they all know of the kernel."""

    def __init__(self, key: GemmKey):
        self.key = key
        self.a_type, self.b_type, self.out_type = (
            DTYPES[t] for t in (key.a_format, key.b_format, key.out_dtype)
        )

    @property
    def mma_tile(self) -> tuple[int, int, int]:
        return self.key.tile.tile_m, self.key.tile.tile_n, self.key.tile_k

    @property
    def cluster_shape(self) -> tuple[int, int, int]:
        return self.key.tile.cluster_m, self.key.tile.cluster_n, 1

    @property
    def cta_group(self) -> tcgen05.CtaGroup:
        return tcgen05.CtaGroup.TWO if self.key.tile.pair == 2 else tcgen05.CtaGroup.ONE

    def make_mma(self):
        """One MMA of the tile's shape, block-scaled or plain."""
        major = {True: OperandMajorMode.K, False: OperandMajorMode.MN}
        a_major, b_major = major[self.key.a_k_major], major[self.key.b_k_major]
        shape = self.mma_tile[:2]
        if not self.key.scaled:
            make = blackwell_helpers.make_trivial_tiled_mma
            return make(self.a_type, self.b_type, a_major, b_major, Float32, self.cta_group, shape)
        make = blackwell_helpers.make_blockscaled_trivial_tiled_mma
        return make(
            self.a_type, self.b_type, a_major, b_major, Float8E8M0FNU, SCALE_BLOCK, self.cta_group, shape
        )

    def cluster_layout(self, mma) -> cute.Layout:
        """CTA rank of (CTA of the pair, MMA tile along M, along N, 1)."""
        return cute.tiled_divide(cute.make_layout(self.cluster_shape), (mma.thr_id.shape,))

    def operand_layouts(self, mma):
        """Staged shared-memory layouts of A and B."""
        stages = self.key.memory.stages
        return (
            blackwell_helpers.make_smem_layout_a(mma, self.mma_tile, self.a_type, stages),
            blackwell_helpers.make_smem_layout_b(mma, self.mma_tile, self.b_type, stages),
        )

    def scale_layouts(self, mma):
        """Staged shared-memory layouts of SFA and SFB as the MMA sees them."""
        stages = self.key.memory.stages
        return (
            blockscaled_layout.make_smem_layout_sfa(mma, self.mma_tile, SCALE_BLOCK, stages),
            blockscaled_layout.make_smem_layout_sfb(mma, self.mma_tile, SCALE_BLOCK, stages),
        )

    def store_layout(self):
        """Epilogue buffers: (32, store_n, warp and buffer)."""
        tile = (WARP_ROWS, self.key.store_n)
        stages = EPILOGUE_WARPS * STORE_STAGES
        return blackwell_helpers.make_smem_layout_epi(self.out_type, LayoutEnum.ROW_MAJOR, tile, stages)

    def scale_tmem_layouts(self, mma):
        """Layouts of SFA and SFB in tensor memory."""
        sfa, sfb = (cute.slice_(layout, (None, None, None, 0)) for layout in self.scale_layouts(mma))
        return (
            blockscaled_layout.make_tmem_layout_sfa(mma, self.mma_tile, SCALE_BLOCK, sfa),
            blockscaled_layout.make_tmem_layout_sfb(mma, self.mma_tile, SCALE_BLOCK, sfb),
        )

    @cute.jit
    def acc_slot(self, state, producer: Constexpr[bool]) -> Int32:
        """Which accumulator a pipeline state means. Overlapping accumulators share one stage and alternate by its phase."""
        if cutlass.const_expr(not self.key.memory.acc_shared):
            return state.index
        return state.phase ^ 1 if cutlass.const_expr(producer) else state.phase
