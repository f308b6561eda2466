"""The time model: a GEMM takes the largest of five terms plus an exposed bubble, a pass its bytes over an efficiency."""

import math
from dataclasses import dataclass

from mx_bench.project.layer import BYTES, GroupedGemm, Precision, Step, moe_steps
from mx_bench.project.machines import Machine
from mx_bench.shapes import MoEShape

EFFICIENCY = {
    # Share of copy speed that each memory-bound kernel reaches on an H200: docs/memory_bound.md holds the measurement.
    "quantize": 0.92,
    "gather": 0.78,
    "swiglu": 0.88,
    "dswiglu": 0.88,
    "combine": 0.80,
    "route": 0.05,
}


@dataclass(frozen=True)
class Estimate:
    """Projected seconds of one step, and the term that sets them."""

    step: Step
    seconds: float
    limit: str


def gemm_terms(gemm: GroupedGemm, machine: Machine, precision: Precision) -> dict[str, float]:
    """Seconds of each term if it alone bounded the grouped GEMM, and the bubble that adds to the largest."""
    mx = precision == "mxfp8"
    rate = machine.flop_per_clock_mx if mx else machine.flop_per_clock_bf16
    sustained = machine.sustained_flops_mx if mx else machine.sustained_flops_bf16
    element = BYTES[precision]

    tiles = gemm.groups * math.ceil(gemm.m / machine.tile_m) * math.ceil(gemm.n / machine.tile_n)
    rounds = math.ceil(tiles / machine.units)
    tile_flop = 2.0 * machine.tile_m * machine.tile_n * gemm.k
    tile_out = machine.tile_m * machine.tile_n * gemm.out_bytes / machine.ctas_per_tile
    operands = gemm.groups * (gemm.m + gemm.n) * gemm.k * element
    result = gemm.groups * gemm.m * gemm.n * gemm.out_bytes
    return {
        "matrix": rounds * tile_flop / (rate * machine.ctas_per_tile) / machine.clock_hz,
        "L2": tiles * tile_flop * machine.l2_bytes_per_kflop_at_8bit * element / 1000 / machine.l2_bandwidth,
        "HBM": (operands + result) / machine.copy_bandwidth,
        "epilogue": rounds * tile_out * machine.epilogue_clocks_per_byte / machine.clock_hz,
        "power": gemm.flop / sustained,
        "bubble": rounds * machine.bubble_clocks / machine.clock_hz,
    }


def estimate(step: Step, machine: Machine, precision: Precision) -> Estimate:
    """Projected time of one step on one machine."""
    if step.gemm is None:
        return Estimate(
            step, step.bytes / (machine.copy_bandwidth * EFFICIENCY[step.kernel]) + machine.launch_s, "HBM"
        )
    terms = gemm_terms(step.gemm, machine, precision)
    bubble = terms.pop("bubble")
    limit = max(terms, key=lambda name: terms[name])
    return Estimate(step, terms[limit] + bubble + machine.launch_s, limit)


@dataclass(frozen=True)
class LayerProjection:
    """All steps of one layer in one precision on one machine."""

    shape: MoEShape
    machine: Machine
    precision: Precision
    estimates: tuple[Estimate, ...]

    def seconds(self, *, backward: bool | None = None, with_weights: bool = True) -> float:
        """Projected seconds of the forward (False), the backward (True) or both (None)."""
        return sum(
            item.seconds
            for item in self.estimates
            if (backward is None or item.step.backward == backward)
            and (with_weights or item.step.kernel != "quantize")
        )


def project_layer(shape: MoEShape, machine: Machine, precision: Precision) -> LayerProjection:
    """Project one MoE layer, forward and backward."""
    steps = moe_steps(shape, precision)
    return LayerProjection(shape, machine, precision, tuple(estimate(s, machine, precision) for s in steps))


def end_to_end_speedup(layer_speedup: float, expert_share: float) -> float:
    """Amdahl: the whole step's gain when experts took `expert_share` of a BF16 step and run `layer_speedup` faster."""
    return 1.0 / (1.0 - expert_share + expert_share / layer_speedup)
