"""What every warp role of the Hopper GEMM knows."""

from typing import NamedTuple

from cutlass import Int32

from mx_kernels.device.gemm_scheduler import TileOrder
from mx_kernels.sm90.config import GemmKey


class Cta(NamedTuple):
    """Where a CTA stands in its cluster, and who receives its multicasts."""

    m: Int32
    n: Int32
    a_mask: Int32
    b_mask: Int32


class GemmRole:
    """Base of the roles; GroupedGemm sets the attributes."""

    key: GemmKey
    order: TileOrder
    out_type: type  # of D
    element: type  # of what the copy engine brings: BF16, or codes as bytes
    threads: int
