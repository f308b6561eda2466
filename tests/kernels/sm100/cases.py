"""What the tests of the Blackwell GEMM run on."""

import torch
from mx_kernels.sm100.config import TileConfig

from kernels.gemm_cases import Gemm

MODES = ("fprop", "dgrad", "wgrad")
SCHEDULES = ("early", "late", "random", "tma_late", "mma_late")

#: One and two CTAs to a tile, every N, clusters with multicast along M, along N and both; the half slab.
TILES = (
    TileConfig(128, 64, 1),
    TileConfig(128, 128, 1),
    TileConfig(128, 192, 1),
    TileConfig(128, 256, 1),
    TileConfig(256, 64),
    TileConfig(256, 128),
    TileConfig(256, 192),
    TileConfig(256, 256),
    TileConfig(128, 128, 2, 1),
    TileConfig(128, 64, 2, 2),
    TileConfig(256, 128, 2, 2),
    TileConfig(256, 256, 2, 2),
    TileConfig(256, 64, 4, 1),
    TileConfig(256, 256, slab_bytes=64),
)


def gemm(mode: str, sizes, n: int, k: int, formats=("mxfp8_e4m3", "mxfp8_e4m3"), *args, **kwargs) -> Gemm:
    """A case on this backend."""
    return Gemm(mode, tuple(sizes), n, k, formats, *args, backend="sm100", **kwargs)


def check_exact(case: Gemm, **run) -> None:
    a, b = case.operands()
    got, want = case.run(a, b, **run), case.expected(a, b).to(case.out_dtype)
    assert torch.equal(got, want), f"{(got != want).sum()} of {want.numel()} elements are wrong"
