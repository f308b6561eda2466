"""Blackwell's additions, for which there is no hardware here: against ml_dtypes, mx_core and IEEE arithmetic."""

import ml_dtypes
import numpy as np
import pytest
import torch
from emulator.conformance import sm100
from emulator.conformance.emulate import emulate
from mx_core import MXFP4_E2M1, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, decode, encode


@pytest.mark.parametrize("checked", [pytest.param(c, id=c.case.name) for c in sm100.cases()])
def test_elementwise(checked: sm100.Checked) -> None:
    out = dict(zip(checked.case.labels, emulate(checked.case)["out"], strict=True))
    inputs = checked.case.inputs()
    for label, want in checked.wanted().items():
        bad = np.flatnonzero(out[label] != want)
        assert not len(bad), (
            f"{label}: {len(bad)} of {len(want)} differ, first a={inputs['in_a'][bad[0]]:#x} b={inputs['in_b'][bad[0]]:#x}: "
            f"{out[label][bad[0]]:#x}, expected {want[bad[0]]:#x}"
        )


@pytest.mark.parametrize(("case", "permute"), [pytest.param(c, f, id=c.name) for c, f in sm100.wide_cases()])
def test_256_bit_access(case, permute) -> None:
    np.testing.assert_array_equal(emulate(case)["out"], permute(case.inputs()["src"]))


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (MXFP8_E4M3, ml_dtypes.float8_e4m3fn),
        (MXFP8_E5M2, ml_dtypes.float8_e5m2),
        (MXFP6_E2M3, ml_dtypes.float6_e2m3fn),
        (MXFP6_E3M2, ml_dtypes.float6_e3m2fn),
        (MXFP4_E2M1, ml_dtypes.float4_e2m1fn),
    ],
)
def test_models_agree_with_mx_core(format, dtype) -> None:
    """The models above and mx_core are written apart; finite bf16 values, exhaustively."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    codes = sm100.narrow(x, dtype)
    np.testing.assert_array_equal(encode(torch.from_numpy(x), format).numpy(), codes)
    every = torch.arange(1 << format.bits, dtype=torch.uint8)
    np.testing.assert_array_equal(decode(every, format).numpy(), every.numpy().view(dtype).astype(np.float32))
