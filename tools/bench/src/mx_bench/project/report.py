"""The projection as tables. Every line that holds a number says "projected"."""

from rich.table import Table

from mx_bench.project.machines import SOURCES, Machine
from mx_bench.project.model import LayerProjection, end_to_end_speedup, project_layer
from mx_bench.report import duration
from mx_bench.shapes import MoEShape

WEIGHT_NOTE = "quantising the weights counted once a step"


def layer_table(machine: Machine, shapes: tuple[MoEShape, ...], expert_share: float) -> Table:
    """BF16 against MXFP8 for every shape: layer forward, backward, and the whole training step."""
    table = Table(
        "shape",
        "BF16 forward",
        "MXFP8 forward",
        "BF16 backward",
        "MXFP8 backward",
        "layer speed-up",
        f"end to end, experts {expert_share:.0%} of the step",
        title=f"projected for {machine.name}, {WEIGHT_NOTE}",
        title_justify="left",
    )
    for shape in shapes:
        bf16, mx = (project_layer(shape, machine, precision) for precision in ("bf16", "mxfp8"))
        speedup = bf16.seconds() / mx.seconds()
        table.add_row(
            shape.name,
            *(f"projected {duration(p.seconds(backward=b))}" for b in (False, True) for p in (bf16, mx)),
            f"projected {speedup:.2f}x",
            f"projected {end_to_end_speedup(speedup, expert_share):.2f}x",
        )
    return table


def steps_table(projection: LayerProjection) -> Table:
    """What part each step takes, and what limits it."""
    table = Table(
        "step",
        "time",
        "part",
        "limited by",
        title=f"projected: {projection.shape.name}, {projection.precision}, {projection.machine.name}",
        title_justify="left",
    )
    total = projection.seconds()
    for item in projection.estimates:
        table.add_row(
            item.step.name, f"projected {duration(item.seconds)}", f"{item.seconds / total:.0%}", item.limit
        )
    return table


def constants_table(machine: Machine) -> Table:
    """Every constant behind the projection, with its source."""
    table = Table("constant", "value", "source", title=f"constants: {machine.name}", title_justify="left")
    for name, source in SOURCES.get(machine.name, {}).items():
        table.add_row(name, f"{getattr(machine, name):.4g}", source)
    return table
