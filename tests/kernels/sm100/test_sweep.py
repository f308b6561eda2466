"""The full sweep of the Blackwell GEMM: every tile x mode x group sizes, with formats, results, row maps, tails and schedules
in rotation. Slow; its last run is recorded in docs/sm100_gemm.md.

    uv run pytest -m slow --maxprocesses 16 tests/kernels/sm100/test_sweep.py
"""

import itertools

import pytest
import torch
from mx_core import RowMap
from mx_kernels.sm100.backend import forced_tile
from support.bounds import assert_sum_error
from support.gemm_data import GROUP_SIZES

from kernels.sm100.cases import MODES, SCHEDULES, TILES, check_exact, gemm

pytest_plugins = ["ptxsim.pytest_plugin"]
pytestmark = pytest.mark.slow

E4M3, E5M2, BF16 = "mxfp8_e4m3", "mxfp8_e5m2", "bf16"
FORMATS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (BF16, BF16))
TAILS = ((16, 32), (128, 128), (272, 144), (400, 80), (64, 528))  # n, k
SIZES = {**GROUP_SIZES, "one row each": [1] * 9, "many": [3, 0, 131, 7, 1, 0, 64, 255, 2, 30]}


def rotation(mode: str, index: int):
    """The `index`-th (formats, result, row map, tail, schedule); every list turns at its own rate."""
    formats = FORMATS[index % 4]
    out = (torch.bfloat16, torch.float32)[index // 2 % 2]
    maps = [RowMap.ALIGNED, RowMap.COMPACT] if mode != "wgrad" or formats[0] == BF16 else [RowMap.ALIGNED]
    return formats, out, maps[index // 3 % len(maps)], TAILS[index % 5], SCHEDULES[index // 4 % 5]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_exact(emulated_gpu, mode, tile):
    first = TILES.index(tile) * len(SIZES) + MODES.index(mode)
    for index, sizes in enumerate(SIZES.values(), first):
        formats, out, row_map, (n, k), schedule = rotation(mode, index)
        emulated_gpu("sm_100a", sms=4 * (1 + index % 3), schedule=schedule, seed=index)
        with forced_tile(tile):
            spare = 0 if row_map is RowMap.ALIGNED else index % 50
            check_exact(gemm(mode, tuple(sizes), n, k, formats, row_map, out, spare))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("mode", "tile"), list(itertools.product(MODES, TILES[3::4])), ids=str)
def test_random_bound(emulated_gpu, mode, tile, schedule):
    for seed, formats in enumerate(FORMATS):
        emulated_gpu("sm_100a", sms=4, schedule=schedule, seed=seed)
        case = gemm(mode, (200, 1, 0, 90), 144, 288, formats, out_dtype=torch.float32)
        a, b = case.operands(exact=False, seed=seed)
        with forced_tile(tile):
            got = case.run(a, b)
        for a_MK, b_NK, where in case.products(a, b):
            assert_sum_error(got[where], a_MK, b_NK)


C13 = ([4096, *[0] * 31], [*[0] * 31, 4096], [4065, *[1] * 31], [1, 8, 16, 32, 63])


@pytest.mark.parametrize("run", range(50))
def test_c13_fifty_runs(emulated_gpu, run):
    """C13 in its full size, every mode and distribution four times or more, under random completion."""
    emulated_gpu("sm_100a", sms=6, schedule="random", seed=run)
    check_exact(gemm(MODES[run % 3], tuple(C13[run % 4]), 32, 32))
