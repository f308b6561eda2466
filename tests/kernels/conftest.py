"""Fixtures that several kernel test files use."""

import pytest


@pytest.fixture(scope="module")
def float64_sums():
    """The CPU backend's GEMMs sum in float64, so that results can be compared almost exactly.

    An fp32 sum may differ by one ulp, which is enough to move a later operand to the next code.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mx_kernels.cpu.backend.float32_holds", lambda a, b: False)
        yield
