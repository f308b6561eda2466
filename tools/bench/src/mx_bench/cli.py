"""`mx-bench`, `mx-bench report RESULTS.json`, `mx-bench compare A.json B.json`, `mx-bench project`."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch._inductor import config as inductor_config

from mx_bench import ceilings, machine, report
from mx_bench.cases import reason_of
from mx_bench.compare import compare
from mx_bench.headline import headline
from mx_bench.plan import Plan
from mx_bench.project import command as project_command
from mx_bench.results import Measurement, Results, load
from mx_bench.sections import SECTIONS
from mx_bench.warm import warm_sections

WIDTH = 150
"""Columns of the tables where the output is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `mx-bench`."""
    args = _parser().parse_args(argv)
    try:
        status = args.function(args)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"mx-bench: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `mx-bench project | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes nowhere
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mx-bench", description="Measure this machine, section by section.")
    parser.set_defaults(function=_run)
    parser.add_argument("--quick", action="store_true", help="the shapes of the speed budgets alone")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="keep the sections that --out already holds")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="compile everything and measure nothing; status 1 if something failed",
    )
    commands = parser.add_subparsers()

    reporting = commands.add_parser("report", help="tables, page and charts of a run made elsewhere")
    reporting.add_argument("results", type=Path)
    reporting.add_argument("--to", type=Path, help="folder for the page and charts; that of the results")
    reporting.set_defaults(function=_report)

    comparing = commands.add_parser("compare", help="what moved between two runs beyond noise")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.set_defaults(function=_compare)

    projecting = commands.add_parser("project", help="projected times on machines that were not measured")
    project_command.add_arguments(projecting)
    projecting.set_defaults(function=project_command.project)
    return parser


def _run(args: argparse.Namespace) -> int:
    console, begin = _console(), time.perf_counter()

    def say(line: str) -> None:
        text = f"[{time.perf_counter() - begin:.0f} s] {line}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    plan = Plan(device="cuda" if torch.cuda.is_available() else "cpu", quick=args.quick, warm=args.warm)
    path = args.out / "results.json"
    results = Results(machine.describe(), smoke=plan.smoke)
    if args.resume and path.exists():
        results = replace(load(path), machine=results.machine)
    if plan.smoke:
        say(f"No GPU found. {report.SMOKE_WARNING}")
        torch.set_num_threads(1)  # such sizes only lose by more
    names = [name for name in args.section or SECTIONS if name not in results.sections_done]
    apart = [] if plan.smoke else [name for name in names if name != ceilings.SECTION]
    warmed = len(apart) < 2 or warm_sections(apart, say, quick=plan.quick)
    if plan.warm:
        return 0 if warmed and (len(apart) > 1 or _warm(names, plan, say)) else 1
    args.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        start = time.perf_counter()
        results = results.with_section(name, _measure(name, plan))
        results.save(path)
        say(f"{name}: {time.perf_counter() - start:.0f} s")
    _show(console, results, args.out)
    say("done")
    return 0


def _warm(names: Sequence[str], plan: Plan, say: Callable[[str], None]) -> bool:
    """Compile sections in this process; say what failed. Returns whether nothing did."""
    inductor_config.autotune_local_cache = False  # what is timed beside other processes is not kept
    failures = [m for name in names for m in _measure(name, plan) if m.is_failure]
    for m in failures:
        say(f"{m.section} | {m.case} | {m.contestant}: {m.note}")
    return not failures


def _measure(name: str, plan: Plan) -> list[Measurement]:
    try:
        return SECTIONS[name](plan)
    except Exception as error:  # a section that breaks is reported, and the others go on
        return [Measurement(name, "section", "all", None, note=reason_of(error))]


def _report(args: argparse.Namespace) -> int:
    results, folder = load(args.results), args.to or args.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    _show(_console(), results, folder)
    return 0


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _show(console: Console, results: Results, folder: Path) -> None:
    """Tables and headline in the terminal, page and charts in `folder`."""
    for table in report.tables(results):
        console.print(table)
    if noisy := [m for m in results.measurements if m.is_noisy]:
        console.print(f"[yellow]noisy: {len(noisy)} of {len(results.measurements)}, marked above[/]")
    lines = headline(results)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    page = folder / "results.md"
    page.write_text(report.markdown(results, lines))
    written = [page, *report.charts(results, folder)]
    console.print("wrote", ", ".join(str(p) for p in written))


def _compare(args: argparse.Namespace) -> int:
    console = _console()
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
