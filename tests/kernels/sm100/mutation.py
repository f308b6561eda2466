"""Mutants of the grouped GEMM's PTX (`ptxsim.mutate`): does a test of its results and reports notice each?

    PYTHONPATH=tests python -m kernels.sm100.mutation [--jobs 2] [--every 8]      # writes data/mutation.json

The record is of every eighth mutant.

As tests/emulator/mutation.py does for the emulator's example GEMMs, with the kernel that ships: deadlocks, races, misuse
and wrong bits count as caught. `SURVIVORS` says why what no schedule shows is harmless.
"""

import argparse
import collections
import functools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ptxsim
import torch
from emulator.mutation import SCHEDULES, UNUSED_FIELDS, Outcome
from mx_core import RowMap
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import TileConfig
from ptxsim.mutate import Mutant, mutants

from kernels.gemm_cases import Gemm
from kernels.sm100.cases import gemm

RECORD = Path(__file__).parent / "data" / "mutation.json"


@dataclass(frozen=True)
class Subject:
    """A GEMM on one cluster, which goes around its ring of stages and both accumulators more than once."""

    case: Gemm
    tile: TileConfig
    unused_fields: frozenset[str]  # of shared-memory descriptors


SUBJECTS = {
    # A CTA pair, accumulators that share columns, groups that end inside a tile, empty ones, rows past the last, and more
    # groups than the scheduler warp has lanes.
    "fprop": Subject(
        gemm("fprop", (150, 0, 300, *[0] * 29, 3, 20), 208, 160, row_map=RowMap.COMPACT, spare_rows=9),
        TileConfig(256, 256),
        UNUSED_FIELDS,
    ),
    # Multicast along M and N, MN-major operands, groups along K, sums added to what is there.
    "wgrad": Subject(
        gemm("wgrad", (200, 0, 130, 129), 272, 112, out_dtype=torch.float32),
        TileConfig(128, 64, 2, 2),
        frozenset(),
    ),
}


TAIL = (
    "`producer_tail` of the tile descriptions: the scheduler warp waits until all are read. Nothing follows it, and its CTA lives "
    "on until the epilogue has read the last one."
)
SURVIVORS = {
    "fprop": {"450:wait:other parity": TAIL},
    "wgrad": {
        "290:predicate:guard dropped": "The second round of 32 groups, where `group > 0` always holds; and this subject has four groups.",
        "425:wait:succeeds at once": TAIL,
        "462:predicate:guard dropped": TAIL,
    },
}
"""Subject → recorded mutant → why it is harmless."""


@dataclass
class Kernel:
    """A subject, compiled, with operands and its right result; `run` launches it with some PTX."""

    subject: Subject
    ptx: str = ""
    max_instructions: int | None = None

    def __post_init__(self) -> None:
        case = self.subject.case
        self.operands = case.operands()
        before = torch.ones(case.shape) if case.mode == "wgrad" else 0
        self.want = (case.expected(*self.operands) + before).to(case.out_dtype)

    def launch(self, replacement: str | None, schedule: str, seed: int) -> tuple[torch.Tensor, ptxsim.GPU]:
        """Run the kernel, with its own PTX (which is kept) or another."""
        case, tile = self.subject.case, self.subject.tile
        with (
            ptxsim.gpu("sm_100a", sms=tile.cluster_size, schedule=schedule, seed=seed, max_instructions=self.max_instructions) as gpu,
            forced_tile(tile),
        ):  # fmt: skip
            original = gpu.launch_from_host

            def launch(text: str, *rest) -> None:
                self.ptx = self.ptx or text
                original(replacement or text, *rest)

            gpu.launch_from_host = launch  # type: ignore[method-assign]
            if case.mode == "wgrad":
                return case.run(*self.operands, out=torch.ones(case.shape), accumulate=True), gpu
            return case.run(*self.operands), gpu

    def judge(self, mutant: Mutant) -> Outcome:
        """Run a mutant until a schedule shows it."""
        for schedule, seed in SCHEDULES:
            try:
                shown = (
                    None
                    if torch.equal(self.launch(mutant.ptx, schedule, seed)[0], self.want)
                    else "wrong output"
                )
            except ptxsim.PtxsimError as error:
                shown = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            if shown is not None:
                return Outcome(mutant.name, mutant.instruction, f"{schedule}{seed or ''}: {shown}")
        return Outcome(mutant.name, mutant.instruction, None)


@functools.cache
def kernel(name: str) -> Kernel:
    """A subject's kernel; its unchanged PTX must be right."""
    made = Kernel(SUBJECTS[name])
    got, gpu = made.launch(None, "early", 0)
    assert torch.equal(got, made.want)
    made.max_instructions = 8 * gpu.launches[-1].instructions
    return made


@functools.cache
def all_mutants(name: str) -> list[Mutant]:
    """In the order of the text."""
    return list(mutants(kernel(name).ptx, unused_fields=SUBJECTS[name].unused_fields))


def judge(name: str, index: int) -> Outcome:
    torch.set_num_threads(1)
    return kernel(name).judge(all_mutants(name)[index])


def recorded(name: str) -> list[Outcome]:
    """The last recorded run."""
    return [Outcome(*row) for row in json.loads(RECORD.read_text())[name]]


def main() -> None:
    """Run the mutants and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="take every n-th mutant only")
    parser.add_argument("--subjects", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    for name in options.subjects:
        start = time.time()
        indices = range(0, len(all_mutants(name)), options.every)
        outcomes = []
        # Spawned: where there is a GPU driver, compiling has started it, and it does not survive a fork.
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            for outcome in pool.map(judge, [name] * len(indices), indices):
                outcomes.append(outcome)
                if outcome.caught is None:
                    print(f"survives: {outcome.name}  {outcome.instruction[:110]}", flush=True)
        how = collections.Counter(
            (o.caught or "survives").split(":")[1 if o.caught else 0].strip() for o in outcomes
        )
        caught = len(outcomes) - how["survives"]
        print(
            f"{name}: {caught} of {len(outcomes)} caught ({caught / len(outcomes):.1%}), {dict(how)}, {time.time() - start:.0f} s",
            flush=True,
        )
        record[name] = [[o.name, o.instruction, o.caught] for o in outcomes]
        rows = (f'"{k}": [\n' + ",\n".join(json.dumps(row) for row in v) + "\n]" for k, v in record.items())
        options.record.write_text("{" + ",\n".join(rows) + "}\n")


if __name__ == "__main__":
    main()
