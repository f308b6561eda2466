"""Checkpoints that are whole or not there.

A checkpoint is a folder `checkpoints/step-00000100` with `state.pt` and `manifest.json` (step and SHA-256). It is written
under another name, flushed to disk and renamed, so a run killed at any moment leaves the older ones intact. A
checkpoint whose hash does not match is refused, never half-loaded.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from mx_trainer.errors import CheckpointError

_NAME = re.compile(r"step-(\d{8})")


def save_checkpoint(root: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as the checkpoint of `step` under `root`; of the older ones keep `keep - 1`, of later ones none."""
    folder = root / f"step-{step:08d}"
    scratch = root / f".{folder.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    torch.save(state, scratch / "state.pt")
    manifest = {"step": step, "sha256": _sha256(scratch / "state.pt"), "torch": torch.__version__}
    (scratch / "manifest.json").write_text(json.dumps(manifest) + "\n")
    for path in (scratch / "state.pt", scratch / "manifest.json", scratch):
        _fsync(path)
    shutil.rmtree(folder, ignore_errors=True)  # the same step again, after a resume
    scratch.rename(folder)
    _fsync(root)
    found = list_checkpoints(root)
    later = [p for p in found if p.name > folder.name]  # of a continuation that this one replaces
    for stale in found[: -keep - len(later)] + later:
        shutil.rmtree(stale, ignore_errors=True)
    return folder


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first."""
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if _NAME.fullmatch(p.name))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest of a run folder.

    Raises:
        CheckpointError: if there is none.
    """
    if _NAME.fullmatch(path.name):
        if path.is_dir():
            return path
        raise CheckpointError(f"{path}: no such checkpoint")
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{path}: no checkpoint in it (expected {path / 'checkpoints' / 'step-XXXXXXXX'})"
        )
    return found[-1]


def run_dir_of(checkpoint: Path) -> Path:
    """The run folder that a checkpoint folder lies in."""
    return checkpoint.parent.parent


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU after checking its hash. Tensors and plain containers only: no code is run.

    Raises:
        CheckpointError: if it is damaged.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        intact = manifest["sha256"] == _sha256(folder / "state.pt")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: damaged checkpoint ({error})") from error
    if not intact:
        others = [str(p) for p in list_checkpoints(folder.parent) if p != folder]
        hint = f"; an older one: {others[-1]}" if others else ""
        raise CheckpointError(f"{folder}: damaged checkpoint (state.pt does not match its SHA-256){hint}")
    return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
