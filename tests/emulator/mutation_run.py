"""What a run of mutants is: subjects, judging a mutant under schedules, the pool of processes, the record and its tables.

`emulator/mutation.py` and `kernels/sm100/mutation.py` say which kernels, and why what no schedule shows is harmless.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import ptxsim
import torch
from ptxsim.mutate import Mutant, mutants

SCHEDULES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 13)))


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
    unused_fields: frozenset[str] = frozenset()  # of shared-memory descriptors
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

    def judge(self, mutant: Mutant) -> Outcome:
        """Run a mutant until a schedule shows it."""
        for schedule, seed in SCHEDULES:
            shown = self.run(mutant.ptx, schedule, seed)
            if shown is not None:
                return Outcome(mutant.name, mutant.instruction, f"{schedule}{seed or ''}: {shown}")
        return Outcome(mutant.name, mutant.instruction, None)


def _replace_ptx(gpu: ptxsim.GPU, ptx: str) -> None:
    launch = gpu.launch_from_host
    gpu.launch_from_host = lambda _text, name, config, params: launch(ptx, name, config, params)  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class MutationRun:
    """Kernels by name, their recorded outcomes, and the arguments for survivors."""

    record: Path
    subjects: Mapping[str, Callable[[], Subject]]
    survivors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Subject → mutant → why it is harmless."""

    @functools.cache  # noqa: B019 - one run for each module
    def subject(self, name: str) -> Subject:
        """A kernel, ready to run."""
        torch.set_num_threads(1)
        return self.subjects[name]()

    @functools.cache  # noqa: B019
    def all_mutants(self, name: str) -> list[Mutant]:
        """In the order of the text."""
        subject = self.subject(name)
        return list(mutants(subject.ptx, unused_fields=subject.unused_fields))

    def judge(self, name: str, index: int) -> Outcome:
        """Run one mutant until something shows."""
        return self.subject(name).judge(self.all_mutants(name)[index])

    def recorded(self, name: str) -> list[Outcome]:
        """The last recorded run."""
        return read(self.record)[name]

    def argument(self, name: str, mutant: str) -> str | None:
        """Why this survivor is harmless, if somebody said so."""
        return self.survivors.get(name, {}).get(mutant)

    def main(self, description: str | None, judge: Callable[[str, int], Outcome]) -> None:
        """The command: run the mutants and write the record, or print it.

        Args:
            description: of the command.
            judge: a function of the caller's module that calls `self.judge`: what other processes can find by its name.
        """
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--jobs", type=int, default=1)
        parser.add_argument("--every", type=int, default=1, help="take every n-th mutant only")
        parser.add_argument("--subjects", nargs="*", default=[*self.subjects], choices=[*self.subjects])
        parser.add_argument("--record", type=Path, default=self.record)
        parser.add_argument("--report", action="store_true", help="run nothing; print the record as tables")
        args = parser.parse_args()
        if args.report:
            if not args.record.exists():
                parser.error(f"--record: {args.record} does not exist")
            print(self.report(read(args.record)))
            return
        record = read(args.record) if args.record.exists() else {}
        # Spawned: where there is a GPU driver, compiling has started it, and it does not survive a fork.
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            for name in args.subjects:
                start, outcomes = time.time(), []
                indices = range(0, len(self.all_mutants(name)), args.every)
                for outcome in pool.map(judge, [name] * len(indices), indices, chunksize=4):
                    outcomes.append(outcome)
                    if outcome.caught is None:
                        print(f"survives: {outcome.name}  {outcome.instruction[:110]}", flush=True)
                caught = [o.caught.split(": ")[1] for o in outcomes if o.caught]
                how = dict(collections.Counter(caught))
                share = f"{len(caught)} of {len(outcomes)} caught ({len(caught) / len(outcomes):.1%})"
                print(f"{name}: {share}, {how}, {time.time() - start:.0f} s", flush=True)
                record[name] = outcomes
                write(args.record, record)

    def report(self, record: Mapping[str, list[Outcome]]) -> str:
        """A record as the tables of docs/ptxsim_evidence.md and docs/sm100_gemm.md."""
        lines = ["| subject | mutants | caught | by | first seen under |", "|---|---|---|---|---|"]
        for name, outcomes in record.items():
            caught = [o.caught for o in outcomes if o.caught]
            how = collections.Counter(c.split(": ")[1] for c in caught)
            when = collections.Counter(c.split(":")[0].rstrip("0123456789") for c in caught)
            by, under = (", ".join(f"{n} {k}" for k, n in c.most_common()) for c in (how, when))
            share = f"{len(caught)} ({len(caught) / len(outcomes):.1%})"
            lines.append(f"| {name} | {len(outcomes)} | {share} | {by} | {under} |")
        lines += ["", f"| kind | {' | '.join(record)} |", "|---" * (len(record) + 1) + "|"]
        for kind in dict.fromkeys(o.name.split(":")[1] for outcomes in record.values() for o in outcomes):
            cells = []
            for outcomes in record.values():
                mine = [o for o in outcomes if o.name.split(":")[1] == kind]
                cells.append(f"{sum(o.caught is not None for o in mine)} of {len(mine)}" if mine else "–")
            lines.append(f"| {kind} | {' | '.join(cells)} |")
        lines += ["", "| subject | line: mutant | why harmless |", "|---|---|---|"]
        for name, outcomes in record.items():
            why: dict[str | None, list[str]] = {}
            for o in outcomes:
                if o.caught is None:
                    line, kind, change = o.name.split(":", 2)
                    text = f"{line}: {kind}, {change} (`{o.instruction}`)"
                    why.setdefault(self.argument(name, o.name), []).append(text)
            lines += [f"| {name} | {'; '.join(texts)} | {reason} |" for reason, texts in why.items()]
        return "\n".join(lines)


def read(path: Path) -> dict[str, list[Outcome]]:
    """A record: outcomes by subject."""
    return {name: [Outcome(*row) for row in rows] for name, rows in json.loads(path.read_text()).items()}


def write(path: Path, record: Mapping[str, list[Outcome]]) -> None:
    """JSON with a line for each mutant."""
    subjects = (
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps([o.name, o.instruction, o.caught]) for o in outcomes)
        + "\n]"
        for name, outcomes in record.items()
    )
    path.write_text("{" + ",\n".join(subjects) + "}\n")
