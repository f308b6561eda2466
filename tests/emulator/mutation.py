"""The mutation run: every mutant of the PTX of our block-scaled GEMMs (`ptxsim.mutate`), run until a schedule shows it.

    PYTHONPATH=tests python -m emulator.mutation [--jobs 2]      # all of them; writes data/mutation.json

The GEMMs are the emulator's example and mx_kernels' grouped GEMM, each with one CTA to a tile and with a pair.

A mutant is caught when the emulator reports something (a race, a deadlock, a fault, an unmodelled operand) or the output
differs in a bit. What no schedule shows is a survivor, and needs an argument (`SURVIVORS`) why it is harmless.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ptxsim
import torch
from emulator.conformance.dsl import example
from emulator.mutation_run import MutationRun, Outcome, Subject

RECORD = Path(__file__).parent / "data" / "mutation.json"
UNUSED_FIELDS = frozenset({"leading byte offset"})
"""PTX ISA 9.7.16.3.1.1: not used by swizzled K-major layouts (A, B); `tcgen05.cp.32x128b` has one 16-byte column."""


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

    return Subject(launch, module.reference(*operands).to(torch.bfloat16), {}, UNUSED_FIELDS)


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
    return Subject(launch, want, {"sms": ctas, "tmem_fences": True}, UNUSED_FIELDS)


SUBJECTS = {
    "one_cta": functools.partial(_example, 1),
    "two_ctas": functools.partial(_example, 2),
    "grouped_one_cta": functools.partial(_grouped, 1),
    "grouped_two_ctas": functools.partial(_grouped, 2),
}


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


RUN = MutationRun(RECORD, SUBJECTS, SURVIVORS)


def judge(name: str, index: int) -> Outcome:
    """Run one mutant until something shows."""
    return RUN.judge(name, index)


if __name__ == "__main__":
    RUN.main(__doc__, judge)
