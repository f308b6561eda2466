"""Mutants of the grouped GEMM's PTX (`ptxsim.mutate`): does a test of its results and reports notice each?

    PYTHONPATH=tests python -m kernels.sm100.mutation [--jobs 2] [--every 8]      # writes data/mutation.json

The record is of every eighth mutant.

As tests/emulator/mutation.py does for the emulator's example GEMMs, with the kernel that ships: deadlocks, races, misuse
and wrong bits count as caught. `SURVIVORS` says why what no schedule shows is harmless.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from emulator.mutation import UNUSED_FIELDS
from emulator.mutation_run import MutationRun, Outcome, Subject
from mx_core import RowMap
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import TileConfig

from kernels.gemm_cases import Gemm
from kernels.sm100.cases import gemm

RECORD = Path(__file__).parent / "data" / "mutation.json"


def subject(case: Gemm, tile: TileConfig, unused_fields: frozenset[str]) -> Subject:
    """A GEMM on one cluster, which goes around its ring of stages and both accumulators more than once."""
    operands = case.operands()
    adds = case.mode == "wgrad"

    def launch() -> torch.Tensor:
        with forced_tile(tile):
            if adds:
                return case.run(*operands, out=torch.ones(case.shape), accumulate=True)
            return case.run(*operands)

    want = case.expected(*operands) + (torch.ones(case.shape) if adds else 0)
    return Subject(launch, want.to(case.out_dtype), {"sms": tile.cluster_size}, unused_fields)


SUBJECTS = {
    # A CTA pair, accumulators that share columns, groups that end inside a tile, empty ones, rows past the last, and more
    # groups than the scheduler warp has lanes.
    "fprop": functools.partial(
        subject,
        gemm("fprop", (150, 0, 300, *[0] * 29, 3, 20), 208, 160, row_map=RowMap.COMPACT, spare_rows=9),
        TileConfig(256, 256),
        UNUSED_FIELDS,
    ),
    # Multicast along M and N, MN-major operands, groups along K, sums added to what is there.
    "wgrad": functools.partial(
        subject,
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


RUN = MutationRun(RECORD, SUBJECTS, SURVIVORS)


def judge(name: str, index: int) -> Outcome:
    """Run one mutant until something shows."""
    return RUN.judge(name, index)


if __name__ == "__main__":
    RUN.main(__doc__, judge)
