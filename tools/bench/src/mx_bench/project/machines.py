"""What the projection knows: one table of constants, each with its source, and what a user may replace in a TOML file.

Confidence of a source: *measured* (by this project, on that machine), *fitted* (to this project's measurements,
docs/projection_h200.md), *published* (somebody's raw data or source code), *datasheet*, *inferred* (our own arithmetic
from the others; the weakest kind).
"""

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mx_kernels.sm100.config import SMEM_BYTES_PER_CLOCK, TILE_CLOCKS

# What holds on every machine ---------------------------------------------------------------------------------------

OVERHEAD: dict[str, float] = {
    "stream": 0.0,
    "indexed": 0.08,
    "gather_quantize": 0.36,
    "dswiglu_quantize": 0.14,
    "dequantize": 0.07,
}
"""Time of a memory-bound kernel beyond its bytes at copy speed, as a share of that time on an H200: instructions and
waiting that its loads do not hide. It scales with multiprocessors and clock, not with the memory."""

FIXED: dict[str, float] = {"route": 12.0e-6, "slot_weights": 5.6e-6}
"""Seconds of kernels that wait for latencies, as measured on an H200 with 128 experts; taken over unchanged."""

GENERAL_SOURCES = {
    "overhead: stream": "fitted: quantise, SwiGLU + quantise, combine (0.98 to 1.02 of the copy)",
    "overhead: indexed": "fitted: gather, combine backward, SwiGLU in BF16 both ways (0.85 to 1.00)",
    "overhead: gather_quantize": "fitted: gather + quantise, weighted or not (0.71 to 0.75)",
    "overhead: dswiglu_quantize": "fitted: SwiGLU backward with quantised outputs (0.86 and 0.88)",
    "overhead: dequantize": "fitted: MXFP8 operands to BF16 before a Hopper product (0.93 of the copy)",
    "fixed: route": "measured on an H200, docs/memory_bound.md",
    "fixed: slot_weights": "measured on an H200, docs/memory_bound.md",
}


@dataclass(frozen=True)
class Machine:
    """One GPU. Rates are dense; clocks are SM clocks; bandwidths are bytes per second."""

    name: str
    backend: str
    """Whose tiles: "sm90" or "sm100"."""
    sms: int
    clock_hz: float
    flop_per_clock_bf16: float
    """Of one SM."""
    flop_per_clock_mx: float
    """The same for MXFP8 operands; the BF16 rate where they are dequantised."""
    sustained_flops_bf16: float
    """What power allows on random data, however good the kernel."""
    sustained_flops_mx: float
    copy_bandwidth: float
    """Device-to-device copy, bytes read plus bytes written."""
    l2_bandwidth: float
    smem_bytes_per_clock: float
    """What the tensor core of one SM reads of its operands from shared memory."""
    epilogue_clocks: float
    """Draining, staging and storing 128 x 256 outputs, where the next tile's main loop hides it."""
    bubble_clocks: float
    """What nothing hides between two tiles of 128 x 256 outputs: drain, chain latency, signalling, the epilogue on Hopper."""
    scale_clocks: float
    """What nothing hides of copying 128 x 4 scales to tensor memory; 0 where they do not go there."""
    dequantize_a_clocks: float
    """MXFP8 A to 16 bits in the main loop, 128 rows x 64 of K, on one SM; 0 where the tensor core takes MXFP8."""
    dequantize_b_clocks: float
    """The same for B, K contiguous (fprop)."""
    dequantize_b_transposed_clocks: float
    """The same for B with the other axis contiguous (dgrad; wgrad is dequantised before the product)."""
    launch_s: float
    """From one kernel's end to the next one's start in a stream."""


H200 = Machine(
    name="H200",
    backend="sm90",
    sms=132,
    clock_hz=1.83e9,
    flop_per_clock_bf16=4096,
    flop_per_clock_mx=4096,
    sustained_flops_bf16=8.04e14,
    sustained_flops_mx=8.04e14,
    copy_bandwidth=4.25e12,
    l2_bandwidth=1.0e13,
    smem_bytes_per_clock=SMEM_BYTES_PER_CLOCK,
    epilogue_clocks=0,
    bubble_clocks=3210,
    scale_clocks=0,
    dequantize_a_clocks=485,
    dequantize_b_clocks=330,
    dequantize_b_transposed_clocks=441,
    launch_s=2.0e-6,
)
B200 = Machine(
    name="B200",
    backend="sm100",
    sms=148,
    clock_hz=1.86e9,
    flop_per_clock_bf16=8192,
    flop_per_clock_mx=16384,
    sustained_flops_bf16=1.6e15,
    sustained_flops_mx=3.2e15,
    copy_bandwidth=6.7e12,
    l2_bandwidth=1.5e13,
    smem_bytes_per_clock=SMEM_BYTES_PER_CLOCK,
    epilogue_clocks=650 + 512 + 512,
    bubble_clocks=TILE_CLOCKS,
    scale_clocks=17,
    dequantize_a_clocks=0,
    dequantize_b_clocks=0,
    dequantize_b_transposed_clocks=0,
    launch_s=2.0e-6,
)
GB300 = replace(
    B200,
    name="GB300",
    sms=152,
    clock_hz=1.92e9,
    sustained_flops_bf16=2.0e15,
    sustained_flops_mx=4.0e15,
    copy_bandwidth=6.9e12,
)
MACHINES = {machine.name: machine for machine in (H200, B200, GB300)}

