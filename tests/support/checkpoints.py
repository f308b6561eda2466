"""What is in a checkpoint, read by torch's own converter, and comparison bit for bit."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def whole_state(folder: Path) -> dict[str, Any]:
    """Every tensor under its full name, whole, whatever ranks wrote it; and the plain values."""
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, Path(scratch) / "all.pt")
        tensors = torch.load(Path(scratch) / "all.pt", weights_only=True)
    return tensors | json.loads((folder / "values.json").read_text())


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Equal names, values, dtypes and bits."""
    return a.keys() == b.keys() and not differences(a, b)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names, among those in both, that differ."""
    return [name for name in a if name in b and not _same(a[name], b[name])]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b
