"""Benchmarks of the CPU reference paths, held to a baseline by ratio: time over that of a torch operation in the same run.

    uv run pytest tests/benchmarks -m bench -n 0 --benchmark-enable
    MX_UPDATE_BASELINE=1 uv run pytest …                  # writes the ratios found into baseline.json

A ratio hardly depends on the machine. Both sides are processor time, fastest of many rounds, so a busy one hardly changes it either.
"""

from collections.abc import Callable

import pytest
from benchmarks.ratios import YARDSTICKS, check_ratio, fastest


@pytest.fixture
def against(benchmark, request):
    """Benchmark a call, report its ratio to a yardstick, and hold it to the baseline.

    The yardstick runs before and after, so that a clock that drifts meets both.
    """

    def measure(yardstick: str, call: Callable, *args: object, **kwargs: object) -> None:
        unit = fastest(YARDSTICKS[yardstick])
        benchmark(call, *args, **kwargs)
        if benchmark.disabled or benchmark.stats is None:
            return
        unit = min(unit, fastest(YARDSTICKS[yardstick]))
        ratio = benchmark.stats.stats.min / unit
        benchmark.extra_info |= {"yardstick": yardstick, "ratio": ratio}
        check_ratio(request.node.name, yardstick, ratio)

    return measure
