"""The time model: a GEMM takes the largest of its terms plus an exposed bubble, a pass its bytes plus an overhead.

A tile's terms on its SM are the matrix product, operand reads from shared memory, dequantisation (Hopper) and the epilogue;
the chip's are L2, power and HBM. The bubble between two tiles and copies of scales add to all of them but HBM: memory is kept
busy by the other SMs meanwhile.
"""

import math
from dataclasses import dataclass

from mx_kernels.sm90 import config as sm90
from mx_kernels.sm100 import config as sm100

from mx_bench.project.layer import BYTES, GroupedGemm, Precision, Step, moe_steps, weight_steps
from mx_bench.project.machines import FIXED, H200, OVERHEAD, Machine
from mx_bench.shapes import MoEShape

DEQUANTIZE_K = 64  # of K, what the dequantisation clocks count
SCALE_K = 128  # of K, what one 128 x 4 tile of scales covers
OUTPUTS = 128 * 256  # of a tile, what the bubble's and the epilogue's clocks count


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides one GEMM: `waves` rounds in which every SM computes tile_m x tile_n outputs of its own."""

    waves: int
    tile_m: int
    tile_n: int
    scale_tiles: int
    """Tiles of 128 rows of scales that go with one K tile of 128."""
    operand_rows: float
    """Rows of A and B together that one SM's tensor core reads for its outputs."""
    loaded_rows: float
    """Rows of A and B together that cross L2 for the whole GEMM."""


