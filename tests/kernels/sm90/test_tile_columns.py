"""Tiles of 256 columns that reach past the output's last one, in the emulator: what is multiplied and stored of them, and what not."""

import pytest
import torch
from mx_core import RowMap
from mx_kernels.sm90 import config
from mx_kernels.sm90.config import TILE_K, TileConfig
from support.gemm_data import poison

from kernels.gemm_cases import Gemm

pytest_plugins = ["ptxsim.pytest_plugin"]

EQUAL = ((128, 128), RowMap.ALIGNED)
SKEWED = ((140, 0, 3), RowMap.COMPACT)
SINGLE, PAIR = TileConfig(128, 256), TileConfig(128, 256, cluster_m=2)
WARPS = 4  # of a warpgroup


def gemm(mode: str, columns: int, sizes: tuple[int, ...], row_map: RowMap, out_dtype=torch.bfloat16) -> Gemm:
    """A problem with so many columns of its output, and two K tiles."""
    n, k = (columns, 72) if mode == "fprop" else (72, columns)
    spare = 9 if row_map is RowMap.COMPACT else 0
    return Gemm(mode, sizes, n, k, row_map=row_map, out_dtype=out_dtype, spare_rows=spare)


def check(case: Gemm) -> None:
    """Exact, between memory that stays as it was."""
    a, b = case.operands()
    memory = poison(case.shape[0] + 2, *case.shape[1:], dtype=case.out_dtype)
    got, want = case.run(a, b, out=memory[1:-1]), case.expected(a, b).to(case.out_dtype)
    assert torch.equal(got, want), f"{(got != want).sum()} of {want.numel()} elements are wrong"
    assert memory[[0, -1]].isnan().all()


@pytest.mark.parametrize(
    ("tile", "columns", "groups"),
    [
        (SINGLE, 8, SKEWED),
        (SINGLE, 384, EQUAL),
        (SINGLE, 392, SKEWED),
        (PAIR, 128, EQUAL),
        (PAIR, 264, SKEWED),
    ],
    ids=lambda x: "equal" if x is EQUAL else "skewed" if x is SKEWED else str(x),
)
@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_the_last_columns_are_exact(emulated_gpu, monkeypatch, tile, mode, columns, groups):
    """8 to 136 columns in the last tile; wide and narrow tiles follow each other in the same accumulators."""
    monkeypatch.setattr(config, "choose_tile", lambda *_: tile)
    emulated_gpu("sm_90a", sms=2)
    check(gemm(mode, columns, *groups))


@pytest.mark.parametrize("columns", [136, 520])
def test_tiles_past_the_last_column(emulated_gpu, monkeypatch, columns):
    """Clusters along N, the second CTA of which has no column, or full and narrow tiles; FP32: eight slabs to a tile."""
    monkeypatch.setattr(config, "choose_tile", lambda *_: TileConfig(128, 256, cluster_n=2))
    emulated_gpu("sm_90a", sms=2)
    check(gemm("wgrad", columns, *SKEWED, out_dtype=torch.float32))


@pytest.mark.parametrize("tile", [SINGLE, PAIR, TileConfig(128, 256, cluster_n=2)], ids=str)
@pytest.mark.parametrize(("columns", "multiplied", "stored"), [(8, 128, 2), (392, 512, 8), (640, 640, 10)])
def test_half_a_tile_costs_half(emulated_gpu, monkeypatch, tile, columns, multiplied, stored):
    """Columns of all wgmmas, and slabs of 64 columns."""
    monkeypatch.setattr(config, "choose_tile", lambda *_: tile)
    gpu = emulated_gpu("sm_90a", sms=2)
    check(gemm("fprop", columns, (100, 0, 10), RowMap.ALIGNED))
    counts = gpu.launches[-1].counts
    assert counts["wgmma columns"] == (2 + 1) * WARPS * multiplied * (2 * TILE_K // 16)  # 64-row parts
    assert counts["tma_store"] == 2 * 2 * stored
