"""MXFP8 operands dequantised to BF16 before the product: the tests of test_gemm.py that hold for both ways, and the choice."""

import pytest
import torch
from mx_core import RowMap
from mx_core.groups import aligned_rows
from mx_kernels.generic import autotune
from mx_kernels.problem import GemmProblem
from mx_kernels.sm90 import config, gemm_backend
from mx_kernels.sm90.config import TileConfig

from kernels.gemm_cases import Gemm

from .test_gemm import (  # noqa: F401 (pytest collects them here)
    E4M3,
    SMS,
    check_exact,
    test_every_scale_byte,
    test_mixed_formats_fp32_result,
    test_mxfp8_compact_rows,
    test_mxfp8_group_sizes,
    test_nan_reaches_its_row_or_column_and_no_other,
    test_scales_far_apart,
)

pytest_plugins = ["ptxsim.pytest_plugin"]
rule = config.dequantize_first


@pytest.fixture(autouse=True)
def first(monkeypatch):
    """Whatever the sizes."""
    monkeypatch.setattr(config, "dequantize_first", lambda *_: True)


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_two_launches_under_every_schedule(emulated_gpu, schedule, mode):
    gpu = emulated_gpu("sm_90a", sms=SMS, schedule=schedule, seed=1)
    check_exact(Gemm(mode, (150, 0, 70), 144, 80, (E4M3, E4M3)))
    assert len(gpu.launches) == 2


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_without_groups(emulated_gpu, mode):
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm(mode, (70,), 48, 64, (E4M3, E4M3), RowMap.ALIGNED, torch.float32)
    a, b = case.operands()
    assert torch.equal(case.run(a, b), case.expected(a, b).float())


def test_tiles_to_measure_are_those_of_bf16(emulated_gpu, monkeypatch, tmp_path):
    """Operands are dequantised once, and then multiplied by every candidate and by the one that was chosen."""
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))  # where nothing has been chosen yet
    gpu = emulated_gpu("sm_90a", sms=2)
    measured = []

    def candidates(problem):
        measured.append(problem)
        return (TileConfig(128, 128, cluster_n=2), TileConfig(256, 128))

    monkeypatch.setattr(gemm_backend, "_candidates", candidates)
    seconds = iter([1.0, 2.0])

    def timer(run, device):
        run()
        return next(seconds)

    with autotune.enabled(timer):
        check_exact(Gemm("fprop", (40, 0, 30), 144, 80, (E4M3, E4M3)))
    assert measured == [GemmProblem("fprop", "bf16", "bf16", torch.bfloat16)]
    assert [launch.config.cluster[1] for launch in gpu.launches] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("mode", "rows", "groups", "n", "k", "first"),
    [
        ("fprop", 32768, 8, 4096, 4096, True),
        ("fprop", 32768, 64, 2048, 1408, False),
        ("fprop", 131072, 128, 1536, 2048, False),
        ("dgrad", 32768, 8, 4096, 4096, True),
        ("dgrad", 32768, 64, 2048, 1408, False),
        ("dgrad", 131072, 128, 2048, 768, False),
        ("dgrad", 98304, 64, 3072, 4096, True),
        ("wgrad", 16384, 128, 2048, 768, True),
    ],
)
def test_the_faster_way_is_chosen(mode, rows, groups, n, k, first):
    """As measured; docs/sm90_gemm.md."""
    assert rule(mode, rows, groups, n, k) is first


def test_room_for_padding_is_not_taken_for_rows():
    for rows, groups in ((16384, 128), (131072, 128), (5, 3), (0, 4)):
        aligned = GemmProblem("fprop", E4M3, E4M3, torch.bfloat16)
        assert rows - 127 <= config.likely_rows(aligned, aligned_rows(rows, groups), groups) <= rows
        compact = GemmProblem("fprop", E4M3, E4M3, torch.bfloat16, RowMap.COMPACT)
        assert config.likely_rows(compact, rows, groups) == rows
