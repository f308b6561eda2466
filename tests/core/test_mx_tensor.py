"""MXTensor: description, checks, devices, pytree, copies, files."""

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mx_core import (
    FORMATS,
    MXFP4_E2M1,
    MXFP6_E3M2,
    MXFP8_E4M3,
    ElementFormat,
    MXTensor,
    ScaleLayout,
    dequantize,
    mx_equal,
    quantize,
)
from torch.utils import _pytree as pytree

FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
BLOCKED = ScaleLayout.BLOCKED_128X4


def test_repr() -> None:
    mx = quantize(torch.randn(3, 64), MXFP8_E4M3, axis=0, layout=BLOCKED)
    assert repr(mx) == "MXTensor((3, 64), MXFP8_E4M3, axis=-2, scale=blocked_128x4)"
    assert repr(mx.to("meta")) == "MXTensor((3, 64), MXFP8_E4M3, axis=-2, scale=blocked_128x4, device=meta)"


def test_properties() -> None:
    mx = quantize(torch.randn(2, 3, 65), MXFP4_E2M1)
    assert (mx.shape, mx.ndim, mx.device.type) == ((2, 3, 65), 3, "cpu")
    assert mx.data.shape == (2, 3, 33)
    assert mx.nbytes == 2 * 3 * 33 + 2 * 3 * 3


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantize(torch.randn(32), MXFP8_E4M3).axis = -2  # type: ignore[misc]


@FORMAT
@pytest.mark.parametrize("layout", ScaleLayout)
def test_matrix_of_a_batch(format: ElementFormat, layout: ScaleLayout) -> None:
    x = torch.randn(3, 70, 96)
    for axis in (-1, -2):
        batch = quantize(x, format, axis=axis, layout=layout)
        assert all(mx_equal(batch[e], quantize(x[e], format, axis=axis, layout=layout)) for e in range(3))
        assert batch[1].data.data_ptr() == batch.data[1].data_ptr()  # a view
    with pytest.raises(ValueError, match=r"MXTensor\[i\]: expected a batch of matrices"):
        quantize(x, format, axis=0)[0]


def test_to_device() -> None:
    mx = quantize(torch.randn(4, 64), MXFP8_E4M3)
    assert mx_equal(mx.cpu(), mx)
    assert mx.to("meta").scale.is_meta
    with pytest.raises(TypeError, match=r"device: expected a device \(use dequantize"):
        mx.to(torch.float32)  # type: ignore[arg-type]


def test_equality() -> None:
    x = torch.randn(40, 64)
    mx = quantize(x, MXFP8_E4M3, layout=BLOCKED)
    assert mx_equal(mx, quantize(x, MXFP8_E4M3, layout=BLOCKED))
    assert not mx_equal(mx, quantize(x, MXFP8_E4M3))
    assert not mx_equal(mx, quantize(x.T, MXFP8_E4M3, layout=BLOCKED))
    for part in ("data", "scale"):
        changed = copy.deepcopy(mx)
        getattr(changed, part).view(torch.uint8).view(-1)[-1] ^= 1  # of the scale: a byte of padding
        assert not mx_equal(mx, changed)
    zero = quantize(torch.zeros(1, 32), MXFP8_E4M3)
    assert not mx_equal(zero, quantize(-torch.zeros(1, 32), MXFP8_E4M3))  # the sign of zero counts


def test_pytree() -> None:
    mx = quantize(torch.randn(4, 64), MXFP6_E3M2)
    leaves, spec = pytree.tree_flatten({"w": mx})
    assert [leaf is part for leaf, part in zip(leaves, (mx.data, mx.scale), strict=True)] == [True, True]
    assert mx_equal(pytree.tree_unflatten(leaves, spec)["w"], mx)
    moved = pytree.tree_map(lambda t: t.to("meta"), mx)
    assert isinstance(moved, MXTensor)
    assert moved.device.type == "meta"
    assert pytree.tree_map(lambda t: None, mx).data is None  # leaves need not be tensors
    assert pytree.tree_structure(mx) == pytree.tree_structure(quantize(torch.randn(4, 64), MXFP6_E3M2))


def test_copies() -> None:
    mx = quantize(torch.randn(4, 64), MXFP8_E4M3)
    deep = copy.deepcopy(mx)
    assert mx_equal(deep, mx)
    assert deep.data.data_ptr() != mx.data.data_ptr()
    assert deep.format is MXFP8_E4M3
    assert copy.copy(mx).data is mx.data


def test_saved_and_loaded_in_another_process(tmp_path: Path) -> None:
    """By torch.load with its default arguments; importing mx_core is all that the process needs to do."""
    x = torch.randn(5, 70)
    saved = [
        quantize(x, format, axis=-2, layout=layout) for format in FORMATS.values() for layout in ScaleLayout
    ]
    file = tmp_path / "mx.pt"
    torch.save([(mx, mx.format.name, dequantize(mx)) for mx in saved], file)
    code = (
        "import sys, torch, mx_core\n"
        "for mx, name, values in torch.load(sys.argv[1]):\n"
        "    assert mx.format is mx_core.FORMATS[name]\n"
        "    assert torch.equal(mx_core.dequantize(mx), values)\n"
        "print('read')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(file)]
    assert (
        subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
        == "read\n"
    )
    assert all(mx_equal(loaded[0], mx) for loaded, mx in zip(torch.load(file), saved, strict=True))


def test_construction_is_checked() -> None:
    data, scale = torch.zeros(4, 64, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.uint8)
    shape = torch.Size((4, 64))

    def build(**changes: object) -> MXTensor:
        fields = {
            "data": data,
            "scale": scale,
            "format": MXFP8_E4M3,
            "axis": -1,
            "layout": ScaleLayout.LINEAR,
        }
        return MXTensor(**{**fields, "shape": shape, **changes})  # type: ignore[arg-type]

    assert build().shape == shape
    for changes, error, text in [
        ({"data": data.view(torch.uint8)}, TypeError, r"data: expected torch.float8_e4m3fn, got torch.uint8"),
        ({"data": data[:3]}, ValueError, r"data: expected shape \(4, 64\), got shape \(3, 64\)"),
        ({"scale": scale.float()}, TypeError, r"scale: expected torch.uint8, got torch.float32"),
        ({"scale": scale.T}, ValueError, r"scale: expected shape \(4, 2\), got shape \(2, 4\)"),
        ({"axis": -2}, ValueError, r"scale: expected shape \(64, 1\), got shape \(4, 2\)"),
        ({"axis": 1}, ValueError, r"axis: expected a negative axis of shape \(4, 64\), got 1"),
        ({"layout": BLOCKED}, ValueError, r"scale: expected shape \(1, 1, 32, 4, 4\), got shape \(4, 2\)"),
        ({"layout": "tiled"}, ValueError, r"layout: expected one of"),
        ({"format": "fp8"}, ValueError, r"format: expected one of"),
        (
            {"scale": scale.to("meta")},
            ValueError,
            r"data and scale: expected one device, got data on cpu, scale on meta",
        ),
    ]:
        with pytest.raises(error, match=text):
            build(**changes)


def test_scales_of_grouped_rows_may_have_more_tiles() -> None:
    """COMPACT rows with blocked scales: every group's scales start on a tile, so there are P scale rows."""
    mx = quantize(torch.randn(130, 64), MXFP8_E4M3, layout=BLOCKED)
    grouped = dataclasses.replace(mx, scale=torch.zeros(4, 1, 32, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"scale: expected the row tiles of 130 rows, got 4 row tiles"):
        dequantize(grouped)
