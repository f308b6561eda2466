"""The model against measurements of the H200: every row that both know, with the error of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mx_bench import gemm, layer, memory_bound
from mx_bench.gemm import GemmShape
from mx_bench.project.layer import GroupedGemm, Precision
from mx_bench.project.machines import Machine
from mx_bench.project.model import gemm_estimate, pass_seconds, project_layer
from mx_bench.results import Measurement, Results
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES

MEASURED = Path(__file__).parent / "h200.json"
"""The measurements that the model's fitted constants were fitted to, as an mx-bench results file."""

TOLERANCE = 0.15

PASS_KINDS = (
    ("dequantise", "dequantize"),
    ("quantise", "stream"),
    ("SwiGLU + quantise", "stream"),
    ("SwiGLU, BF16", "indexed"),
    ("SwiGLU backward, BF16", "indexed"),
    ("SwiGLU backward", "dswiglu_quantize"),
    ("gather + quantise", "gather_quantize"),
    ("gather, BF16", "indexed"),
    ("combine backward", "indexed"),
    ("combine", "stream"),
)
"""Kind of overhead (`machines.OVERHEAD`) of each memory-bound case, by the start of its name; the first match counts."""

TAIL = "groups of 38 to 1868 rows: rounds of tiles that are partly empty; the model overlaps them with memory completely"
OUTSIDE = {(gemm.SECTION, gemm.SHAPES[2].case_name("dgrad", gemm.SKEW), "ours BF16"): TAIL}
"""Rows of MEASURED that the model misses by more than TOLERANCE, each with its reason."""

PUBLISHED: tuple[tuple[str, GroupedGemm, float], ...] = (
    ("Cursor, dense (cursor.com/blog/kernels; size as their FP8 runs)", GroupedGemm("fprop", 16384, 1, 16384, 16384, (16384,)), 2750e12),
    *(
        (f"torchao, CUTLASS, {mode} (pytorch/ao README)", GroupedGemm(mode, 131072, 8, 7168, 2048, (16384,) * 8), rate)
        for mode, rate in (("fprop", 2303e12), ("dgrad", 2286e12), ("wgrad", 1830e12))
    ),
)  # fmt: skip
"""MXFP8 products of other people's kernels on a B200: source, problem, FLOP/s. Not fitted to: a reader's yardstick."""

PRECISIONS: dict[str, Precision] = {"ours BF16": "bf16", "ours MXFP8": "mxfp8"}


@dataclass(frozen=True)
class Row:
    """One measured time beside the modelled one, in seconds."""

    measurement: Measurement
    modelled: float

    @property
    def measured(self) -> float:
        assert self.measurement.seconds
        return self.measurement.seconds

    @property
    def error(self) -> float:
        """Of the model, relative to the measurement."""
        return self.modelled / self.measured - 1.0

    @property
    def reason(self) -> str:
        """Why the model is known to miss this row, if it is."""
        return OUTSIDE.get(self.measurement.key, "")


def rows(results: Results, machine: Machine) -> Iterator[Row]:
    """Every measurement of `results` that the model can compute for `machine`, section by section."""
    modelled = {**_gemms(machine), **_layers(machine)}
    for m in results.measurements:
        if not m.seconds:
            continue
        if m.key in modelled:
            yield Row(m, modelled[m.key])
        elif m.section == memory_bound.SECTION and m.contestant.startswith("ours") and m.bytes:
            yield Row(m, pass_seconds(kind_of(m.case), m.bytes, machine)[0])


def kind_of(case: str) -> str:
    """Kind of overhead of a memory-bound case.

    Raises:
        ValueError: a case of a kind that PASS_KINDS does not know.
    """
    for prefix, kind in PASS_KINDS:
        if case.startswith(prefix):
            return kind
    raise ValueError(
        f"memory-bound case {case!r}: expected one that begins with {', '.join(p for p, _ in PASS_KINDS)}"
    )


def grouped_gemm(shape: GemmShape, mode: str, skew: float) -> GroupedGemm:
    """A benchmark's problem as the model sees it."""
    assert mode in ("fprop", "dgrad", "wgrad")
    return GroupedGemm(mode, shape.rows, shape.groups, shape.n, shape.k, tuple(shape.sizes(skew)))


PROBLEMS = {
    shape.case_name(mode, skew): grouped_gemm(shape, mode, skew)
    for shape in gemm.SHAPES
    for skew in (0.0, gemm.SKEW)
    for mode in gemm.MODES
}
"""Of the section "grouped GEMM", by name of the case."""


def _gemms(machine: Machine) -> dict[tuple[str, str, str], float]:
    return {
        (gemm.SECTION, case, contestant): gemm_estimate(problem, machine, precision)[0]
        for case, problem in PROBLEMS.items()
        for contestant, precision in PRECISIONS.items()
    }


def _layers(machine: Machine) -> dict[tuple[str, str, str], float]:
    contestants: dict[str, tuple[Precision, bool]] = {
        **{name: (precision, False) for name, precision in PRECISIONS.items()},
        layer.IN_CALL: ("mxfp8", True),
    }
    modelled = {}
    for shape in (*DESIGN_SHAPES, *MODEL_SHAPES):
        for contestant, (precision, in_call) in contestants.items():
            projection = project_layer(shape, machine, precision, weights_in_call=in_call)
            for passes, backward in (("forward", False), ("forward + backward", None)):
                key = layer.SECTION, f"{shape.case_name} {passes}", contestant
                modelled[key] = projection.seconds(backward=backward)
    return modelled
