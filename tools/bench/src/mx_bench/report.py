"""Results as a terminal table, a Markdown page and bar charts against the machine's ceilings."""

from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from math import ceil, sqrt
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.table import Table

from mx_bench.compare import Comparison
from mx_bench.results import Measurement, Results

COLUMNS = ("case", "contestant", "time", "spread", "rate", "of ceiling", "note")
SMOKE_WARNING = "Smoke sizes: these times show that everything runs and say nothing about speed."


def ceilings(results: Results) -> tuple[float | None, float | None]:
    """The machine's copy bandwidth (bytes/s) and dense BF16 rate (FLOP/s), as this run measured them."""
    copy = results.best("ceilings", "copy")
    dense = results.best("ceilings", "dense BF16")
    return copy.bandwidth if copy else None, dense.rate if dense else None


def floor_seconds(m: Measurement, results: Results) -> float | None:
    """The roofline: the longer of bytes over the copy rate and FLOP over the dense BF16 rate."""
    copy, dense = ceilings(results)
    terms = [m.bytes / copy if m.bytes and copy else 0.0, m.flop / dense if m.flop and dense else 0.0]
    return max(terms) or None


def row(m: Measurement, results: Results) -> tuple[str, ...]:
    """One measurement as the strings of COLUMNS."""
    if m.seconds is None:
        return m.case, m.contestant, "-", "-", "-", "-", m.note
    floor = floor_seconds(m, results)
    rate = f"{m.rate / 1e12:.0f} TFLOP/s" if m.rate and m.rate > 1e12 else ""
    rate = rate or (f"{m.rate / 1e9:.1f} GFLOP/s" if m.rate else "")
    rate = rate or (f"{m.bandwidth / 1e9:.0f} GB/s" if m.bandwidth else "")
    spread = f"{m.spread:.1%}" + (" noisy" if m.is_noisy else "") if m.spread is not None else "-"
    return (
        m.case,
        m.contestant,
        duration(m.seconds),
        spread,
        rate,
        f"{floor / m.seconds:.2f}" if floor else "-",
        m.note,
    )


def duration(seconds: float) -> str:
    """Seconds with a unit that gives three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def by_section(results: Results) -> Iterator[tuple[str, list[Measurement]]]:
    """Measurements of each section, in the order they ran."""
    for section, group in groupby(results.measurements, key=lambda m: m.section):
        yield section, list(group)


def tables(results: Results) -> Iterator[Table]:
    """One terminal table a section; a case is named once."""
    for section, measurements in by_section(results):
        table = Table(*COLUMNS[1:], title=section, title_justify="left")
        for case, contestants in groupby(measurements, key=lambda m: m.case):
            table.add_row(f"[bold]{case}[/]")
            for m in contestants:
                name, *cells = row(m, results)[1:]
                table.add_row(f"  {name}", *cells)
        yield table


def markdown(results: Results, headline: Sequence[str] = ()) -> str:
    """The whole run as a page, its headline first."""
    lines = ["# mx-bench", ""]
    if results.smoke:
        lines += [SMOKE_WARNING, ""]
    if headline:
        lines += [*(f"- {line}" for line in headline), ""]
    lines += markdown_table(
        ("machine", ""), [(k, str(v)) for k, v in results.machine.items() if v is not None]
    )
    for section, measurements in by_section(results):
        lines += ["", f"## {section}", ""]
        lines += markdown_table(COLUMNS, [row(m, results) for m in measurements])
    return "\n".join(lines) + "\n"


def pyplot():
    """The plotting library without a display, imported at the first picture only."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def charts(results: Results, folder: Path) -> list[Path]:
    """One picture a section: a panel for each case, a bar for each contestant, its share of the ceiling.

    Sections without a roofline get none.
    """
    plt = pyplot()
    written = []
    for section, measurements in by_section(results):
        panels = list(_panels(measurements, results))
        if section == "ceilings" or not panels:
            continue
        columns = min(3, ceil(sqrt(len(panels))))
        rows, bars = -(-len(panels) // columns), max(len(panel) for _, panel in panels)
        size = 4.8 * columns, 0.6 + rows * (0.6 + 0.22 * bars)
        figure, grid = plt.subplots(
            rows, columns, figsize=size, squeeze=False, sharex=True, layout="constrained"
        )
        for axes, (case, panel) in zip_longest(grid.flat, panels, fillvalue=("", [])):
            _draw(axes, case, panel)
        figure.suptitle(f"{section} on {results.machine.get('device')}", x=0.01, ha="left")
        figure.supxlabel(
            "share of the ceiling: the larger of bytes / copy rate and FLOP / dense BF16 rate", fontsize=9
        )
        path = folder / f"{section.replace(' ', '_')}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        written.append(path)
    return written


Panel = list[tuple[str, float, float]]
"""Contestant, seconds, share of the ceiling."""


def _panels(measurements: list[Measurement], results: Results) -> Iterator[tuple[str, Panel]]:
    for case, contestants in groupby(measurements, key=lambda m: m.case):
        panel = [
            (m.contestant, m.seconds, floor / m.seconds)
            for m in contestants
            if m.seconds and (floor := floor_seconds(m, results))
        ]
        if panel:
            yield case, panel


def _draw(axes: Any, case: str, panel: Panel) -> None:
    """Bars from top to bottom with the time in each; nothing at all if there are none."""
    if not panel:
        axes.axis("off")
        return
    names, seconds, shares = zip(*panel, strict=True)
    colours = ["#2a78d6" if name.startswith("ours") else "#b9bec6" for name in names]
    bars = axes.barh(range(len(names)), shares, color=colours)
    labels = [duration(s) for s in seconds]
    axes.bar_label(bars, labels, padding=3, fontsize=7, bbox={"color": "white", "pad": 0.5})
    axes.set_yticks(range(len(names)), ["\n".join(wrap(name, 24)) for name in names], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444", linewidth=1, linestyle="--", zorder=0)
    axes.set_title("\n".join(wrap(case, 58)), fontsize=8, loc="left")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlim(0, max(1.2, *(share + 0.2 for share in shares)))
    axes.spines[["top", "right"]].set_visible(False)


def comparison_table(comparison: Comparison) -> Table:
    """What moved beyond noise, largest move first."""
    table = Table("section", "case", "contestant", "before", "after", "speed-up", "noise")
    moved = [move for move in comparison.moves if move.is_beyond_noise]
    for move in sorted(moved, key=lambda move: move.ratio):
        table.add_row(
            *move.before.key,
            duration(move.before.seconds or 0.0),
            duration(move.after.seconds or 0.0),
            f"{move.ratio:.2f}x",
            f"{move.noise:.0%}",
        )
    return table


def markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows)]
