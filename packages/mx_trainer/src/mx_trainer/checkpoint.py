"""Checkpoints that are whole or not there: written by any number of processes, read by any other number.

A checkpoint is a folder `checkpoints/step-00000100` in the format of torch.distributed.checkpoint (`shards.py`), with the
plain values in `values.json` and each file's hash in `SHA256SUMS` (`sha256sum -c` reads it). It is written under another name,
flushed to disk and renamed, and one that is not wanted any more is renamed before it is removed: a run killed at any moment
leaves whole checkpoints only. One whose hashes do not match is refused, never half-loaded. Several machines need a file
system that they share.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from mx_trainer.errors import CheckpointError

T = TypeVar("T")
State = dict[str, Any]
"""Plain values (JSON) and, one level deep, dicts of tensors: {"step": 3, "model": {"head.weight": ...}}."""

_NAME = re.compile(r"step-(\d{8})")
_SUMS, _VALUES = "SHA256SUMS", "values.json"


# --- which checkpoints there are --------------------------------------------------------------------------------------


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


# --- writing ----------------------------------------------------------------------------------------------------------


def save_checkpoint(root: Path, step: int, state: State, keep: int) -> Path:
    """Write `state` as the checkpoint of `step` under `root`; of the older ones keep `keep - 1`, of later ones none.

    All ranks call it, with the same plain values. A DTensor is written as its shards, each by a rank that holds it; any other
    tensor is the same on all ranks that have it, and is written once.

    Raises:
        CheckpointError: on every rank, where one cannot write; it names the rank.
    """
    from mx_trainer.shards import write_shards  # torch.distributed.checkpoint takes seconds to import

    rank, _ = _place()
    folder = root / f"step-{step:08d}"
    scratch = root / f".{folder.name}.tmp"

    def begin() -> None:
        for left in root.glob(".step-*"):  # by a run that was killed
            shutil.rmtree(left)
        scratch.mkdir(parents=True)
        values = {name: value for name, value in state.items() if not isinstance(value, Mapping)}
        (scratch / _VALUES).write_text(json.dumps(values, indent=1) + "\n")

    def publish() -> None:
        sums = {name: digest for part in parts for name, digest in part.items()}
        _refuse_unseen(scratch, sums)
        (scratch / _SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        _publish(scratch, folder, keep)

    _together(folder, lambda: begin() if rank == 0 else None)
    write_shards(scratch, _tensors(state))
    mine = (f"__{rank}_*", ".metadata", _VALUES) if rank == 0 else (f"__{rank}_*",)
    parts = _together(folder, lambda: {p.name: _sha256(p) for glob in mine for p in scratch.glob(glob)})
    _together(folder, lambda: publish() if rank == 0 else None)
    return folder


def _publish(scratch: Path, folder: Path, keep: int) -> None:
    """Flush, rename into place, then drop what is not wanted any more."""
    root = folder.parent
    for path in (*scratch.iterdir(), scratch):
        _fsync(path)
    if folder.exists():  # the same step again, after a resume
        _drop(folder)
    scratch.rename(folder)
    _fsync(root)
    found = list_checkpoints(root)
    later = [p for p in found if p.name > folder.name]  # of a continuation that this one replaces
    for stale in found[: -keep - len(later)] + later:
        _drop(stale)


def _drop(folder: Path) -> None:
    """Remove a checkpoint. Renamed first: what is half removed has no checkpoint's name."""
    condemned = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(condemned, ignore_errors=True)
    folder.rename(condemned)
    shutil.rmtree(condemned, ignore_errors=True)


def _refuse_unseen(scratch: Path, names: Mapping[str, str]) -> None:
    missing = [name for name in names if not (scratch / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{missing[0]} was written by another rank and cannot be seen here; "
            "checkpoints need a file system that all machines share"
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_values(folder: Path) -> State:
    """The plain values of a checkpoint, to know what can be loaded.

    Raises:
        CheckpointError: if they are damaged, or the checkpoint is of an older version.
    """
    _verify(folder, {name: digest for name, digest in _read_sums(folder).items() if name == _VALUES})
    return _values(folder)


def _values(folder: Path) -> State:
    return json.loads((folder / _VALUES).read_text())


def load_checkpoint(folder: Path, into: State) -> State:
    """Read a checkpoint after checking its hashes. Tensors and plain values only: no code is run.

    All ranks call it.

    Args:
        folder: the checkpoint.
        into: dicts of tensors as in a state, which are overwritten: each rank gets the shards that its DTensors hold, however
            the checkpoint was sharded. A dict that is not in `into` is left out.

    Returns:
        The plain values, and the dicts of `into`.

    Raises:
        CheckpointError: if it is damaged, or if the dicts of `into` have other tensors than those in the checkpoint.
    """
    from mx_trainer.shards import read_shards

    rank, world = _place()

    def verify() -> None:
        sums = sorted(_read_sums(folder).items())
        _verify(folder, dict(sums[rank::world]))  # ranks share the work

    _together(folder, verify)
    read_shards(folder, _tensors(into))
    return {**_values(folder), **into}


def _read_sums(folder: Path) -> dict[str, str]:
    """Name and SHA-256 of each file of a checkpoint."""
    if (folder / "state.pt").exists():
        raise CheckpointError(
            f"{folder}: state.pt is the format of an older version, which this one does not read"
        )
    try:
        lines = (folder / _SUMS).read_text().splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{_SUMS}: {error}") from error
    if _VALUES not in sums:
        raise _damaged(folder, f"{_SUMS} is not whole")
    return sums


def _verify(folder: Path, sums: Mapping[str, str]) -> None:
    for name, digest in sums.items():
        try:
            intact = _sha256(folder / name) == digest
        except OSError as error:
            raise _damaged(folder, str(error)) from error
        if not intact:
            raise _damaged(folder, f"{name} does not match its SHA-256")


def _damaged(folder: Path, what: str) -> CheckpointError:
    others = [str(p) for p in list_checkpoints(folder.parent) if p != folder]
    hint = f"; an older one: {others[-1]}" if others else ""
    return CheckpointError(f"{folder}: damaged checkpoint ({what}){hint}")


# --- ranks and files --------------------------------------------------------------------------------------------------


def _tensors(state: State) -> dict[str, Tensor]:
    """The tensors of a state by their full names."""
    parts = {name: part for name, part in state.items() if isinstance(part, Mapping)}
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}


def _place() -> tuple[int, int]:
    """Rank and world."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _together(folder: Path, work: Callable[[], T]) -> list[T]:
    """Each rank's result of `work`. Where it fails on one rank, all raise: a CheckpointError that names the rank."""
    _, world = _place()
    if world == 1:
        return [work()]
    result: T | None = None
    failure = None
    try:
        result = work()
    except (OSError, CheckpointError) as error:
        failure = str(error)
    outcomes: list[Any] = [None] * world
    dist.all_gather_object(outcomes, (result, failure))
    failures = [(rank, failure) for rank, (_, failure) in enumerate(outcomes) if failure]
    if failures:
        rank, failure = failures[0]
        raise CheckpointError(f"{folder}: rank {rank}: {failure}")
    return [result for result, _ in outcomes]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
