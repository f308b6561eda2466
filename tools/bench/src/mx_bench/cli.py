"""`mx-bench`, `mx-bench compare A.json B.json`, `mx-bench project`."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from mx_bench import machine, report
from mx_bench.compare import compare
from mx_bench.project import command as project_command
from mx_bench.results import Measurement, Results, load
from mx_bench.sections import SECTIONS, Plan

PUBLISHED_LAYER, PUBLISHED_END_TO_END = 3.5, 1.5
"""Speed-ups of an MoE layer and a training step that moved to MXFP8 on B200, cursor.com/blog/kernels (2025)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `mx-bench`."""
    args = _parser().parse_args(argv)
    try:
        return args.function(args)
    except ValueError as error:
        print(f"mx-bench: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mx-bench", description="Measure this machine, section by section.")
    parser.set_defaults(function=_run)
    parser.add_argument("--quick", action="store_true", help="the shapes of the speed budgets alone")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="keep the sections that --out already holds")
    commands = parser.add_subparsers()

    comparing = commands.add_parser("compare", help="what moved between two runs beyond noise")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(function=_compare)

    projecting = commands.add_parser("project", help="projected times on machines that were not measured")
    project_command.add_arguments(projecting)
    projecting.set_defaults(function=project_command.project)
    return parser


def _run(args: argparse.Namespace) -> int:
    console = Console()
    plan = Plan(device="cuda" if torch.cuda.is_available() else "cpu", quick=args.quick)
    path = args.out / "results.json"
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(machine.describe(), smoke=plan.smoke)
    if args.resume and path.exists():
        results = replace(load(path), machine=results.machine)
    if plan.smoke:
        console.print(f"[yellow]No GPU found. {report.SMOKE_WARNING}[/]")
    for name in args.section or SECTIONS:
        if name in results.sections_done:
            continue
        with console.status(f"measuring: {name}"):
            results = results.with_section(name, _measure(name, plan))
        results.save(path)
    for table in report.tables(results):
        console.print(table)
    _print_headline(console, results)
    (args.out / "results.md").write_text(report.markdown(results))
    written = [path, args.out / "results.md", *report.charts(results, args.out)]
    console.print("wrote", ", ".join(str(p) for p in written))
    return 0


def _measure(name: str, plan: Plan) -> list[Measurement]:
    try:
        return SECTIONS[name](plan)
    except Exception as error:  # a section that breaks is reported, and the others go on
        return [Measurement(name, "section", "all", None, note=f"failed: {type(error).__name__}: {error}")]


def _print_headline(console: Console, results: Results) -> None:
    """MXFP8 over BF16, of the layer and of a training step, beside what was published for Blackwell."""
    if results.smoke:
        return
    for case in dict.fromkeys(m.case for m in results.measurements if m.section == "MoE layer"):
        bf16, mx = (results.best("MoE layer", case, f"ours {p}") for p in ("BF16", "MXFP8"))
        if bf16 and mx and bf16.seconds and mx.seconds:
            console.print(
                f"[bold]{case}: MXFP8 {bf16.seconds / mx.seconds:.2f}x BF16[/] (published on B200: {PUBLISHED_LAYER}x)"
            )
    bf16, mx = (results.best("trainer", contestant=f"ours {p}") for p in ("bf16", "mxfp8"))
    if bf16 and mx and bf16.seconds and mx.seconds:
        console.print(
            f"[bold]training step: MXFP8 {bf16.seconds / mx.seconds:.2f}x BF16[/] (published: {PUBLISHED_END_TO_END}x)"
        )


def _compare(args: argparse.Namespace) -> int:
    console = Console()
    comparison = compare(load(args.before), load(args.after))
    if comparison.different_machine:
        console.print(f"[yellow]different between the runs: {', '.join(comparison.different_machine)}[/]")
    console.print(report.comparison_table(comparison))
    moved = sum(move.is_beyond_noise for move in comparison.moves)
    console.print(f"{len(comparison.moves)} measured in both runs, {moved} moved beyond noise")
    for label, missing in (("first", comparison.only_before), ("second", comparison.only_after)):
        if missing:
            console.print(f"only in the {label} run: {len(missing)}")
    return 0
