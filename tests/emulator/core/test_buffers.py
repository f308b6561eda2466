"""Which memory a call may touch: the tensors passed, and those that passed addresses lie in."""

import torch
from ptxsim.host import buffers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode


def test_extent_of_a_strided_tensor():
    x = torch.empty(4, 8)[1:3, ::2]
    start, end = buffers.extent(x)
    assert start == x.data_ptr()
    assert end - start == ((2 - 1) * 8 + (4 - 1) * 2 + 1) * 4


def test_an_address_leads_to_its_tensor_whatever_else_is_alive():
    with FakeTensorMode():
        stand_in = torch.empty(70, 4)
        with FunctionalTensorMode():
            wrapper = FunctionalTensor.to_functional(torch.empty(70, 4))
    x = torch.empty(64)
    found: buffers.Buffers = {}
    assert buffers.collect([x.data_ptr() + 16], found)
    assert (x.data_ptr(), x.data_ptr() + x.nbytes) in found.values()
    assert buffers.extent(stand_in) is None
    assert buffers.extent(wrapper) is None
