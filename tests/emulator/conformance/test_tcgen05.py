"""tcgen05 against the PTX ISA's own definitions (tcgen05.py)."""

import numpy as np
import pytest
from emulator.conformance import tcgen05
from emulator.conformance.emulate import emulate

CASES = [pytest.param(e, id=e.case.name) for e in tcgen05.cases()]


@pytest.mark.parametrize("expected", CASES)
def test_as_the_isa_says(expected: tcgen05.Expected) -> None:
    out = emulate(expected.case, schedule="random", seed=2)["out"]
    np.testing.assert_array_equal(out, expected.want(expected.case.inputs()))
