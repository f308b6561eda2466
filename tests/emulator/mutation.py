"""The mutation run: every mutant of the PTX of our block-scaled GEMMs (`ptxsim.mutate`), run until a schedule shows it.

    PYTHONPATH=tests python -m emulator.mutation [--jobs 2]      # all of them; writes data/mutation.json

The GEMMs are the emulator's example and mx_kernels' grouped GEMM, each with one CTA to a tile and with a pair.

A mutant is caught when the emulator reports something (a race, a deadlock, a fault, an unmodelled operand) or the output
differs in a bit. What no schedule shows is a survivor, and needs an argument (`SURVIVORS`) why it is harmless.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ptxsim
import torch
from emulator.conformance.dsl import example
from ptxsim.mutate import Mutant, mutants

RECORD = Path(__file__).parent / "data" / "mutation.json"
SCHEDULES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 13)))
UNUSED_FIELDS = frozenset({"leading byte offset"})
"""PTX ISA 9.7.16.3.1.1: not used by swizzled K-major layouts (A, B); `tcgen05.cp.32x128b` has one 16-byte column."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant. `caught` is None for a survivor."""

    name: str
    instruction: str
    caught: str | None


@dataclass
class Subject:
    """A compiled kernel with its inputs and its right output; `run` launches it with some PTX."""

    launch: Callable[[], torch.Tensor]
    want: torch.Tensor
    options: dict[str, object]  # of the emulated GPU
    ptx: str = ""
    instructions: int = 0

    def __post_init__(self) -> None:
        """Compile and run it once, keep its PTX."""
        with ptxsim.gpu("sm_100a", **self.options) as gpu:
            gpu.on_launch = lambda text, *_: setattr(self, "ptx", text)
            assert torch.equal(self.launch(), self.want)
        self.instructions = gpu.launches[-1].instructions

    def run(self, ptx: str, schedule: str, seed: int) -> str | None:
        """None if the output is right and nothing was reported, else what showed."""
        with ptxsim.gpu(
            "sm_100a", schedule=schedule, seed=seed, max_instructions=8 * self.instructions, **self.options
        ) as gpu:
            _replace_ptx(gpu, ptx)
            try:
                out = self.launch()
            except ptxsim.PtxsimError as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return None if torch.equal(out, self.want) else "wrong output"


def _replace_ptx(gpu: ptxsim.GPU, ptx: str) -> None:
    launch = gpu.launch_from_host
    gpu.launch_from_host = lambda _text, name, config, params: launch(ptx, name, config, params)  # type: ignore[method-assign]


def _example(ctas: int) -> Subject:
    """Four output tiles to a CTA or pair, three K tiles, so that every buffer is used again."""
    from cutlass import cute

    module = example("blockscaled_gemm")
    operands = module.operands(512 * ctas, 128, 384, exact=True, seed=ctas)
    with ptxsim.gpu("sm_100a"):
        arguments, d = module.arguments(*operands, max_ctas=ctas)
        compiled = cute.compile(module.BlockscaledGemm(ctas, stages=2), *arguments)

    def launch() -> torch.Tensor:
        d.fill_(float("nan"))
        compiled(*arguments)
        return d[..., 0].clone()

    return Subject(launch, module.reference(*operands).to(torch.bfloat16), {})


def _grouped(ctas: int) -> Subject:
    """MXFP8 fprop: the ring of stages and both accumulators go around more than once.

    Two ragged groups, with enough empty ones between them that the scheduler reads the offsets in two rounds; NaN codes
    in the rows past the last group.
    """
    from kernels.sm100.cases import gemm
    from mx_core import RowMap
    from mx_kernels.sm100.backend import forced_tile
    from mx_kernels.sm100.config import TileConfig

    case = gemm("fprop", (150, *[0] * 32, 300), 208, 384, row_map=RowMap.COMPACT, spare_rows=9)
    tile = TileConfig(128 * ctas, 128, cluster_m=ctas)
    operands = case.operands()

    def launch() -> torch.Tensor:
        with forced_tile(tile):
            return case.run(*operands)

    want = case.expected(*operands).to(case.out_dtype)
    return Subject(launch, want, {"sms": ctas, "tmem_fences": True})


SUBJECTS = {
    "one_cta": functools.partial(_example, 1),
    "two_ctas": functools.partial(_example, 2),
    "grouped_one_cta": functools.partial(_grouped, 1),
    "grouped_two_ctas": functools.partial(_grouped, 2),
}


@functools.cache
def subject(name: str) -> Subject:
    """A kernel of `SUBJECTS`, ready to run."""
    torch.set_num_threads(1)
    return SUBJECTS[name]()


@functools.cache
def all_mutants(name: str) -> list[Mutant]:
    """In the order of the text."""
    return list(mutants(subject(name).ptx, unused_fields=UNUSED_FIELDS))


def judge(name: str, index: int) -> Outcome:
    """Run one mutant until something shows."""
    mutant = all_mutants(name)[index]
    for schedule, seed in SCHEDULES:
        shown = subject(name).run(mutant.ptx, schedule, seed)
        if shown is not None:
            return Outcome(mutant.name, mutant.instruction, f"{schedule}{seed or ''}: {shown}")
    return Outcome(mutant.name, mutant.instruction, None)


def recorded(name: str) -> list[Outcome]:
    """The last complete run."""
    return [Outcome(*row) for row in json.loads(RECORD.read_text())[name]]


