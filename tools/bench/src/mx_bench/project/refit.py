"""The model's measurements and fitted constants from a new run on an H200: `python -m mx_bench.project.refit results.json`.

Writes h200.json beside this file: every row of the run that the model knows, in place of the old one. Prints the constants of
`machines.py` that are measured or fitted, as they are and as these rows want them, to be put there by hand with their date, and what
the model misses with the new ones. Then:

    uv run pytest -n 0 tests/bench/test_project.py         # every row within 15 %, or in check.OUTSIDE with its reason
    uv run mx-bench project --page docs                    # docs/projection.md and its pictures
    uv run python -m mx_bench.project.scaling docs         # docs/scaling.md, built on the same constants
    uv run python tools/docs/block_scaling.py              # a picture that shows projected times
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

from mx_bench import ceilings, gemm, memory_bound
from mx_bench.project import check
from mx_bench.project.machines import H200, OVERHEAD, Machine
from mx_bench.project.model import dequantized_first
from mx_bench.report import ceilings as measured_ceilings
from mx_bench.results import Measurement, Results, load

LOOP_CLOCKS = ("dequantize_a_clocks", "dequantize_b_clocks", "dequantize_b_transposed_clocks")


def merged(old: Results, run: Results, note: str = "") -> Results:
    """The old rows, replaced or joined by those of the run that the model knows and by its ceilings.

    Raises:
        ValueError: the run is not of an H200 or of smoke sizes.
    """
    device = run.machine.get("device")
    if run.smoke or "H200" not in str(device):
        raise ValueError(f"expected a run on an H200, got {'smoke sizes on ' if run.smoke else ''}{device}")
    known = {row.measurement.key for row in check.rows(run, H200)}
    new = {
        m.key: replace(m, note=note)
        for m in run.measurements
        if m.seconds and (m.key in known or m.section == ceilings.SECTION)
    }
    kept = {m.key: m for m in old.measurements}
    return Results(old.machine | run.machine, False, old.sections_done, tuple((kept | new).values()))


def fitted(results: Results) -> tuple[Machine, dict[str, float]]:
    """The H200 and the overheads as these measurements want them. What has no row stays as it is."""
    copy, dense = measured_ceilings(results)
    machine = replace(
        H200,
        copy_bandwidth=_rounded(copy or H200.copy_bandwidth),
        sustained_flops_bf16=_rounded(dense or H200.sustained_flops_bf16),
        sustained_flops_mx=_rounded(dense or H200.sustained_flops_mx),
    )
    overheads = dict(OVERHEAD)
    for kind in OVERHEAD:
        shares = [
            (m.seconds - machine.launch_s) * machine.copy_bandwidth / m.bytes - 1
            for m in results.measurements
            if m.section == memory_bound.SECTION
            and m.contestant.startswith("ours")
            and m.seconds
            and m.bytes
            and check.kind_of(m.case) == kind
        ]
        if shares:
            overheads[kind] = max(0.0, round((min(shares) + max(shares)) / 2, 2))
    with using(machine, overheads):
        for names, precision in ((("bubble_clocks",), "ours BF16"), (LOOP_CLOCKS, "ours MXFP8")):
            rows = tuple(m for m in results.measurements if _shows(m, precision))
            if rows:
                machine = minimised(
                    lambda m, rows=rows: misfit(replace(results, measurements=rows), m), machine, names
                )
    return machine, overheads


def using(machine: Machine, overheads: dict[str, float]) -> ExitStack:
    """A context in which the model takes these for its H200 and its overheads."""
    stack = ExitStack()
    stack.enter_context(mock.patch.dict(OVERHEAD, overheads))
    stack.enter_context(mock.patch("mx_bench.project.model.H200", machine))
    return stack


def _shows(m: Measurement, contestant: str) -> bool:
    """Whether a row says something about what its products are fitted by: not known to be missed and, of MXFP8, dequantised in the loop."""
    if m.section != gemm.SECTION or m.contestant != contestant or m.key in check.OUTSIDE:
        return False
    problem = check.PROBLEMS.get(m.case)
    return problem is not None and not dequantized_first(problem, H200, check.PRECISIONS[contestant])


def misfit(results: Results, machine: Machine) -> float:
    """The largest error of the rows, which is what is promised, and their mean, in logarithms."""
    errors = [abs(math.log1p(row.error)) for row in check.rows(results, machine)]
    return max(errors) + sum(errors) / len(errors)


def minimised(cost: Callable[[Machine], float], machine: Machine, names: tuple[str, ...]) -> Machine:
    """The machine with these fields where a pattern search from their present values finds the cost lowest."""
    step = 0.3
    best = cost(machine)
    while step > 0.01:
        tries = [
            _scaled(machine, names, changes)
            for changes in itertools.product((1, 1 + step, 1 - step), repeat=len(names))
        ]
        found = min(tries, key=cost)
        if cost(found) < best:
            machine, best = found, cost(found)
        else:
            step /= 2
    return machine


def _scaled(machine: Machine, names: tuple[str, ...], by: Sequence[float]) -> Machine:
    changes: dict[str, Any] = {
        name: _rounded(getattr(machine, name) * factor) for name, factor in zip(names, by, strict=True)
    }
    return replace(machine, **changes)


def _rounded(x: float) -> float:
    return float(f"{x:.3g}")


def table(machine: Machine, overheads: dict[str, float]) -> list[str]:
    """Constants that are measured or fitted: as they are, and as they should be."""
    names = ("copy_bandwidth", "sustained_flops_bf16", "sustained_flops_mx", "bubble_clocks", *LOOP_CLOCKS)
    pairs = [(name, getattr(H200, name), getattr(machine, name)) for name in names]
    pairs += [(f'OVERHEAD["{kind}"]', OVERHEAD[kind], share) for kind, share in overheads.items()]
    return [f"{name:36} now {old:<12.4g} fitted {new:.4g}" for name, old, new in pairs]


def dump(results: Results) -> str:
    """JSON with a line for each measurement, for readable differences."""
    data = json.loads(json.dumps(asdict(results)))
    rows = ",\n".join(f"  {json.dumps(m)}" for m in data.pop("measurements"))
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    return f'{{\n{head},\n "measurements": [\n{rows}\n ]\n}}\n'


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="python -m mx_bench.project.refit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="results.json of mx-bench on an H200")
    parser.add_argument("--note", default="", help="what every new row should say of itself")
    parser.add_argument("--to", type=Path, default=check.MEASURED, help="where the rows are written")
    args = parser.parse_args(argv)
    try:
        old = load(check.MEASURED)
        results = merged(old, load(args.results), args.note)
    except ValueError as error:
        print(f"refit: error: {error}", file=sys.stderr)
        return 2
    args.to.write_text(dump(results))
    changed = sum(m not in old.measurements for m in results.measurements)
    print(f"wrote {args.to}: {len(results.measurements)} rows, {changed} of them new")
    machine, overheads = fitted(results)
    print("\n".join(table(machine, overheads)))
    with using(machine, overheads):
        rows = list(check.rows(results, machine))
    errors = [abs(row.error) for row in rows]
    print(
        f"{len(rows)} rows with the fitted constants: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    )
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        name = f"{row.error:+.1%}: {' | '.join(row.measurement.key)}"
        if abs(row.error) > check.TOLERANCE:
            print(
                f"  missed, {name}"
                + (f" ({row.reason})" if row.reason else ": fit again or give check.OUTSIDE a reason")
            )
        elif row.reason:
            print(f"  reached now, to be taken out of check.OUTSIDE, {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
