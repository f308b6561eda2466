"""Which tile is fastest where: `python -m mx_bench.gemm_tiles [fprop dgrad wgrad]`, on a Hopper GPU.

Races every tile of the Hopper GEMM against torch.bmm (equal groups) and torch._grouped_mm, on the shapes of the section
"grouped GEMM", in equal and in skewed groups; MXFP8 operands dequantised first take the tile that is picked. `choose_tile`
and `dequantize_first` of `mx_kernels/sm90/config.py` are written from its table.
"""

import argparse

import torch
from mx_kernels.sm90 import config
from mx_kernels.sm90.config import TileConfig

from mx_bench.cases import Call
from mx_bench.forced import parse_on_gpu, with_forced
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


FIRST = "ours MXFP8, dequantised first"


def with_choices(call: Call, **choices: object) -> Call:
    """A contestant for which functions of sm90/config.py choose this."""
    return with_forced(call, config, **choices)


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
                    if name == "ours MXFP8":
                        contestants[FIRST] = with_choices(call, dequantize_first=True)
                    if name == "ours MXFP8" and mode == "wgrad":
                        continue  # dequantised first, always
                    for tile in tiles:
                        contestants[f"{name} {tile}"] = with_choices(
                            call, choose_tile=tile, dequantize_first=False
                        )
                for call in contestants.values():
                    call(0)  # compile
                timings = race(contestants, rounds=9, calls=3, warmup=1)
                base = timings["torch.bmm, equal groups"].median_us
                print(f"{case.name}")
                for name, timing in timings.items():
                    rate = timing.rate(float(shape.flop))
                    print(f"  {name:40s} {timing}  {rate:.0f} TFLOP/s  {base / timing.median_us:.2f} x bmm")
                torch.cuda.empty_cache()


def _mode(text: str) -> str:
    if text not in MODES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(MODES)}, got {text!r}")
    return text


def arguments() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(prog="python -m mx_bench.gemm_tiles", description=__doc__)
    parser.add_argument(
        "modes", nargs="*", type=_mode, metavar="MODE", help=f"{', '.join(MODES)}; all by default"
    )
    return parser


if __name__ == "__main__":
    main(parse_on_gpu(arguments(), "sm_90a").modes)
