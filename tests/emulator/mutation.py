"""The mutation run: every mutant of the example GEMMs' PTX (`ptxsim.mutate`), run until a schedule shows it.

    PYTHONPATH=tests python -m emulator.mutation [--jobs 2]      # all of them; writes data/mutation.json

A mutant is caught when the emulator reports something (a race, a deadlock, a fault, an unmodelled operand) or the output
differs in a bit. What no schedule shows is a survivor, and needs an argument (`SURVIVORS`) why it is harmless.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
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
SCHEDULES = (("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 9)))
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
    ptx: str
    instructions: int

    def run(self, ptx: str, schedule: str, seed: int) -> str | None:
        """None if the output is right and nothing was reported, else what showed."""
        with ptxsim.gpu(
            "sm_100a", schedule=schedule, seed=seed, max_instructions=8 * self.instructions
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


@functools.cache
def subject(name: str) -> Subject:
    """ "one_cta" or "two_ctas": four output tiles to a CTA or pair, three K tiles, so that every buffer is used again."""
    from cutlass import cute

    module = example("blockscaled_gemm")
    ctas = {"one_cta": 1, "two_ctas": 2}[name]
    operands = module.operands(512 * ctas, 128, 384, exact=True, seed=ctas)
    texts: list[str] = []
    with ptxsim.gpu("sm_100a") as gpu:
        arguments, d = module.arguments(*operands, max_ctas=ctas)
        compiled = cute.compile(module.BlockscaledGemm(ctas, stages=2), *arguments)
        original = gpu.launch_from_host

        def note(text: str, *rest: object) -> None:
            texts.append(text)
            original(text, *rest)

        gpu.launch_from_host = note  # type: ignore[method-assign]

        def launch() -> torch.Tensor:
            d.fill_(float("nan"))
            compiled(*arguments)
            return d[..., 0].clone()

        want = launch()
    assert torch.equal(want, module.reference(*operands).to(torch.bfloat16))
    return Subject(launch, want, texts[0], gpu.launches[-1].instructions)


SUBJECTS = ("one_cta", "two_ctas")


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


TAIL = (
    "`producer_tail` of the operand or accumulator pipeline: the warp waits for the last stages to be released so that its CTA "
    "outlives those arrivals. Here the CTA outlives them anyway: its epilogue ends after the last accumulator's commit, which "
    "follows every operand commit in the issuing thread's order, and a release comes from warps of the CTA itself. (The ISA "
    "does not promise that arrivals keep the order of their commits; without the tail one relies on it.)"
)
LATER_WAIT = (
    "One of the first three of four tcgen05.wait::ld: each load's registers are read before the next load (a true dependency, "
    "which needs no wait), and the fourth wait completes all earlier loads before the accumulator is released."
)
TWICE = "`fence.mbarrier_init` stands twice in a row: either is enough."
SURVIVORS: dict[str, dict[str, str]] = {
    "one_cta": {
        **dict.fromkeys(
            ("187:wait:succeeds at once", "188:predicate:guard dropped", "205:wait:succeeds at once", "205:wait:other parity",
             "206:predicate:guard dropped", "410:predicate:guard dropped", "422:wait:succeeds at once", "422:wait:other parity",
             "423:predicate:guard dropped"), TAIL,
        ),
        **dict.fromkeys(("507:wait:deleted", "577:wait:deleted", "647:wait:deleted"), LATER_WAIT),
    },
    "two_ctas": {
        **dict.fromkeys(
            ("227:wait:succeeds at once", "228:predicate:guard dropped", "245:wait:succeeds at once", "245:wait:other parity",
             "246:predicate:guard dropped"), TAIL,
        ),
        **dict.fromkeys(("559:wait:deleted", "629:wait:deleted", "699:wait:deleted"), LATER_WAIT),
        **dict.fromkeys(("102:fence:deleted", "103:fence:deleted"), TWICE),
    },
}  # fmt: skip
"""Subject → mutant → why it is harmless."""


def argument(name: str, mutant: str) -> str | None:
    """Why this survivor is harmless, if somebody said so."""
    return SURVIVORS[name].get(mutant)


def main() -> None:
    """Run all mutants of all subjects and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--subjects", nargs="*", default=SUBJECTS, choices=SUBJECTS)
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in args.subjects:
        start, count = time.time(), len(all_mutants(name))
        with ProcessPoolExecutor(args.jobs) as pool:
            outcomes = []
            for outcome in pool.map(judge, [name] * count, range(count), chunksize=4):
                outcomes.append(outcome)
                if outcome.caught is None:
                    print(f"survives: {outcome.name}  {outcome.instruction[:110]}", flush=True)
        caught = sum(o.caught is not None for o in outcomes)
        how = collections.Counter((o.caught or "survives").split(":")[0] for o in outcomes)
        print(
            f"{name}: {caught} of {count} caught ({caught / count:.1%}), {dict(how)}, {time.time() - start:.0f} s",
            flush=True,
        )
        record[name] = [[o.name, o.instruction, o.caught] for o in outcomes]
        RECORD.write_text(
            "{"
            + ",\n".join(
                f'"{k}": [\n' + ",\n".join(json.dumps(r) for r in v) + "\n]" for k, v in record.items()
            )
            + "}\n"
        )


if __name__ == "__main__":
    main()
