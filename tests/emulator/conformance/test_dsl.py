"""CuTe-DSL kernels for sm_90a: compiled by the DSL, run in the emulator, compared with what an H200 wrote."""

import ptxsim
import pytest
from emulator.conformance import dsl, recorded

SLOW = ("dsl/mx_kernels.dgrad.bf16", "dsl/mx_kernels.wgrad.bf16", "dsl/mx_kernels.fprop.mxfp8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in dsl.RUNS]
)
def test_same_bytes_as_an_h200(name: str) -> None:
    with ptxsim.gpu("sm_90a", sms=132, schedule="random", seed=4):
        result = dsl.run(name, "cpu").numpy()
    assert recorded.same_bytes(name, result, recorded.load("dsl")) is None
