"""The page docs/projection.md and its pictures, written whole by `mx-bench project --page docs`."""

from pathlib import Path

from mx_bench.project import charts, check, report
from mx_bench.project.machines import B200, GB300, H200, MACHINES
from mx_bench.results import load
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES

TEMPLATE = Path(__file__).with_name("page.md")
"""The page's prose; a line "@name" stands for tables."""

SHAPES = (*DESIGN_SHAPES, *(shape for shape in MODEL_SHAPES if shape.name != "Qwen3-30B-A3B"))
"""Without the one that has the sizes of "fine-grained"."""


def write(folder: Path, expert_share: float) -> list[Path]:
    """Write projection.md and images/projection_*.png under `folder`; return what was written."""
    rows = list(check.rows(load(check.MEASURED), H200))
    known = [abs(row.error) for row in rows if not row.reason]
    tables = {
        "layers": [report.layers(machine, SHAPES, expert_share) for machine in (B200, GB300, H200)],
        "steps": [report.steps(B200, shape) for shape in (DESIGN_SHAPES[1], MODEL_SHAPES[1])],
        "errors": [report.errors(rows, "Measured on an H200 against modelled")],
        "published": [report.published(B200)],
        "constants": [report.constants(MACHINES.values())],
    }
    text = {name: "\n\n".join("\n".join(t.markdown()) for t in several) for name, several in tables.items()}
    text["summary"] = (
        f"{len(rows)} rows: {len(known)} within {max(known):.1%} (mean {sum(known) / len(known):.1%}), "
        f"{len(rows) - len(known)} missed for a known reason."
    )
    lines = TEMPLATE.read_text().splitlines()
    page = "\n".join(text[line[1:]] if line.startswith("@") else line for line in lines) + "\n"

    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    written = [folder / "projection.md", images / "projection_h200.png", images / "projection_layers.png"]
    written[0].write_text(page)
    charts.error_chart(rows, written[1])
    charts.layer_chart((B200, GB300), SHAPES, written[2])
    return written
