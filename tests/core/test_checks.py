"""Every check says what was expected and what came."""

import pytest
import torch
from mx_core import MXFP8_E4M3, MXFP8_E5M2, RowMap, checks


def test_passes() -> None:
    x = torch.zeros(4, 64)
    checks.check_dtype("x", x, torch.float32)
    checks.check_ndim("x", x, 1, 2)
    checks.check_shape("x", x, None, 64)
    checks.check_multiple("width", 64, 32)
    checks.check_same_device(x=x, y=None, z=x)
    assert checks.check_choice("row_map", "aligned", RowMap) is RowMap.ALIGNED
    assert checks.check_format("format", "mxfp8_e4m3") is MXFP8_E4M3
    assert checks.check_axis("axis", 1, 2) == -1


def test_errors() -> None:
    x = torch.zeros(4, 64)
    for call, error, text in [
        (lambda: checks.check_tensor("x", 3), TypeError, "x: expected a torch.Tensor, got int"),
        (
            lambda: checks.check_dtype("x", x, torch.int8),
            TypeError,
            "x: expected torch.int8, got torch.float32",
        ),
        (lambda: checks.check_ndim("x", x, 1, 3), ValueError, "x: expected 1 or 3 axes, got shape (4, 64)"),
        (
            lambda: checks.check_shape("x", x, None, 32),
            ValueError,
            "x: expected shape (any, 32), got shape (4, 64)",
        ),
        (lambda: checks.check_shape("x", x, 4), ValueError, "x: expected shape (4), got shape (4, 64)"),
        (
            lambda: checks.check_multiple("width", 65, 32),
            ValueError,
            "width: expected a multiple of 32, got 65",
        ),
        (
            lambda: checks.check_same_device(x=x, y=x.to("meta")),
            ValueError,
            "x and y: expected one device, got x on cpu, y on meta",
        ),
        (
            lambda: checks.check_choice("row_map", "dense", RowMap),
            ValueError,
            "row_map: expected one of ['compact', 'aligned'], got 'dense'",
        ),
        (
            lambda: checks.check_format("format", MXFP8_E5M2, [MXFP8_E4M3]),
            ValueError,
            "format: expected one of ['mxfp8_e4m3'], got 'mxfp8_e5m2'",
        ),
        (lambda: checks.check_axis("axis", -3, 2), ValueError, "axis: expected an axis in [-2, 2), got -3"),
    ]:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text
