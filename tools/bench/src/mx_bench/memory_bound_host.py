"""What a call costs the host: `python -m mx_bench.memory_bound_host`, on a GPU with kernels.

Every memory-bound op at torch.ops.mx on small tensors, compiled before, beside an addition and an allocation on the same
host. Then what the two ops that only move indices take on the device, as one replay of a CUDA graph.
"""

import argparse
from collections.abc import Callable, Iterator

import mx_kernels  # noqa: F401 - registers torch.ops.mx
import torch

from mx_bench.forced import parse_on_gpu
from mx_bench.memory_bound import BF16, MX, mx
from mx_bench.timing import host_time, race

Contestants = dict[str, Callable[[], object]]


def host_calls(device: str, T: int = 64, D: int = 256, k: int = 2, E: int = 4) -> Contestants:
    """A call of everything: T tokens, D columns, k choices, E experts."""
    x, square = (torch.randn(n, D, device=device, dtype=BF16) for n in (T, D))
    slot_of, token_of, offs = mx.route(ids := torch.randint(0, E, (T, k), device=device), E)
    P, weights = token_of.shape[0], torch.rand(T, k, device=device)
    slots = mx.slot_weights(weights, slot_of, P)
    h, y, da = (torch.randn(P, n, device=device, dtype=BF16) for n in (2 * D, D, D))
    halves = torch.tensor([100, D], device=device, dtype=torch.int32)
    return {
        "x + x": lambda: square + square,
        "torch.empty": lambda: torch.empty(D, D, device=device, dtype=BF16),
        "gather": lambda: mx.gather(x, token_of),
        "combine": lambda: mx.combine(y, slot_of, weights),
        "combine_backward": lambda: mx.combine_backward(x, y, slot_of, weights),
        "slot_weights": lambda: mx.slot_weights(weights, slot_of, P),
        "route": lambda: mx.route(ids, E),
        "quantize": lambda: mx.quantize(square, MX[0], -1, *MX[1:]),
        "quantize, groups": lambda: mx.quantize(square, MX[0], -1, *MX[1:], halves),
        "quantize_dual": lambda: mx.quantize_dual(square, *MX),
        "quantize_dual, groups": lambda: mx.quantize_dual(square, *MX, halves),
        "gather_quantize": lambda: mx.gather_quantize(x, token_of, None, MX[0], -1, *MX[1:]),
        "gather_quantize_dual, weighted": lambda: mx.gather_quantize_dual(x, token_of, slots, *MX),
        "swiglu": lambda: mx.swiglu(h, offs),
        "swiglu_quantize": lambda: mx.swiglu_quantize(h, offs, *MX),
        "dswiglu": lambda: mx.dswiglu(da, h, slots, offs),
        "dswiglu_quantize_row": lambda: mx.dswiglu_quantize_row(da, h, slots, offs, *MX),
        "dswiglu_quantize": lambda: mx.dswiglu_quantize(da, h, slots, offs, *MX),
    }


def replays(device: str, T: int = 16384, k: int = 8) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of what is captured: T·k choices."""
    for E in (128, 512):
        ids = torch.randint(0, E, (T, k), device=device)
        yield f"route, {T * k} choices, E {E}", lambda ids=ids, E=E: mx.route(ids, E)
    slot_of, token_of, _ = mx.route(torch.randint(0, 128, (T, k), device=device), 128)
    weights = torch.rand(T, k, device=device)
    yield f"slot_weights, {T * k} choices", lambda: mx.slot_weights(weights, slot_of, token_of.shape[0])


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a graph; what it allocates is the graph's own."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def main(device: str) -> None:
    """Print both tables."""
    print("| call | µs of the host |\n|---|---|")
    for name, call in host_calls(device).items():
        call()  # compile
        print(f"| {name} | {host_time(call).median_us:.1f} |", flush=True)
    graphs = {name: captured(call) for name, call in replays(device)}
    timings = race({name: lambda _, graph=graph: graph.replay() for name, graph in graphs.items()})
    print("\n| replay | µs of the device |\n|---|---|")
    for name, timing in timings.items():
        print(f"| {name} | {timing.median_us:.1f} |")


if __name__ == "__main__":
    parse_on_gpu(argparse.ArgumentParser(prog="python -m mx_bench.memory_bound_host", description=__doc__))
    main("cuda")
