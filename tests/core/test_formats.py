"""The formats' constants and values, against the specification's table and two outside libraries."""

import dataclasses
import math
import subprocess
import sys

import gfloat
import numpy as np
import pytest
from mx_core import FORMATS, MXFP8_E4M3
from support import oracle
from support.outside import GFLOAT, ML_DTYPES

# emax, max, smallest normal, smallest subnormal, NaN code: OCP MX v1.0, sections 5.3.1 to 5.3.4
TABLE = {
    "mxfp8_e4m3": (8, 448.0, 2.0**-6, 2.0**-9, 0x7F),
    "mxfp8_e5m2": (15, 57344.0, 2.0**-14, 2.0**-16, 0x7F),
    "mxfp6_e3m2": (4, 28.0, 2.0**-2, 2.0**-4, 0),
    "mxfp6_e2m3": (2, 7.5, 1.0, 0.125, 0),
    "mxfp4_e2m1": (2, 6.0, 1.0, 0.5, 0),
    "mxint8": (0, 127 / 64, 1.0, 1 / 64, 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_constants(name: str) -> None:
    f = FORMATS[name]
    assert (f.emax, f.max_value, f.min_normal, f.min_subnormal, f.nan_code) == TABLE[name]
    assert repr(f) == name.upper()


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_gfloats(name: str) -> None:
    ours = FORMATS[name].values
    theirs = [gfloat.decode_float(GFLOAT[name], code).fval for code in range(len(ours))]
    np.testing.assert_array_equal(ours, theirs)  # NaN equals NaN here
    assert [math.copysign(1, v) for v in ours if v == 0] == [math.copysign(1, v) for v in theirs if v == 0]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_values_are_ml_dtypes(name: str) -> None:
    ours = FORMATS[name].values
    theirs = np.arange(len(ours), dtype=np.uint8).view(ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(np.array(ours, np.float32), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_oracles(name: str) -> None:
    magnitudes = oracle.magnitudes(name)
    assert list(FORMATS[name].values[: len(magnitudes)]) == magnitudes
    assert FORMATS[name].max_code == len(magnitudes) - 1


def test_mxint8_holds_minus_two_but_its_range_is_symmetric() -> None:
    values = FORMATS["mxint8"].values
    assert values[0x80] == -2.0  # decodable, never produced
    assert values[0x81] == -FORMATS["mxint8"].max_value


def test_code_out_of_range() -> None:
    with pytest.raises(ValueError, match="code: expected 0 <= code < 16 for mxfp4_e2m1, got 16"):
        FORMATS["mxfp4_e2m1"].decode(16)


def test_formats_are_frozen_data_and_need_no_torch() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MXFP8_E4M3.bias = 8  # type: ignore[misc]
    # Loaded by path, as a code generator may, so that the package's __init__ (which imports torch) stays out.
    import mx_core.formats

    code = (
        f"import importlib.util as u, sys; s = u.spec_from_file_location('formats', {mx_core.formats.__file__!r});"
        "m = u.module_from_spec(s); sys.modules['formats'] = m; s.loader.exec_module(m);"
        "assert not {'torch', 'numpy'} & set(sys.modules); print(m.MXFP8_E4M3.max_value)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "448.0"
