"""The GPUs that the memory-bound kernels are tested on: an emulated one of each architecture, and this machine's."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mx_kernels import arch
from torch import Tensor

mx = torch.ops.mx
BACKENDS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}


@dataclass(frozen=True)
class Gpu:
    """Where kernels run, and how much of a test they can be asked to do."""

    device: torch.device
    backend: str

    @property
    def is_real(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, emulated: Any, real: Any) -> Any:
        """The emulator does a millionth of the work in a second."""
        return real if self.is_real else emulated

    def run(self, op: str, *args: Any) -> tuple[Tensor, ...]:
        """An op of torch.ops.mx on this GPU: CPU tensors in, CPU tensors out."""
        moved = [a.to(self.device) if isinstance(a, Tensor) else a for a in args]
        for a, m in zip(args, moved, strict=True):
            if isinstance(a, Tensor) and a.stride() != m.stride():  # .to() has made it dense
                m.set_(
                    torch.empty(
                        a.untyped_storage().nbytes() // a.element_size(), dtype=a.dtype, device=self.device
                    )
                    .as_strided(a.shape, a.stride())
                    .copy_(a)
                )
        return tuple(t.cpu() for t in as_tuple(getattr(mx, op)(*moved, self.backend)))

    def check(self, op: str, *args: Any) -> tuple[Tensor, ...]:
        """Assert that an op gives the CPU reference's bytes; its results."""
        got, want = self.run(op, *args), as_tuple(getattr(mx, op)(*args, "cpu"))
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert g.shape == w.shape
            assert g.dtype == w.dtype
            assert_same_bytes(g, w, f"{op} result {i}")
        return got


def as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, (tuple, list)) else (x,)


def assert_same_bytes(got: Tensor, want: Tensor, what: str = "") -> None:
    unlike = got.contiguous().view(torch.uint8) != want.contiguous().view(torch.uint8)
    assert not unlike.any(), (
        f"{what}: {int(unlike.sum())} of {unlike.numel()} bytes differ, first at {unlike.nonzero()[0].tolist()}"
    )


@pytest.fixture(params=["sm_90a", "sm_100a", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    """Each GPU in turn."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        device = torch.device("cuda", 0)
        yield Gpu(device, BACKENDS[arch.target_of(device)])
        return
    import ptxsim

    with ptxsim.gpu(request.param, sms=8):
        yield Gpu(torch.device("cpu"), BACKENDS[request.param])
