"""Pictures of the projection: layers as stacked bars, and the model against the H200."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mx_bench.project.check import TOLERANCE, Row
from mx_bench.project.machines import Machine
from mx_bench.project.model import LayerProjection, project_layer
from mx_bench.report import pyplot
from mx_bench.shapes import MoEShape

PARTS = {
    "GEMM, forward": "#1f5fa8",
    "GEMM, backward": "#7fb0e6",
    "SwiGLU": "#e0a458",
    "gather, combine, route": "#b9bec6",
}


def parts(projection: LayerProjection) -> dict[str, float]:
    """Seconds of a layer's forward and backward by PARTS; what is done once a step is left out."""
    sums = dict.fromkeys(PARTS, 0.0)
    for item in projection.estimates:
        if item.step.once_a_step:
            continue
        if item.step.gemm:
            sums["GEMM, backward" if item.step.backward else "GEMM, forward"] += item.seconds
        else:
            sums["SwiGLU" if "SwiGLU" in item.step.name else "gather, combine, route"] += item.seconds
    return sums


def layer_chart(machines: Sequence[Machine], shapes: Sequence[MoEShape], path: Path) -> None:
    """BF16 beside MXFP8 for every shape, one panel a machine, relative to BF16."""
    plt = pyplot()
    figure, panels = plt.subplots(
        1, len(machines), figsize=(5.2 * len(machines), 0.62 * len(shapes) + 1.2), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, machine in zip(panels[0], machines, strict=True):
        labels = []
        for shape in shapes:
            bf16, mx = (project_layer(shape, machine, precision) for precision in ("bf16", "mxfp8"))
            for name, projection in (("BF16", bf16), ("MXFP8", mx)):
                left = 0.0
                for part, seconds in parts(projection).items():
                    share = seconds / bf16.seconds()
                    axes.barh(len(labels), share, left=left, color=PARTS[part], height=0.8)
                    left += share
                if projection is mx:
                    axes.text(left + 0.01, len(labels), f"{1 / left:.2f}x", va="center", fontsize=8)
                labels.append(f"{shape.name}  {name}")
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlim(0, 1.05)
        axes.set_xlabel("projected time of forward + backward, BF16 = 1")
        axes.set_title(f"{machine.name}, projected", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].invert_yaxis()  # the panels share it
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    figure.legend(handles, PARTS, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def error_chart(rows: Iterable[Row], path: Path) -> None:
    """Modelled over measured time of every row, by section."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(row.measurement.section, []).append(row)
    for section, members in sections.items():
        known = [row for row in members if not row.reason]
        (points,) = axes.plot(
            [row.measured * 1e3 for row in known], [1 + row.error for row in known], "o", ms=4, label=section
        )
        missed = [row for row in members if row.reason]
        axes.plot(
            [row.measured * 1e3 for row in missed], [1 + row.error for row in missed], "x",
            color=points.get_color(), label=f"{section}, known to be missed" if missed else None,
        )  # fmt: skip
    axes.axhspan(1 - TOLERANCE, 1 + TOLERANCE, color="#00000010")
    axes.axhline(1, color="#444", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured on an H200, ms", ylabel="modelled / measured", ylim=(0.7, 1.3))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