ARRIVALS_OF_OWN_WARPS = (
    "`producer_tail` of a pipeline that warps of the CTA itself release (accumulators, tile descriptions): it waits for their plain "
    "arrivals, and a CTA lives until its last warp has ended."
)
TIME_OUT = (
    "The first wait of the operand pipeline's `producer_tail` without its loop: it still blocks until the phase completes or the time "
    "limit of 10 ms is over. The emulator lets a wait that has to block give up early, but here the stage is free before the warp comes, in all "
    "fourteen schedules and in 47 further seeds; without the wait itself (the line above) the mutant is caught."
)
LATER_WAIT = (
    "Not the last tcgen05.wait::ld of a tile: each load's registers are read before the next load (a true dependency, "
    "which needs no wait), and the last wait completes all earlier loads before the accumulator is released."
)
TWICE = "`fence.mbarrier_init` stands twice in a row: either is enough."
HINT = "Skips `prefetch.tensormap`, a hint."
SURVIVORS: dict[str, dict[str, str]] = {
    "one_cta": {
        **dict.fromkeys(
            ("410:predicate:guard dropped", "422:wait:succeeds at once", "422:wait:other parity", "423:predicate:guard dropped"),
            ARRIVALS_OF_OWN_WARPS,
        ),
        **dict.fromkeys(("507:wait:deleted", "577:wait:deleted", "647:wait:deleted"), LATER_WAIT),
    },
    "two_ctas": {
        **dict.fromkeys(("559:wait:deleted", "629:wait:deleted", "699:wait:deleted"), LATER_WAIT),
        **dict.fromkeys(("102:fence:deleted", "103:fence:deleted"), TWICE),
    },
    "grouped_two_ctas": {
        **dict.fromkeys(("148:fence:deleted", "153:fence:deleted"), TWICE),
        "157:predicate:guard dropped": HINT,
        **dict.fromkeys(
            (f"{n}:{change}" for line in (436, 454, 472, 490) for n, change in ((line, "wait:succeeds at once"), (line + 1, "predicate:guard dropped"))),
            ARRIVALS_OF_OWN_WARPS,
        ),
        "678:predicate:guard dropped": TIME_OUT,
        "1220:wait:deleted": LATER_WAIT,
    },
    "grouped_one_cta": {
        "134:predicate:guard dropped": HINT,
        **dict.fromkeys(
            (f"{n}:{change}" for line in (409, 427, 445, 463) for n, change in ((line, "wait:succeeds at once"), (line + 1, "predicate:guard dropped"))),
            ARRIVALS_OF_OWN_WARPS,
        ),
        "1088:wait:deleted": LATER_WAIT,
    },
}  # fmt: skip
"""Subject → mutant → why it is harmless."""


def argument(name: str, mutant: str) -> str | None:
    """Why this survivor is harmless, if somebody said so."""
    return SURVIVORS[name].get(mutant)


def report() -> str:
    """The record as the tables of docs/ptxsim_evidence.md."""
    names = list(json.loads(RECORD.read_text()))
    outcomes = {name: recorded(name) for name in names}
    lines = ["| subject | mutants | caught | by | first seen under |", "|---|---|---|---|---|"]
    for name in names:
        caught = [o.caught for o in outcomes[name] if o.caught]
        how = collections.Counter(c.split(": ")[1] for c in caught)
        when = collections.Counter(c.split(":")[0].rstrip("0123456789") for c in caught)
        by, under = (", ".join(f"{n} {k}" for k, n in c.most_common()) for c in (how, when))
        lines.append(
            f"| {name} | {len(outcomes[name])} | {len(caught)} ({len(caught) / len(outcomes[name]):.1%}) | {by} | {under} |"
        )
    lines += ["", f"| kind | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    kinds = dict.fromkeys(o.name.split(":")[1] for name in names for o in outcomes[name])
    for kind in kinds:
        cells = []
        for name in names:
            mine = [o for o in outcomes[name] if o.name.split(":")[1] == kind]
            cells.append(f"{sum(o.caught is not None for o in mine)} of {len(mine)}" if mine else "–")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", "| subject | line: mutant | why harmless |", "|---|---|---|"]
    for name in names:
        why: dict[str | None, list[str]] = {}
        for o in outcomes[name]:
            if o.caught is None:
                line, kind, change = o.name.split(":", 2)
                why.setdefault(argument(name, o.name), []).append(
                    f"{line}: {kind}, {change} (`{o.instruction}`)"
                )
        lines += [f"| {name} | {'; '.join(mutants)} | {reason} |" for reason, mutants in why.items()]
    return "\n".join(lines)


def main() -> None:
    """Run all mutants of all subjects and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--subjects", nargs="*", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--report", action="store_true", help="run nothing; print the record as tables")
    args = parser.parse_args()
    if args.report:
        print(report())
        return
    record = json.loads(args.record.read_text()) if args.record.exists() else {}
    for name in args.subjects:
        start, count = time.time(), len(all_mutants(name))
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            outcomes = []
            for outcome in pool.map(judge, [name] * count, range(count), chunksize=4):
                outcomes.append(outcome)
                if outcome.caught is None:
                    print(f"survives: {outcome.name}  {outcome.instruction[:110]}", flush=True)
        caught = sum(o.caught is not None for o in outcomes)
        how = collections.Counter((o.caught or ": survives").split(": ")[1] for o in outcomes)
        print(
            f"{name}: {caught} of {count} caught ({caught / count:.1%}), {dict(how)}, {time.time() - start:.0f} s",
            flush=True,
        )
        record[name] = [[o.name, o.instruction, o.caught] for o in outcomes]
        args.record.write_text(
            "{"
            + ",\n".join(
                f'"{k}": [\n' + ",\n".join(json.dumps(r) for r in v) + "\n]" for k, v in record.items()
            )
            + "}\n"
        )


if __name__ == "__main__":
    main()
