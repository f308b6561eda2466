"""`mx-bench project`: what it prints. Every line says "projected"."""

import argparse
from pathlib import Path

from mx_bench.project import check, page, report
from mx_bench.project.machines import H200, MACHINES, Machine, load_machine
from mx_bench.results import load
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, MoEShape

SHAPES = {shape.name: shape for shape in (*DESIGN_SHAPES, *MODEL_SHAPES)}

EXPERT_SHARE = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `mx-bench project`."""
    parser.add_argument(
        "--machine", action="append", help=f"{', '.join(MACHINES)} or a TOML file; may be repeated"
    )
    parser.add_argument(
        "--shape", action="append", help=f"step by step: {', '.join(SHAPES)}; may be repeated"
    )
    parser.add_argument(
        "--expert-share", type=float, default=EXPERT_SHARE, help="experts' share of a BF16 training step"
    )
    parser.add_argument("--against", type=Path, help="results.json of a run: the model's error on every row")
    parser.add_argument(
        "--page", type=Path, metavar="FOLDER", help="write projection.md and its pictures there"
    )


def project(args: argparse.Namespace) -> int:
    """Print the tables that the arguments ask for, or write the page.

    Raises:
        ValueError: a share, machine or shape that does not exist, or options of which one would do nothing.
    """
    if not 0 < args.expert_share < 1:
        raise ValueError(f"--expert-share: expected a share between 0 and 1, got {args.expert_share}")
    _refuse_combinations(args)
    if args.page:
        for path in page.write(args.page, args.expert_share):
            print(f"projected | wrote {path}")
        return 0
    machines = [_machine(name) for name in args.machine or ("B200", "GB300")]
    shapes = [_shape(name) for name in args.shape or (DESIGN_SHAPES[1].name,)]
    tables = []
    if args.against:
        measured = load(args.against)
        for machine in machines:
            rows = list(check.rows(measured, machine))
            tables.append(
                report.errors(rows, f"{args.against} against the times projected for {machine.name}")
            )
    else:
        tables.append(_trust())
        for machine in machines:
            tables.append(report.layers(machine, SHAPES.values(), args.expert_share))
            tables += [report.steps(machine, shape) for shape in shapes]
        tables.append(report.constants(machines))
    print("\nprojected |\n".join("\n".join(table.lines()) for table in tables))
    return 0


def _refuse_combinations(args: argparse.Namespace) -> None:
    given = {
        "--machine": args.machine,
        "--shape": args.shape,
        "--expert-share": args.expert_share != EXPERT_SHARE,
        "--against": args.against,
    }
    for option, without in (
        ("--page", ("--machine", "--shape", "--against")),
        ("--against", ("--shape", "--expert-share")),
    ):
        idle = [name for name in without if given[name]]
        if getattr(args, option[2:]) and idle:
            raise ValueError(f"{option} does not take {' or '.join(idle)}")


def _trust() -> report.Table:
    """How well the model reproduces the H200, by section."""
    sections: dict[str, list[check.Row]] = {}
    for row in check.rows(load(check.MEASURED), H200):
        sections.setdefault(row.measurement.section, []).append(row)
    lines = []
    for section, rows in sections.items():
        errors = [abs(row.error) for row in rows if not row.reason]
        missed = len(rows) - len(errors)
        lines.append(
            (section, f"{len(rows)}", f"{sum(errors) / len(errors):.1%}", f"{max(errors):.1%}", f"{missed}")
        )
    header = ("section", "rows", "mean error", "largest", "known to be missed")
    return report.Table(
        "The model against this project's H200 measurements, docs/projection.md", header, tuple(lines)
    )


def _machine(name: str) -> Machine:
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--machine: expected {', '.join(MACHINES)} or a TOML file, got {name!r}")
    return load_machine(path)


def _shape(name: str) -> MoEShape:
    if name not in SHAPES:
        raise ValueError(f"--shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]
