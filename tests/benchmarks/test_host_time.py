"""Host time of an op from torch.ops.mx to the backend: a backend that does nothing stands in for the kernels.

Run: uv run pytest tests/benchmarks/test_host_time.py -m bench -n 0 --benchmark-enable
"""

import pytest
import torch
from kernels.test_opcheck import SAMPLES
from mx_kernels import registry

pytestmark = pytest.mark.bench


class Nothing:
    """A backend whose methods return tensors that exist already."""

    name = "cpu"

    def __init__(self, results):
        self.results = results

    def why_not(self, problem, device):
        return None

    def __getattr__(self, method):
        return lambda *args: self.results


@pytest.fixture
def nothing(monkeypatch):
    def install(results) -> None:
        monkeypatch.setattr(registry, "load", lambda name: Nothing(results))
        registry.forget()

    yield install
    registry.forget()


@pytest.mark.parametrize("op", [op for op in SAMPLES if op != "grouped_gemm_out"])
def test_dispatch(op, benchmark, nothing) -> None:
    function, arguments = getattr(torch.ops.mx, op).default, SAMPLES[op][0]
    with torch.no_grad():
        nothing(function(*arguments))
        benchmark(function, *arguments)
