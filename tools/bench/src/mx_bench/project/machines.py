"""What the projection knows of a machine: one table of constants, each with its source.

Confidence of a source: *measured* (by this project, on that machine), *published* (somebody's raw data or source
code), *datasheet*, *inferred* (our own arithmetic from the others; the weakest kind).
"""

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """One GPU. Rates are dense, in operations per clock and SM; bandwidths in bytes per second; times in SM clocks."""

    name: str
    sms: int
    clock_hz: float
    flop_per_clock_bf16: float
    flop_per_clock_mx: float
    """Rate at which this machine multiplies MXFP8 operands; the BF16 rate where they are dequantised first."""
    sustained_flops_bf16: float
    """What power allows on random data, however good the kernel."""
    sustained_flops_mx: float
    copy_bandwidth: float
    """Device-to-device copy, bytes read plus bytes written."""
    l2_bandwidth: float
    tile_m: int
    tile_n: int
    ctas_per_tile: int
    l2_bytes_per_kflop_at_8bit: float
    """Operand bytes that cross L2 for 1000 FLOP with this tile and its multicast, one byte an element."""
    epilogue_clocks_per_byte: float
    """Draining, staging and writing one output byte of an SM's tile, when the main loop hides nothing of it."""
    bubble_clocks: float
    """Per tile: what is exposed between two main loops (accumulator drain, chain latency, signalling)."""
    launch_s: float
    """From one kernel's end to the next one's start in a stream."""

    @property
    def units(self) -> int:
        """Independent workers that each compute one output tile."""
        return self.sms // self.ctas_per_tile


SOURCES: dict[str, dict[str, str]] = {
    "H200": {
        "sms": "datasheet",
        "clock_hz": "datasheet boost clock; the power term governs long GEMMs",
        "flop_per_clock_bf16": "datasheet: 989 TFLOP/s at 1.83 GHz over 132 SMs",
        "flop_per_clock_mx": "measured: MXFP8 is dequantised to BF16, so the BF16 rate",
        "sustained_flops_bf16": "measured: 8192-cubed BF16 product on random data, 784 to 799 TFLOP/s",
        "sustained_flops_mx": "as BF16",
        "copy_bandwidth": "measured: 4.16 to 4.25 TB/s",
        "l2_bandwidth": "published: RRZE-HPC/gpu-benches, 9.7 to 10.3 TB/s",
        "tile_m": "this project's sm90 kernel",
        "tile_n": "this project's sm90 kernel",
        "ctas_per_tile": "this project's sm90 kernel",
        "l2_bytes_per_kflop_at_8bit": "arithmetic: 1000/256 + 1000/512 bytes with a 2x1 cluster",
        "epilogue_clocks_per_byte": "inferred: copy bandwidth shared by 132 SMs",
        "bubble_clocks": "fitted to this project's H200 measurements",
        "launch_s": "published: ademeure/QuickRunCUDA notes, ~1.8 us a launch, less when queued",
    },
    "B200": {
        "sms": "published: SemiAnalysis microbench-blackwell",
        "clock_hz": "datasheet: 4.5 PFLOP/s dense FP8 over 148 SMs",
        "flop_per_clock_bf16": "published: SemiAnalysis microbench-blackwell, 8192",
        "flop_per_clock_mx": "published: SemiAnalysis microbench-blackwell, 16384 for mxf8f6f4",
        "sustained_flops_bf16": "inferred: half of the FP8 limit",
        "sustained_flops_mx": "inferred: ~3.5 PFLOP/s on random data at 1 kW, from published B300 power runs",
        "copy_bandwidth": "inferred: 7.26 TB/s best published read, ~6.7 for a 1:1 mix",
        "l2_bandwidth": "published: 13 to 17 TB/s measured on B300",
        "tile_m": "this project's sm100 kernel",
        "tile_n": "this project's sm100 kernel",
        "ctas_per_tile": "this project's sm100 kernel: cta_group::2",
        "l2_bytes_per_kflop_at_8bit": "arithmetic: 256x256 pair tile, 2x2 multicast, scales +3 %",
        "epilogue_clocks_per_byte": "inferred: 6.7 TB/s shared by 148 SMs at 1.86 GHz",
        "bubble_clocks": "inferred: an overlapped accumulator exposes about half of ~1000 clocks",
        "launch_s": "published: ademeure/QuickRunCUDA notes, ~1.8 us a launch, less when queued",
    },
}

H200 = Machine(
    name="H200",
    sms=132,
    clock_hz=1.83e9,
    flop_per_clock_bf16=4096,
    flop_per_clock_mx=4096,
    sustained_flops_bf16=7.9e14,
    sustained_flops_mx=7.9e14,
    copy_bandwidth=4.2e12,
    l2_bandwidth=1.0e13,
    tile_m=128,
    tile_n=256,
    ctas_per_tile=1,
    l2_bytes_per_kflop_at_8bit=1000 / 256 + 1000 / 512,
    epilogue_clocks_per_byte=132 * 1.83e9 / 4.2e12,
    bubble_clocks=3000,
    launch_s=1.0e-6,
)
B200 = Machine(
    name="B200",
    sms=148,
    clock_hz=1.86e9,
    flop_per_clock_bf16=8192,
    flop_per_clock_mx=16384,
    sustained_flops_bf16=1.75e15,
    sustained_flops_mx=3.5e15,
    copy_bandwidth=6.7e12,
    l2_bandwidth=1.5e13,
    tile_m=256,
    tile_n=256,
    ctas_per_tile=2,
    l2_bytes_per_kflop_at_8bit=2.93,
    epilogue_clocks_per_byte=148 * 1.86e9 / 6.7e12,
    bubble_clocks=500,
    launch_s=1.0e-6,
)
GB300 = replace(
    B200,
    name="GB300",
    sms=152,
    clock_hz=1.92e9,
    sustained_flops_bf16=2.25e15,
    sustained_flops_mx=4.5e15,
    copy_bandwidth=6.9e12,
)
SOURCES["GB300"] = {
    **SOURCES["B200"],
    "sms": "inferred: published as at most 160, exact count not found",
    "clock_hz": "published: Verda's B300 post, 1.92 GHz sustained",
    "sustained_flops_bf16": "inferred: half of the FP8 limit",
    "sustained_flops_mx": "inferred: 3.5 PFLOP/s at 1 kW scaled to 1.4 kW, with clocks that fall as power rises",
    "copy_bandwidth": "published: 6.7 to 6.9 TB/s mixed reads and writes on B300",
}

MACHINES = {machine.name: machine for machine in (H200, B200, GB300)}


def load_machine(path: Path) -> Machine:
    """A user's own machine from a TOML file: ``base = "B200"`` and any field of `Machine` to replace.

    Raises:
        ValueError: a base or field that does not exist, or a value that is not a number.
    """
    table = tomllib.loads(path.read_text())
    base = table.pop("base", "B200")
    if base not in MACHINES:
        raise ValueError(f"{path}: base must be one of {', '.join(MACHINES)}, got {base!r}")
    names = [f.name for f in fields(Machine)]
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(f"{path}: no such field: {', '.join(unknown)}; fields are {', '.join(names)}")
    for key, value in table.items():
        if key != "name" and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"{path}: {key} must be a positive number, got {value!r}")
    changes: dict[str, Any] = {"name": path.stem, **table}
    return replace(MACHINES[base], **changes)
