"""The work of a MoE layer's steps: bytes moved and products computed, for BF16 and MXFP8 (docs/kernels.md, data flow)."""

from dataclasses import dataclass
from typing import Literal

from mx_bench.shapes import MoEShape

Precision = Literal["bf16", "mxfp8"]
Mode = Literal["fprop", "dgrad", "wgrad"]
BF16_BYTES = 2.0
MX_BYTES = 1.0 + 1.0 / 32.0  # an 8-bit code and its share of a scale byte
BYTES = {"bf16": BF16_BYTES, "mxfp8": MX_BYTES}
ALIGN = 128  # rows: groups start at multiples of it inside the layer


@dataclass(frozen=True)
class GroupedGemm:
    """Weights (groups, n, k), `rows` rows over all groups, as the operator's three modes see them.

    `sizes` are the groups' rows where they are known; else they are taken to end anywhere in a tile.
    """

    mode: Mode
    rows: int
    groups: int
    n: int
    k: int
    sizes: tuple[int, ...] = ()
    out_bytes: float = BF16_BYTES

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.n * self.k

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n if self.mode == "fprop" else self.k

    @property
    def reduced(self) -> float:
        """What a sum runs over; the average group in wgrad."""
        return {"fprop": float(self.k), "dgrad": float(self.n), "wgrad": self.rows / self.groups}[self.mode]

    @property
    def results(self) -> int:
        """Elements of the result."""
        if self.mode == "wgrad":
            return self.groups * self.n * self.k
        return self.rows * self.columns

    @property
    def operands(self) -> int:
        """Elements of both operands."""
        return self.rows * (self.k + self.n) + self.groups * self.n * self.k - self.results

    def bytes(self, precision: Precision) -> float:
        """Operands read once, result written once."""
        return self.operands * BYTES[precision] + self.results * self.out_bytes

    def row_tiles(self, tile_m: int) -> float:
        """Tiles along the result's rows, over all groups."""
        if self.mode == "wgrad":
            return self.groups * float(-(-self.n // tile_m))
        if self.sizes:
            return float(sum(-(-size // tile_m) for size in self.sizes))
        return self.rows / tile_m + self.groups / 2


@dataclass(frozen=True)
class Step:
    """One kernel: a memory-bound pass of `bytes`, a grouped GEMM, or a fixed time."""

    name: str
    backward: bool
    kind: str
    """A key of `machines.OVERHEAD` (memory-bound) or `machines.FIXED`, or "gemm"."""
    bytes: float = 0.0
    gemm: GroupedGemm | None = None
    once_a_step: bool = False
    """Done once per optimiser step, outside the layer's own call."""


def moe_steps(shape: MoEShape, precision: Precision) -> list[Step]:
    """Forward and backward steps of one MoE layer, every tensor read once and written once.

    Gathered rows of x and dout count once each (T rows, not T·k): the kernels are laid out so that L2 serves the rest.
    Every group's last rows are padded to a multiple of 128, half of that on average.
    """
    t, d, h, e = shape.tokens, shape.width, shape.expert_width, shape.experts
    p = float(shape.rows + e * ALIGN // 2)
    quantised = precision == "mxfp8"
    gather, dswiglu = ("gather_quantize", "dswiglu_quantize") if quantised else ("indexed", "indexed")
    q = BYTES[precision]
    both = 2 * MX_BYTES if quantised else BF16_BYTES

    def moved(name: str, backward: bool, kind: str, read: float, write: float) -> Step:
        return Step(name, backward, kind, bytes=read + write)

    def gemm(name: str, backward: bool, mode: Mode, n: int, k: int) -> Step:
        return Step(name, backward, "gemm", gemm=GroupedGemm(mode, shape.rows, e, n, k))

    return [
        Step("F0 route", False, "route"),
        moved("F1 gather x", False, gather, BF16_BYTES * t * d, q * p * d),
        gemm("F2 gate and up", False, "fprop", 2 * h, d),
        moved("F3 SwiGLU", False, "stream" if quantised else "indexed", BF16_BYTES * p * 2 * h, q * p * h),
        gemm("F4 down", False, "fprop", d, h),
        moved("F5 combine", False, "stream", BF16_BYTES * p * d, BF16_BYTES * t * d),
        Step("B0 slot weights", True, "slot_weights"),
        moved("B1 gather dout", True, gather, BF16_BYTES * t * d, both * p * d),
        gemm("B2 dgrad down", True, "dgrad", d, h),
        moved("B3 SwiGLU backward", True, dswiglu, BF16_BYTES * p * 3 * h, (2 * both + q) * p * h),
        gemm("B4 wgrad down", True, "wgrad", d, h),
        gemm("B5 dgrad gate and up", True, "dgrad", 2 * h, d),
        moved("B6 gather x", True, gather, BF16_BYTES * t * d, q * p * d),
        gemm("B6 wgrad gate and up", True, "wgrad", 2 * h, d),
        moved("B7 combine", True, "stream", BF16_BYTES * p * d, BF16_BYTES * t * d),
    ]


def weight_steps(shape: MoEShape, *, in_call: bool) -> list[Step]:
    """Quantising W1 and W2: one read for both orientations once a step, or each pass its own orientation in the call."""
    weights = 3.0 * shape.experts * shape.width * shape.expert_width
    if not in_call:
        moved = (BF16_BYTES + 2 * MX_BYTES) * weights
        return [Step("W quantise weights", False, "stream", bytes=moved, once_a_step=True)]
    moved = (BF16_BYTES + MX_BYTES) * weights
    return [
        Step("W quantise weights, row", False, "stream", bytes=moved),
        Step("W quantise weights, column", True, "stream", bytes=moved),
    ]
