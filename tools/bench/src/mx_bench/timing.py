"""The one timing protocol: every figure that this project publishes is measured with `race`.

Device events, a warm-up, and rounds in which every contestant takes its turn, so that clocks and temperature drift for
all alike; each call works on the next of several buffer sets that together exceed the L2 cache; the result is the median
over rounds with the quartiles. Inputs are the caller's, and should be random: zeros run faster than data.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

L2_MULTIPLE = 4  # buffer sets together are at least this many times the L2 cache


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median over rounds, and the quartiles."""

    median_us: float
    low_us: float
    high_us: float

    def rate(self, amount: float) -> float:
        """`amount` a second at the median, in 10^12: TB/s from bytes, TFLOP/s from operations."""
        return amount / self.median_us / 1e6

    def __str__(self) -> str:
        return f"{self.median_us:.1f} µs ({self.low_us:.1f}–{self.high_us:.1f})"


def buffer_sets(bytes_each: int, *, at_least: int = 2) -> int:
    """How many buffer sets of this size rotate, so that no call finds its data in L2."""
    l2 = torch.cuda.get_device_properties().L2_cache_size
    return max(at_least, -(-L2_MULTIPLE * l2 // max(bytes_each, 1)))


def race(
    contestants: Mapping[str, Callable[[int], object]], *, rounds: int = 25, calls: int = 4, warmup: int = 2
) -> dict[str, Timing]:
    """Time contestants against each other on the current device, or on the CPU where there is none.

    Args:
        contestants: name → function of a running call number, from which it chooses its buffer set.
        rounds: how often each takes its turn.
        calls: back-to-back calls in a turn; a turn's time is divided by them.
        warmup: turns thrown away (compilation, allocator, clocks).
    """
    order, samples, number = list(contestants), {name: [] for name in contestants}, 0
    turn = _device_turn if torch.cuda.is_available() else _host_turn
    shuffler = random.Random(0)
    for round_ in range(-warmup, rounds):
        shuffler.shuffle(order)
        for name in order:
            seconds = turn(contestants[name], number, calls)
            number += calls
            if round_ >= 0:
                samples[name].append(seconds * 1e6 / calls)
    return {name: summarize(values) for name, values in samples.items()}


def _device_turn(call: Callable[[int], object], number: int, calls: int) -> float:
    """Seconds between device events around `calls` calls, queued back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy for half a millisecond while the host queues the turn, so that no launch gap is timed: a slow
    # host's first call after a wait has been seen to take more than a tenth.
    torch.cuda._sleep(1_000_000)
    start.record()
    for i in range(calls):
        call(number + i)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def _host_turn(call: Callable[[int], object], number: int, calls: int) -> float:
    """Seconds of the host clock around `calls` calls."""
    start = time.perf_counter()
    for i in range(calls):
        call(number + i)
    return time.perf_counter() - start


def summarize(samples_us: list[float]) -> Timing:
    """Median and quartiles of samples in microseconds."""
    if len(samples_us) < 2:
        return Timing(samples_us[0], samples_us[0], samples_us[0])
    low, median, high = statistics.quantiles(samples_us, n=4)
    return Timing(median, low, high)


def host_time(call: Callable[[], object], *, calls: int = 200, rounds: int = 7) -> Timing:
    """What the host spends on a call that only queues work, in microseconds."""
    samples = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    torch.cuda.synchronize()
    return summarize(samples[1:])
