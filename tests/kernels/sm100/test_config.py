"""What is refused before compiling, how memory is divided, and which tile the estimate takes."""

import dataclasses

import pytest
import torch
from mx_core import RowMap
from mx_kernels import arch, registry
from mx_kernels.problem import GemmProblem
from mx_kernels.sm100 import config
from mx_kernels.sm100.backend import BACKEND
from mx_kernels.sm100.config import GemmKey, TileConfig

E4M3 = "mxfp8_e4m3"
KEY = GemmKey("fprop", E4M3, E4M3, "bf16", True, True, False, TileConfig())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "bprop"}, "mode: expected fprop, dgrad or wgrad, got 'bprop'"),
        ({"a_format": "mxfp4_e2m1"}, "a: the Blackwell GEMM takes bf16, mxfp8_e4m3, mxfp8_e5m2 operands, got mxfp4_e2m1"),
        ({"b_format": "fp32"}, "b: the Blackwell GEMM takes .* got fp32"),
        ({"b_format": "bf16"}, "operands: both bf16 or both MXFP8, got mxfp8_e4m3 and bf16"),
        ({"out_dtype": "fp16"}, "out_dtype: expected bf16 or fp32, got fp16"),
        ({"accumulate": True}, "accumulate: only wgrad into an fp32 output accumulates, got fprop into bf16"),
        ({"mode": "wgrad", "accumulate": True}, "accumulate: .* got wgrad into bf16"),
        ({"mode": "wgrad", "aligned": False}, "wgrad of MXFP8 operands: expected ALIGNED rows"),
        ({"tile": TileConfig(64, 128, 1)}, "tile_m: expected 128 .* or 256 .*, got 64"),
        ({"tile": TileConfig(256, 96)}, "tile_n: expected 64, 128, 192 or 256, got 96"),
        ({"tile": TileConfig(256, 128, 1)}, "cluster: expected a multiple of 2 x 1 CTAs"),
        ({"tile": TileConfig(256, 128, 2, 16)}, "cluster: .* at most 16, got 2 x 16"),
        ({"tile": TileConfig(128, 128, 3)}, "cluster: expected a power of two of CTAs, got 3 x 1"),
        ({"tile": TileConfig(slab_bytes=32)}, "slab_bytes: expected 64 or 128, got 32"),
        ({"tile": TileConfig(supergroup=0)}, "supergroup: expected at least 1, got 0"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_kernels_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(KEY, **change)


@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("format", [E4M3, "bf16"])
@pytest.mark.parametrize("tile", [*config.TILES, *config.VARIANTS], ids=str)
def test_memory_fits(tile, format, out):
    key = GemmKey("wgrad", format, format, out, True, True, False, tile)
    memory = key.memory
    assert memory.smem_bytes <= config.SMEM_BYTES
    assert memory.stages >= 3
    assert memory.smem_bytes + memory.stage_bytes > config.SMEM_BYTES, "one more stage would fit"
    first, second = (0, tile.tile_n), (memory.acc_stride, memory.acc_stride + tile.tile_n)
    assert second[1] <= memory.sfa_column, "the second accumulator reaches into the scales"
    assert memory.acc_shared == (second[0] < first[1])
    # Overlapping accumulators: what they share is drained with the epilogue's first subtile.
    assert first[1] - second[0] <= key.store_n
    assert memory.sfb_column + 4 * memory.sfb_tiles == config.TMEM_COLUMNS or not key.scaled


def test_smaller_clusters_end_at_one_cta():
    for tile in (*config.TILES, *config.VARIANTS):
        sizes = []
        while tile is not None:
            dataclasses.replace(KEY, tile=tile)  # possible
            sizes.append(tile.cluster_size)
            tile = tile.smaller_cluster()
        assert sizes == [2**i for i in reversed(range(len(sizes)))]


SIZES = {  # rows, groups, columns of the output, the other extent → tile
    "large": ((131_072, 8, 7168, 2048), (256, 256)),
    "64 rows each": ((64 * 128, 128, 4096, 2048), (128, None)),
}


@pytest.mark.parametrize(("sizes", "tile"), SIZES.values(), ids=SIZES)
def test_estimate_picks_sensible_tiles(sizes, tile):
    chosen = config.choose_tile("fprop", E4M3, *sizes, 148)
    assert chosen.tile_m == tile[0]
    assert tile[1] in (None, chosen.tile_n)


def test_estimate_fills_the_gpu_before_it_takes_large_tiles():
    few = config.choose_tile("fprop", E4M3, 256, 1, 4096, 4096, 148)
    assert few.tile_m * few.tile_n < 256 * 256


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_registry_offers_blackwell(target):
    problem = GemmProblem("fprop", E4M3, E4M3, torch.bfloat16)
    with arch.emulated(target, 148):
        assert registry.why_not("sm100", "grouped_gemm", problem, torch.device("cpu")) is None
    with arch.emulated("sm_90a", 132):
        assert "sm_100a or sm_103a" in registry.why_not("sm100", "grouped_gemm", problem, torch.device("cpu"))


def test_formats_without_a_kernel_are_refused_by_name():
    problem = GemmProblem("fprop", "mxint8", "mxint8", torch.bfloat16)
    with arch.emulated("sm_100a", 148):
        assert "mxint8" in BACKEND.why_not(problem, torch.device("cpu"))


def test_blackwell_without_tcgen05_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(arch, "describe", lambda device: "cuda:0, NVIDIA RTX 5090 (capability 12.0)")
    problem = GemmProblem("fprop", E4M3, E4M3, torch.bfloat16, RowMap.ALIGNED)
    reason = BACKEND.why_not(problem, torch.device("cuda", 0))
    assert (
        reason == "needs tcgen05 tensor cores, which cuda:0, NVIDIA RTX 5090 (capability 12.0) does not have"
    )
