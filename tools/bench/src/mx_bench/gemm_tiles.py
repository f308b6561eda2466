"""Which tile is fastest where: `python -m mx_bench.gemm_tiles [fprop dgrad wgrad]`, on a Hopper GPU.

Races every tile of the Hopper GEMM against torch.bmm (equal groups) and torch._grouped_mm, on the shapes of the section
"grouped GEMM", in equal and in skewed groups. `mx_kernels/sm90/config.py::choose_tile` is written from its table.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mx_kernels.sm90 import config
from mx_kernels.sm90.config import TileConfig

from mx_bench.cases import Call
from mx_bench.gemm import MODES, SHAPES, SKEW, gemm_case
from mx_bench.timing import race

TILES = {
    "ours BF16": [
        TileConfig(tile_m, tile_n, cluster_m, cluster_n)
        for tile_m, tile_n in ((256, 128), (128, 256), (128, 192), (128, 128))
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2))
        if (tile_n, cluster_m) != (192, 2)  # a slice of 96 columns is not whole swizzle rows
    ],
    "ours MXFP8": [
        TileConfig(tile_m, 128, cluster_m, cluster_n)
        for tile_m in (256, 128)
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2))
    ],
}


@contextmanager
def fixed(tile: TileConfig) -> Iterator[None]:
    """Take this tile, whatever the sizes."""
    chosen = config.choose_tile

    def always(mode: str, scaled: bool, rows: int, groups: int, columns: int) -> TileConfig:
        return tile

    config.choose_tile = always
    try:
        yield
    finally:
        config.choose_tile = chosen


def with_tile(call: Call, tile: TileConfig) -> Call:
    """A contestant that takes this tile."""

    def fixed_call(number: int) -> object:
        with fixed(tile):
            return call(number)

    return fixed_call


def main(modes: list[str]) -> None:
    """Print one table for each shape, mode and distribution of rows."""
    for shape in SHAPES:
        for mode in modes or MODES:
            for skew in (0.0, SKEW):
                case = gemm_case(shape, mode, skew, "cuda")
                contestants = {n: c for n, c in case.contestants.items() if callable(c) and n not in TILES}
                for name, tiles in TILES.items():
                    call = case.contestants[name]
                    assert callable(call)
                    for tile in tiles:
                        if name == "ours MXFP8" and mode == "wgrad" and tile.tile_m != 256:
                            continue
                        contestants[f"{name} {tile}"] = with_tile(call, tile)
                for call in contestants.values():
                    call(0)  # compile
                timings = race(contestants, rounds=9, calls=3, warmup=1)
                base = timings["torch.bmm, equal groups"].median_us
                print(f"{case.name}")
                for name, timing in timings.items():
                    rate = timing.rate(float(shape.flop))
                    print(f"  {name:40s} {timing}  {rate:.0f} TFLOP/s  {base / timing.median_us:.2f} x bmm")
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
