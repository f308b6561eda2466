"""Which tile is fastest where: `python -m mx_bench.memory_bound_tiles`, on a GPU with kernels.

Races tiles of the gathering quantiser, of SwiGLU's backward and of plain SwiGLU against a copy, at the sizes of the section "memory-bound".
`mx_kernels/generic/config.py` is written from its table.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from mx_kernels import registry
from mx_kernels.generic import config
from mx_kernels.generic.config import TileConfig
from mx_kernels.problem import DSwigluProblem, GatherQuantizeProblem, SwigluProblem

from mx_bench.forced import forced, parse_on_gpu
from mx_bench.memory_bound import BF16, DESIGN, Sizes, random_sets
from mx_bench.timing import race

#: By what is asked of the quantiser: orientation, and whether the column copy is weighted.
GATHER_TILES: dict[tuple[str, bool], tuple[TileConfig, ...]] = {
    ("dual", False): (TileConfig(8, 2), TileConfig(8, 3), TileConfig(8, 2, strip=2), TileConfig(16, 3)),
    ("dual", True): (TileConfig(8, 2), TileConfig(8, 2, strip=2), TileConfig(16, 3)),
    ("row", False): (TileConfig(8, 3), TileConfig(8, 4), TileConfig(8, 3, strip=2)),
}
DSWIGLU_TILES = tuple(TileConfig(4, blocks, height=32) for blocks in (3, 4, 5))
SWIGLU_TILES = tuple(TileConfig(4, blocks, height=32) for blocks in (4, 6, 8))  # of the plain form

Contestants = dict[str, Callable[[int], object]]


def with_tile(chooser: str, tile: TileConfig, op: str, problem: Any, *tensors: Any) -> Callable[..., Any]:
    """The op on such tensors, with this tile in place of what config.<chooser> would choose."""
    backend: Any = registry.choose(op, problem, tensors[0].device)
    with forced(config, **{chooser: tile}):
        return backend.prepare(op, problem, *tensors)


def gather_cases(sizes: Sizes, device: str) -> Iterator[tuple[str, float, Contestants]]:
    """Name, bytes and contestants for every shape and everything asked."""
    for T, D, k, E in sizes.moe:
        P, token_of = T * k, torch.randperm(T * k, device=device) % E
        token_of = (torch.sort(token_of, stable=True)[1] // k).int()
        x, weights = random_sets(device, T, D), torch.rand(P, device=device)
        for (orientation, weighted), tiles in GATHER_TILES.items():
            problem = GatherQuantizeProblem(BF16, "mxfp8_e4m3", orientation=orientation, weighted=weighted)
            tensors = (token_of, weights) if weighted else (token_of,)
            contestants: Contestants = {}
            for tile in tiles:
                args = x[0], token_of, weights if weighted else None
                run = with_tile("quantize_tile", tile, "gather_quantize", problem, *args)
                contestants[str(tile)] = lambda i, run=run, x=x, rest=tensors: run(x[i % len(x)], *rest)
            copies = 2 if orientation == "dual" else 1
            moved = 2 * T * D + copies * (P * D + P * D / 32)
            yield (
                f"gather + quantise, {orientation}{', weighted' * weighted}, T {T}, D {D}, E {E}",
                moved,
                contestants,
            )


def swiglu_cases(sizes: Sizes, device: str) -> Iterator[tuple[str, float, Contestants]]:
    """Name, bytes and contestants of the three forms of the backward and of the plain forward."""
    P, H = sizes.swiglu
    h, da = random_sets(device, P, 2 * H), random_sets(device, P, H)
    offs = torch.arange(1, 9, device=device, dtype=torch.int32) * (P // 8)
    w, n = torch.rand(P, device=device), P * H
    for name, format, columns, moved in (
        ("dh both ways and a", "mxfp8_e4m3", True, 11 * n + 5 * n / 32),
        ("dh by row", "mxfp8_e4m3", False, 8 * n + n / 16),
        ("BF16", None, True, 12 * n),
    ):
        problem = DSwigluProblem(BF16, format, columns=columns)
        contestants: Contestants = {}
        for tile in DSWIGLU_TILES:
            run = with_tile("dswiglu_tile", tile, "dswiglu", problem, da[0], h[0], w, offs)
            contestants[str(tile)] = lambda i, run=run: run(da[i % len(da)], h[i % len(h)], w, offs)
        yield f"SwiGLU backward, {name}, P {P}, H {H}", float(moved), contestants
    contestants = {}
    for tile in SWIGLU_TILES:
        run = with_tile("swiglu_tile", tile, "swiglu", SwigluProblem(BF16, None), h[0], offs)
        contestants[str(tile)] = lambda i, run=run: run(h[i % len(h)], offs)
    yield f"SwiGLU, BF16, P {P}, H {H}", float(6 * n), contestants


def report(name: str, moved: float, contestants: Mapping[str, Callable[[int], object]], device: str) -> None:
    """Race and print."""
    source = [torch.randint(0, 255, (int(moved) // 2,), dtype=torch.uint8, device=device) for _ in range(2)]
    target = torch.empty_like(source[0])
    for call in contestants.values():
        call(0)  # compile
    timings = race({"copy": lambda i: target.copy_(source[i % 2]), **contestants}, rounds=9, warmup=1)
    print(name)
    for contestant, timing in timings.items():
        share = timings["copy"].median_us / timing.median_us
        print(
            f"  {contestant:64s} {timing}  {timing.rate(moved):.2f} TB/s  {share:.2f} of the copy", flush=True
        )


def main(sizes: Sizes, device: str) -> None:
    """Print one table for each problem."""
    for cases in (swiglu_cases, gather_cases):
        for case in cases(sizes, device):
            report(*case, device)


if __name__ == "__main__":
    parse_on_gpu(argparse.ArgumentParser(prog="python -m mx_bench.memory_bound_tiles", description=__doc__))
    main(DESIGN, "cuda")
