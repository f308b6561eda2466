"""What is remembered of a call, and where results and scratch are allocated."""

import pytest
import torch
from mx_kernels.generic import backend
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("current", [0, 1])
def test_on_the_device_that_was_asked_for(monkeypatch, current):
    """The quick allocator knows the current device only."""

    def on_current(shape, strides, dtype):
        return torch.empty_strided(shape, strides, dtype=dtype, device=f"cuda:{current}")

    monkeypatch.setattr(backend, "_empty_strided_cuda", on_current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    specs = backend.contiguous((((3, 4), torch.bfloat16), ((5,), torch.int32)))
    with FakeTensorMode():
        a, b = backend.empty(specs, torch.device("cuda:1"))
    assert (a.device.index, b.device.index) == (1, 1)
    assert (a.shape, a.stride(), a.dtype) == ((3, 4), (4, 1), torch.bfloat16)


def test_calls_that_are_alike_but_for_one_thing(gpu):
    """Each in turn after the others: groups, alignment, pitch, a size that is no tensor's."""
    args, rest = ("mxfp8_e4m3", -1, "rceil", "linear"), (None, "aligned")
    x = torch.linspace(-3, 3, 65 * 72).bfloat16()
    for ends in ([30, 64], [30, 40, 64], [64], [0, 64]):
        offs = torch.tensor(ends, dtype=torch.int32)
        gpu.check("quantize", x[: 64 * 64].view(64, 64), *args, offs, "compact")
    for view in (
        x[: 64 * 64].view(64, 64),
        x[1 : 1 + 64 * 64].view(64, 64),
        x[: 64 * 72].view(64, 72)[:, :64],
        x[: 64 * 64].view(2, 32, 64),
        x[: 64 * 64].view(64, 64).float(),
    ):
        gpu.check("quantize", view, *args, *rest)
    weights, slot_of = torch.rand(3, 2), torch.arange(6, dtype=torch.int32).view(3, 2)
    for rows in (128, 256, 128):
        (got,) = gpu.check("slot_weights", weights, slot_of, rows)
        assert got.shape == (rows,)
