"""Public Blackwell kernels, unchanged, in the emulator. An optional extra:

uv run --group public-kernels pytest tests/emulator/test_public_kernels.py
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace

import ptxsim
import pytest
import torch
from emulator.conformance.dsl import example

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None,
    reason="quack-kernels is not installed (uv run --group public-kernels pytest …)",
)
blockscaled_gemm = example("blockscaled_gemm")


@pytest.fixture(scope="module")
def quack() -> Iterator[SimpleNamespace]:
    """Its modules, told that the GPU is a Blackwell, and not to keep compiled kernels on disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACK_ARCH", "sm_100")
        patch.setenv("QUACK_CACHE_ENABLED", "0")
        yield SimpleNamespace(
            **{n: importlib.import_module(f"quack.{n}") for n in ("rmsnorm", "softmax", "gemm")}
        )


@pytest.mark.parametrize("schedule", ["early", "random"])
def test_rmsnorm(quack: SimpleNamespace, schedule: str) -> None:
    x, weight = torch.randn(64, 1024).bfloat16(), torch.randn(1024)
    out = torch.full_like(x, float("nan"))
    with ptxsim.gpu("sm_100a", schedule=schedule, seed=1):
        quack.rmsnorm._rmsnorm_fwd._init_fn(
            x, weight, out
        )  # the operator is registered for CUDA tensors only
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=0)


def test_softmax(quack: SimpleNamespace) -> None:
    x = torch.randn(64, 1024).bfloat16()
    out = torch.full_like(x, float("nan"))
    with ptxsim.gpu("sm_100a", schedule="random", seed=2):
        quack.softmax._softmax_fwd._init_fn(x, out)
    torch.testing.assert_close(out.double(), torch.softmax(x.double(), -1), rtol=2**-8, atol=0)


TILES = [(128, 128, 1, 1), (128, 256, 1, 1), (256, 128, 2, 1), (256, 256, 2, 1)]


@pytest.mark.parametrize("tile", TILES)
def test_gemm(quack: SimpleNamespace, tile: tuple[int, int, int, int]) -> None:
    """bf16, integers: exact in any order."""
    a, b = (torch.randint(-4, 5, (n, 256)).bfloat16() for n in (512, 256))
    d = torch.full((512, 256), float("nan"), dtype=torch.bfloat16)
    with ptxsim.gpu("sm_100a", schedule="random", seed=1):
        quack.gemm.gemm(a, b, d, None, None, *tile)
    assert torch.equal(d, (a.double() @ b.double().T).bfloat16())


@pytest.mark.parametrize("tile", TILES)
def test_mxfp8_gemm(quack: SimpleNamespace, tile: tuple[int, int, int, int]) -> None:
    """Block-scaled, operands whose sums are exact."""
    a, sfa, b, sfb = blockscaled_gemm.operands(512, 256, 512, exact=True)
    scales = [
        blockscaled_gemm.blocked(s)
        .view(1, s.shape[0] // 128, s.shape[1] // 4, 32, 4, 4)
        .view(torch.float8_e8m0fnu)
        for s in (sfa, sfb)
    ]
    d = torch.full((1, 512, 256), float("nan"), dtype=torch.bfloat16)
    with ptxsim.gpu("sm_100a", schedule="random", seed=1):
        quack.gemm.gemm(
            a[None],
            b[None],
            d,
            None,
            None,
            *tile,
            SFA=scales[0],
            SFB=scales[1],
            bs_format_a="mxfp8_e4m3",
            bs_format_b="mxfp8_e4m3",
        )
    assert torch.equal(d[0], blockscaled_gemm.reference(a, sfa, b, sfb).bfloat16())
