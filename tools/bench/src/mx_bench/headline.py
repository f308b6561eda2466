"""What a run comes down to: MXFP8 over BF16 in the layer and in a training step, and how near each kernel is to its limit."""

from collections.abc import Iterator

from mx_bench import gemm, layer, memory_bound, trainer
from mx_bench.project.machines import B200, H200
from mx_bench.report import ceilings
from mx_bench.results import Measurement, Results

PUBLISHED_LAYER, PUBLISHED_END_TO_END = 3.5, 1.5
"""Speed-ups of an MoE layer (against a Hopper-era one) and of a training step that moved to MXFP8 on B200, cursor.com/blog/kernels (2025)."""

RATES = {"9": H200, "10": B200}
"""Whose tensor core rates hold, by the major compute capability."""

BF16, MXFP8 = "ours BF16", "ours MXFP8"


def peak_flops(results: Results, contestant: str) -> float | None:
    """Dense tensor-core peak at the highest clock, of the contestant's precision; None on a machine that is not known."""
    known = RATES.get(str(results.machine.get("capability") or "").split(".")[0])
    sms, clock = results.machine.get("sms"), results.machine.get("sm_clock_max_mhz")
    if known is None or not sms or not clock:
        return None
    rate = known.flop_per_clock_mx if contestant == MXFP8 else known.flop_per_clock_bf16
    return float(sms) * float(clock) * 1e6 * rate


def headline(results: Results) -> list[str]:
    """The lines that end a run; none for smoke sizes."""
    if results.smoke:
        return []
    return [*_layers(results), *_training(results), *_gemms(results), *_quantisers(results)]


def _layers(results: Results) -> Iterator[str]:
    """Forward, backward (both minus forward) and both."""
    seconds = {
        (m.case, m.contestant): m.seconds
        for m in results.measurements
        if m.section == layer.SECTION and m.seconds
    }

    def times(case: str) -> tuple[float, float] | None:
        bf16, mx = seconds.get((case, BF16)), seconds.get((case, MXFP8))
        return (bf16, mx) if bf16 and mx else None

    for name in dict.fromkeys(case.split(" forward")[0] for case, _ in seconds):
        forward, both = times(f"{name} forward"), times(f"{name} forward + backward")
        parts = []
        if forward:
            parts.append(f"forward {forward[0] / forward[1]:.2f}x")
        if forward and both:
            parts.append(f"backward {(both[0] - forward[0]) / (both[1] - forward[1]):.2f}x")
        if both:
            parts.append(f"both {both[0] / both[1]:.2f}x")
        if parts:
            yield (
                f"MoE layer {name}, MXFP8 over BF16: {', '.join(parts)} "
                f"(published on B200: {PUBLISHED_LAYER}x over a Hopper-era layer)"
            )


def _training(results: Results) -> Iterator[str]:
    bf16, mx = (results.best(trainer.SECTION, contestant=f"ours {p}") for p in ("bf16", "mxfp8"))
    if bf16 and mx and bf16.seconds and mx.seconds:
        speedup = bf16.seconds / mx.seconds
        yield f"training step, MXFP8 over BF16: {speedup:.2f}x (published on B200: {PUBLISHED_END_TO_END}x)"


def _ours(results: Results, section: str) -> Iterator[Measurement]:
    for m in results.measurements:
        if m.section == section and m.seconds and m.contestant.startswith("ours"):
            yield m


def _gemms(results: Results) -> Iterator[str]:
    for m in _ours(results, gemm.SECTION):
        peak = peak_flops(results, m.contestant)
        if m.rate and peak:
            yield f"{m.case}, {m.contestant}: {m.rate / 1e12:.0f} TFLOP/s, {m.rate / peak:.0%} of peak"


def _quantisers(results: Results) -> Iterator[str]:
    copy, _ = ceilings(results)
    for m in _ours(results, memory_bound.SECTION):
        if "quantise" in m.case and m.bandwidth and copy:
            speed = f"{m.bandwidth / 1e12:.2f} TB/s, {m.bandwidth / copy:.0%} of the copy's speed"
            yield f"{m.case}, {m.contestant}: {speed}"
