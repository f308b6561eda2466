"""The example kernels in the emulator: exact, and the same bits under every schedule."""

import itertools

import numpy as np
import ptxsim
import pytest
import torch
from emulator.conformance.dsl import example
from ptxsim.wgmma_sum import wgmma_step

blockscaled_gemm, hopper_gemm = example("blockscaled_gemm"), example("hopper_gemm")
SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_blockscaled_gemm_is_exact(ctas: int, schedule: str, seed: int) -> None:
    """Sums that are exact in any order: bitwise. Fewer CTAs than tiles, more K tiles than stages."""
    operands = blockscaled_gemm.operands(256 * ctas, 256, 384, exact=True, seed=seed)
    with ptxsim.gpu("sm_100a", schedule=schedule, seed=seed) as gpu:
        d = blockscaled_gemm.gemm(*operands, blockscaled_gemm.BlockscaledGemm(ctas, stages=2), max_ctas=ctas)
    assert torch.equal(d, blockscaled_gemm.reference(*operands).to(torch.bfloat16))
    assert gpu.launches[-1].config.grid == (ctas, 1, 1)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(("a_major", "b_major"), [*itertools.product("km", "kn")][1:])
def test_blockscaled_gemm_majors(ctas: int, a_major: str, b_major: str) -> None:
    operands = blockscaled_gemm.operands(
        128 * ctas, 128, 256, a_major=a_major, b_major=b_major, exact=True, seed=7
    )
    with ptxsim.gpu("sm_100a", schedule="random", seed=5):
        d = blockscaled_gemm.gemm(*operands, blockscaled_gemm.BlockscaledGemm(ctas))
    assert torch.equal(d, blockscaled_gemm.reference(*operands).to(torch.bfloat16))


def test_blockscaled_gemm_refuses_partial_tiles() -> None:
    operands = blockscaled_gemm.operands(128, 128, 128)
    with (
        ptxsim.gpu("sm_100a"),
        pytest.raises(ValueError, match=r"multiples of \(256, 128, 128\), got \(128, 128, 128\)"),
    ):
        blockscaled_gemm.gemm(*operands, blockscaled_gemm.BlockscaledGemm(2))


@pytest.mark.parametrize(
    ("dtype", "majors", "k_step"), [(torch.bfloat16, "kk", 16), (torch.float8_e4m3fn, "kk", 32)]
)
def test_hopper_gemm_follows_the_accumulation_model(dtype: torch.dtype, majors: str, k_step: int) -> None:
    """The kernel's k-steps, one after another, by the model of an H200's sums: bitwise."""
    k_tile = 128 // dtype.itemsize
    a, b, d = hopper_gemm.operands(128, 128, 3 * k_tile, dtype, *majors, seed=3)
    with ptxsim.gpu("sm_90a", schedule="random", seed=1):
        hopper_gemm.gemm(a, b, d, hopper_gemm.HopperGemm((128, 128, k_tile), stages=2))
    name = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3"}[dtype]
    want = None
    for k in range(0, a.shape[1], k_step):
        step = slice(k, k + k_step)
        want = wgmma_step(a[:, step].float().numpy(), b[:, step].float().numpy(), want, name, name)
    np.testing.assert_array_equal(d.numpy(), want)
