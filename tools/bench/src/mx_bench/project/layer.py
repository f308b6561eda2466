"""The steps of a MoE layer as work: bytes moved and products computed, for BF16 and MXFP8 (docs/kernels.md, data flow)."""

from dataclasses import dataclass
from typing import Literal

from mx_bench.shapes import MoEShape

Precision = Literal["bf16", "mxfp8"]
BF16_BYTES = 2.0
MX_BYTES = 1.0 + 1.0 / 32.0  # an 8-bit code and its share of a scale byte
BYTES = {"bf16": BF16_BYTES, "mxfp8": MX_BYTES}


@dataclass(frozen=True)
class GroupedGemm:
    """`groups` products (m, k) x (k, n), the same size each; m is the average group in fprop and dgrad, k in wgrad."""

    groups: int
    m: float
    n: float
    k: float
    out_bytes: float = BF16_BYTES

    @property
    def flop(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k


@dataclass(frozen=True)
class Step:
    """One kernel: a memory-bound pass of `bytes`, or a grouped GEMM."""

    name: str
    backward: bool
    kernel: str
    """Which measured efficiency applies: a key of `model.EFFICIENCY` for memory-bound steps, "gemm" otherwise."""
    bytes: float = 0.0
    gemm: GroupedGemm | None = None


def moe_steps(shape: MoEShape, precision: Precision) -> list[Step]:
    """Forward and backward steps of one MoE layer, every tensor read once and written once.

    Gathered rows of x and dout count once each (T rows, not T·k): the kernels are laid out so that L2 serves the rest.
    """
    t, d, h, e, k = shape.tokens, shape.width, shape.expert_width, shape.experts, shape.top_k
    p = float(shape.rows)
    m = shape.rows_per_expert
    q = BYTES[precision]
    quantised = precision == "mxfp8"
    both = 2 * MX_BYTES

    def pass_(name: str, backward: bool, kernel: str, read: float, write: float) -> Step:
        return Step(name, backward, kernel, bytes=read + write)

    def gemm(name: str, backward: bool, m: float, n: float, k: float) -> Step:
        return Step(name, backward, "gemm", gemm=GroupedGemm(e, m, n, k))

    forward = [
        pass_("F0 route", False, "route", 4.0 * t * k, 8.0 * p),
        pass_("F1 gather x", False, "gather", BF16_BYTES * t * d, q * p * d),
        gemm("F2 gate and up", False, m, 2 * h, d),
        pass_("F3 SwiGLU", False, "swiglu", BF16_BYTES * p * 2 * h, q * p * h),
        gemm("F4 down", False, m, d, h),
        pass_("F5 combine", False, "combine", BF16_BYTES * p * d, BF16_BYTES * t * d),
    ]
    backward = [
        pass_(
            "B1 gather dout", True, "gather", BF16_BYTES * t * d, (both if quantised else BF16_BYTES) * p * d
        ),
        gemm("B2 dgrad down", True, m, h, d),
        pass_(
            "B3 SwiGLU backward",
            True,
            "dswiglu",
            BF16_BYTES * p * 3 * h,
            (both * 2 + MX_BYTES) * p * h if quantised else BF16_BYTES * p * 3 * h,
        ),
        gemm("B4 wgrad down", True, d, h, m),
        gemm("B5 dgrad gate and up", True, m, d, 2 * h),
        pass_("B6 gather x", True, "gather", BF16_BYTES * t * d, q * p * d),
        gemm("B6 wgrad gate and up", True, 2 * h, d, m),
        pass_("B7 combine", True, "combine", BF16_BYTES * p * d, BF16_BYTES * t * d),
    ]
    weights = []
    if quantised:
        parameters = 3.0 * e * d * h
        weights = [pass_("W quantise weights", False, "quantize", BF16_BYTES * parameters, both * parameters)]
    return weights + forward + backward