def tiling(gemm: GroupedGemm, machine: Machine, precision: Precision) -> Tiling:
    """The tile that this project's backend would choose, and how often."""
    if machine.backend == "sm90":
        tile = sm90.choose_tile(gemm.mode, precision == "mxfp8", gemm.rows, gemm.groups, gemm.columns)
        pair = 1
    else:
        other = gemm.k if gemm.mode == "fprop" else gemm.n
        a_format = "mxfp8_e4m3" if precision == "mxfp8" else "bf16"
        tile = sm100.choose_tile(
            gemm.mode, a_format, gemm.rows, gemm.groups, gemm.columns, other, machine.sms
        )
        pair = tile.pair
    cluster_m, cluster_n = tile.cluster_tile
    column_tiles = -(-gemm.columns // cluster_n)
    clusters = gemm.row_tiles(cluster_m) * column_tiles
    result_rows = gemm.groups * gemm.n if gemm.mode == "wgrad" else gemm.rows
    return Tiling(
        waves=math.ceil(clusters / (machine.sms // tile.cluster_size)),
        tile_m=tile.tile_m // pair,
        tile_n=tile.tile_n,
        scale_tiles=1 + -(-tile.tile_n // 128),
        operand_rows=tile.tile_m / pair + tile.tile_n / pair,
        loaded_rows=result_rows * column_tiles + clusters * cluster_n,
    )


def dequantized_first(gemm: GroupedGemm, machine: Machine, precision: Precision) -> bool:
    """Whether the backend makes BF16 tensors of MXFP8 operands and multiplies those."""
    if precision == "bf16" or machine.backend != "sm90":
        return False
    return sm90.dequantize_first(gemm.mode, gemm.rows, gemm.groups, gemm.n, gemm.k)


def gemm_terms(gemm: GroupedGemm, machine: Machine, precision: Precision) -> dict[str, float]:
    """Seconds of each term if it alone bounded the grouped GEMM.

    "bubble" and "scales" add to those on the chip; "dequantise first", a kernel in front of the product, to all.
    """
    if dequantized_first(gemm, machine, precision):
        moved = gemm.operands * (BYTES["mxfp8"] + BYTES["bf16"])
        first = pass_seconds("dequantize", moved, machine)[0]
        return {**gemm_terms(gemm, machine, "bf16"), "dequantise first": first}
    mx = precision == "mxfp8"
    rate = machine.flop_per_clock_mx if mx else machine.flop_per_clock_bf16
    t, k, element = tiling(gemm, machine, precision), gemm.reduced, BYTES[precision]
    outputs = t.tile_m * t.tile_n

    def of_tiles(clocks: float) -> float:
        """Seconds from the clocks of one tile."""
        return t.waves * clocks / machine.clock_hz

    b = (
        machine.dequantize_b_clocks if gemm.mode == "fprop" else machine.dequantize_b_transposed_clocks
    ) / 128
    dequantize = machine.dequantize_a_clocks / 128 * t.tile_m + b * t.tile_n
    return {
        "matrix": of_tiles(2.0 * outputs * k / rate),
        "SMEM": of_tiles(t.operand_rows * k * element / machine.smem_bytes_per_clock),
        "dequantise": of_tiles(math.ceil(k / DEQUANTIZE_K) * dequantize) if mx else 0.0,
        "epilogue": of_tiles(machine.epilogue_clocks * outputs / OUTPUTS),
        "L2": t.loaded_rows * k * element / machine.l2_bandwidth,
        "power": gemm.flop / (machine.sustained_flops_mx if mx else machine.sustained_flops_bf16),
        "HBM": gemm.bytes(precision) / machine.copy_bandwidth,
        "bubble": of_tiles(machine.bubble_clocks * outputs / OUTPUTS),
        "scales": of_tiles(machine.scale_clocks * t.scale_tiles * math.ceil(k / SCALE_K)) if mx else 0.0,
    }


@dataclass(frozen=True)
class Estimate:
    """Projected seconds of one step, and the term that sets them."""

    step: Step
    seconds: float
    limit: str


def gemm_estimate(gemm: GroupedGemm, machine: Machine, precision: Precision) -> tuple[float, str]:
    """Projected seconds of a grouped GEMM, and the term that sets them."""
    terms = gemm_terms(gemm, machine, precision)
    exposed, first = terms.pop("bubble") + terms.pop("scales"), terms.pop("dequantise first", 0.0)
    terms = {name: seconds if name == "HBM" else seconds + exposed for name, seconds in terms.items()}
    limit = max(terms, key=lambda name: terms[name])
    return first + terms[limit] + machine.launch_s, limit


def pass_seconds(kind: str, moved: float, machine: Machine) -> tuple[float, str]:
    """Projected seconds of a memory-bound kernel that moves `moved` bytes, and what the larger part of them is."""
    memory = moved / machine.copy_bandwidth
    per_sm_clock = OVERHEAD[kind] * H200.sms * H200.clock_hz / H200.copy_bandwidth
    overhead = moved * per_sm_clock / (machine.sms * machine.clock_hz)
    return memory + overhead + machine.launch_s, "HBM" if memory > overhead else "instructions"


def estimate(step: Step, machine: Machine, precision: Precision) -> Estimate:
    """Projected time of one step on one machine."""
    if step.gemm is not None:
        return Estimate(step, *gemm_estimate(step.gemm, machine, precision))
    if step.kind in FIXED:
        return Estimate(step, FIXED[step.kind], "latency")
    return Estimate(step, *pass_seconds(step.kind, step.bytes, machine))


@dataclass(frozen=True)
class LayerProjection:
    """All steps of one layer in one precision on one machine."""

    shape: MoEShape
    machine: Machine
    precision: Precision
    estimates: tuple[Estimate, ...]

    def seconds(self, *, backward: bool | None = None, once_a_step: bool = False) -> float:
        """Projected seconds of the forward (False), the backward (True) or both (None).

        Args:
            backward: which.
            once_a_step: count what is done once per optimiser step, too.
        """
        return sum(
            item.seconds
            for item in self.estimates
            if (backward is None or item.step.backward == backward)
            and (once_a_step or not item.step.once_a_step)
        )


def project_layer(
    shape: MoEShape, machine: Machine, precision: Precision, *, weights_in_call: bool = False
) -> LayerProjection:
    """Project one MoE layer, forward and backward; MXFP8 weights are quantised once a step unless said otherwise."""
    steps = moe_steps(shape, precision)
    if precision == "mxfp8":
        steps += weight_steps(shape, in_call=weights_in_call)
    return LayerProjection(shape, machine, precision, tuple(estimate(s, machine, precision) for s in steps))


def end_to_end_speedup(layer_speedup: float, expert_share: float) -> float:
    """Amdahl: the whole step's gain when experts took `expert_share` of a BF16 step and run `layer_speedup` faster."""
    return 1.0 / (1.0 - expert_share + expert_share / layer_speedup)
