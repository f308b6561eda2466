"""The projection as tables: in the terminal, where every line says "projected", and as the page docs/projection.md."""

from collections.abc import Iterable
from dataclasses import dataclass

from mx_bench.project import check
from mx_bench.project.machines import FIXED, GENERAL_SOURCES, OVERHEAD, Machine, sources_of
from mx_bench.project.model import end_to_end_speedup, gemm_estimate, project_layer
from mx_bench.report import duration, markdown_table
from mx_bench.shapes import MoEShape


@dataclass(frozen=True)
class Table:
    """Rows of strings under a title."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> list[str]:
        """For the terminal: aligned columns, the word "projected" at the start of every line."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(cells: Iterable[str]) -> str:
            return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

        body = [self.title, line(self.header), *map(line, self.rows)]
        return [f"projected | {text}" for text in body]

    def markdown(self) -> list[str]:
        """For a page; the title carries the word."""
        return [f"**{self.title}**", "", *markdown_table(self.header, list(self.rows))]


def layers(machine: Machine, shapes: Iterable[MoEShape], expert_share: float) -> Table:
    """BF16 against MXFP8 for every shape: layer forward, backward, both, and the whole training step."""
    rows = []
    for shape in shapes:
        bf16, mx = (project_layer(shape, machine, precision) for precision in ("bf16", "mxfp8"))
        speedup = bf16.seconds() / mx.seconds(once_a_step=True)
        rows.append(
            (
                shape.name,
                *(duration(p.seconds(backward=b)) for b in (False, True) for p in (bf16, mx)),
                f"{bf16.seconds() / mx.seconds():.2f}x",
                f"{speedup:.2f}x",
                f"{end_to_end_speedup(speedup, expert_share):.2f}x",
            )
        )
    header = (
        "shape",
        "BF16 forward",
        "MXFP8 forward",
        "BF16 backward",
        "MXFP8 backward",
        "layer speed-up",
        "with weights quantised once",
        f"whole step, experts {expert_share:.0%}",
    )
    return Table(f"MoE layer, projected for {machine.name}", header, tuple(rows))


def steps(machine: Machine, shape: MoEShape) -> Table:
    """What part each step of a layer takes in both precisions, and what limits it."""
    bf16, mx = (project_layer(shape, machine, precision) for precision in ("bf16", "mxfp8"))
    of_bf16 = {item.step.name: item for item in bf16.estimates}
    total_bf16, total = bf16.seconds(), mx.seconds()
    rows = []
    for item in mx.estimates:
        old = of_bf16.get(item.step.name)
        rows.append(
            (
                item.step.name + (" (once a step)" if item.step.once_a_step else ""),
                *(
                    (duration(old.seconds), f"{old.seconds / total_bf16:.0%}", old.limit)
                    if old
                    else ("-",) * 3
                ),
                duration(item.seconds),
                "-" if item.step.once_a_step else f"{item.seconds / total:.0%}",
                item.limit,
                f"{item.step.gemm.flop / item.seconds / 1e12:.0f} TFLOP/s"
                if item.step.gemm
                else f"{item.step.bytes / item.seconds / 1e12:.2f} TB/s"
                if item.step.bytes
                else "-",
            )
        )
    header = ("step", "BF16", "part", "limit", "MXFP8", "part", "limit", "MXFP8 rate")
    return Table(f"{shape.case_name}, projected for {machine.name}", header, tuple(rows))


def constants(machines: Iterable[Machine]) -> Table:
    """Every constant of the model, with its source."""
    rows = []
    for machine in machines:
        for name, source in sources_of(machine).items():
            value = getattr(machine, name)
            rows.append((machine.name, name, value if isinstance(value, str) else f"{value:.4g}", source))
    general = {
        **{f"overhead: {kind}": f"{share:.2f}" for kind, share in OVERHEAD.items()},
        **{f"fixed: {kind}": duration(seconds) for kind, seconds in FIXED.items()},
    }
    rows += [("all", name, value, GENERAL_SOURCES[name]) for name, value in general.items()]
    return Table("Constants of the projected times", ("machine", "constant", "value", "source"), tuple(rows))


def errors(rows: Iterable[check.Row], title: str) -> Table:
    """Measured against modelled, with the error of each row."""
    cells = [
        (
            row.measurement.section,
            row.measurement.case,
            row.measurement.contestant,
            duration(row.measured),
            duration(row.modelled),
            f"{row.error:+.1%}",
            row.reason or row.measurement.note,
        )
        for row in rows
    ]
    header = ("section", "case", "contestant", "measured", "modelled", "error", "note")
    return Table(title, header, tuple(cells))


def published(machine: Machine) -> Table:
    """Other people's MXFP8 GEMMs beside what the model projects for ours."""
    rows = []
    for source, gemm, rate in check.PUBLISHED:
        projected = gemm.flop / gemm_estimate(gemm, machine, "mxfp8")[0]
        size = f"{gemm.rows} x {gemm.n} x {gemm.k}, {gemm.groups} groups"
        rows.append(
            (source, size, f"{rate / 1e12:.0f}", f"{projected / 1e12:.0f}", f"{projected / rate:.2f}x")
        )
    header = ("published", "size", "TFLOP/s", "ours", "ratio")
    return Table(
        f"MXFP8 products that others published for B200, and ours, projected for {machine.name}",
        header,
        tuple(rows),
    )
