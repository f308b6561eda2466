"""Where results and scratch are allocated."""

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