SOURCES: dict[str, dict[str, str]] = {
    "H200": {
        "backend": "this project",
        "sms": "datasheet",
        "clock_hz": "datasheet boost clock; the power term governs long GEMMs",
        "flop_per_clock_bf16": "datasheet: 989 TFLOP/s at 1.83 GHz over 132 SMs",
        "flop_per_clock_mx": "as BF16: MXFP8 is dequantised, in the main loop or before it",
        "sustained_flops_bf16": "measured: BF16 product 8192^3 on random data, 784 to 804 TFLOP/s",
        "sustained_flops_mx": "as BF16",
        "copy_bandwidth": "measured: 4.16 to 4.27 TB/s",
        "l2_bandwidth": "published: RRZE-HPC/gpu-benches, 9.7 to 10.3 TB/s",
        "smem_bytes_per_clock": "published: SemiAnalysis, Dissecting Blackwell; the same on Hopper",
        "epilogue_clocks": "nothing hides Hopper's epilogue: it is part of the bubble",
        "bubble_clocks": "fitted: BF16 grouped GEMMs",
        "scale_clocks": "scales stay in shared memory",
        "dequantize_a_clocks": "fitted: MXFP8 grouped GEMMs that dequantise in the main loop",
        "dequantize_b_clocks": "fitted: the same, fprop",
        "dequantize_b_transposed_clocks": "fitted: the same, dgrad",
        "launch_s": "published: ademeure/QuickRunCUDA notes, ~1.8 us a launch",
    },
    "B200": {
        "backend": "this project",
        "sms": "published: SemiAnalysis microbench-blackwell",
        "clock_hz": "datasheet: 4.5 PFLOP/s dense FP8 over 148 SMs",
        "flop_per_clock_bf16": "published: SemiAnalysis microbench-blackwell",
        "flop_per_clock_mx": "published: SemiAnalysis microbench-blackwell, mxf8f6f4",
        "sustained_flops_bf16": "inferred: half of the FP8 limit",
        "sustained_flops_mx": "published: fastest FP8 product seen on a B200, 3.2 PFLOP/s (cursor.com/blog/kernels)",
        "copy_bandwidth": "inferred: 7.26 TB/s best published read, ~6.7 for a 1:1 mix",
        "l2_bandwidth": "published: 13 to 17 TB/s measured on B300 (ademeure/QuickRunCUDA)",
        "smem_bytes_per_clock": "published: SemiAnalysis, Dissecting Blackwell",
        "epilogue_clocks": "inferred from published rates: TMEM drain 650, writing SMEM 512, its TMA read 512",
        "bubble_clocks": "inferred: sm100/config.py, half of the ~1,000 clocks of an undivided accumulator and more",
        "scale_clocks": "inferred: one published kernel, FP8 3,040 and with scales 2,750 TFLOP/s (cursor.com/blog/kernels), 256 x 256",
        "dequantize_a_clocks": "the tensor core takes MXFP8",
        "dequantize_b_clocks": "the tensor core takes MXFP8",
        "dequantize_b_transposed_clocks": "the tensor core takes MXFP8",
        "launch_s": "published: ademeure/QuickRunCUDA notes, ~1.8 us a launch",
    },
}
SOURCES["GB300"] = {
    **SOURCES["B200"],
    "sms": "inferred: published as at most 160, exact count not found",
    "clock_hz": "published: Verda's B300 post, 1.92 GHz sustained",
    "sustained_flops_bf16": "inferred: half of the FP8 limit",
    "sustained_flops_mx": "published: cuBLAS FP8 on random data on B300, 3,983 TFLOP/s (ademeure/QuickRunCUDA)",
    "copy_bandwidth": "published: 6.7 to 6.9 TB/s mixed reads and writes on B300",
}


def load_machine(path: Path) -> Machine:
    """A user's own machine from a TOML file: ``base = "B200"`` and any field of `Machine` to replace.

    Raises:
        ValueError: a base or field that does not exist, or a value that is not a number.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected TOML: {error}") from None
    base = table.pop("base", "B200")
    if base not in MACHINES:
        raise ValueError(f"{path}: base must be one of {', '.join(MACHINES)}, got {base!r}")
    names = [f.name for f in fields(Machine) if f.name != "backend"]
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(f"{path}: no such field: {', '.join(unknown)}; fields are {', '.join(names)}")
    may_be_zero = [name for name in names if name.endswith("_clocks")]
    for key, value in table.items():
        if key == "name":
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value < 0 or (value == 0 and key not in may_be_zero):
            raise ValueError(f"{path}: {key} must be a positive number, got {value!r}")
    changes: dict[str, Any] = {"name": path.stem, **table}
    return replace(MACHINES[base], **changes)


def sources_of(machine: Machine) -> dict[str, str]:
    """Source of every constant; fields that a user's file changed say so."""
    if machine.name in SOURCES and MACHINES[machine.name] == machine:
        return SOURCES[machine.name]
    base = min(
        MACHINES.values(),
        key=lambda known: sum(getattr(known, f.name) != getattr(machine, f.name) for f in fields(Machine)),
    )
    return {
        name: f"{base.name}: {source}"
        if getattr(base, name) == getattr(machine, name)
        else "the machine file"
        for name, source in SOURCES[base.name].items()
    }
