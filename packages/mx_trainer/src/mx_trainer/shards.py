"""Tensors of all ranks to files and back, by torch.distributed.checkpoint: one file per rank, and `.metadata`, which says where
each part of each tensor lies. Reading them runs no code, although `.metadata` is a pickle.
"""

import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mx_trainer.errors import CheckpointError

METADATA = ".metadata"


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write and flush `tensors`; all ranks call it. A tensor that is not a DTensor is written once, by one of those that have it.

    Raises:
        CheckpointError: on every rank, naming the one that could not write.
    """
    with _errors(folder):
        dcp.save(
            dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=not dist.is_initialized()
        )


def read_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite `tensors`, DTensors with the shards they hold here; all ranks call it.

    Raises:
        CheckpointError: if the files hold other tensors: of the parts ("model" of "model.head.weight") that `tensors` has,
            all must be there, in the same shapes.
    """
    reader = _Reader(folder)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    parts = {name.partition(".")[0] for name in wanted}
    stored = {n: shape for n, shape in reader.shapes().items() if n.partition(".")[0] in parts}
    for name in [*wanted, *stored]:
        if wanted.get(name) != stored.get(name):
            raise CheckpointError(
                f"{folder}: the checkpoint is of another model: {name}: expected "
                f"{wanted.get(name, 'no such tensor')}, got {stored.get(name, 'none')}"
            )
    with _errors(folder):
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


class _Reader(dcp.FileSystemReader):
    """Torch's reader, with an unpickler that knows what describes tensors, and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors; what is no tensor has none."""
        entries = self.read_metadata().state_dict_metadata.items()
        return {name: tuple(meta.size) for name, meta in entries if isinstance(meta, TensorStorageMetadata)}


class _MetadataUnpickler(pickle.Unpickler):
    _KNOWN = frozenset({
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",  # Python 3.13
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in self._KNOWN:
            raise CheckpointError(f"{METADATA}: expected descriptions of tensors, got {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def _errors(folder: Path) -> Generator[None]:
    """Turn torch's CheckpointException, which is no Exception, into a CheckpointError that names the rank."""
    try:
        with warnings.catch_warnings(
            action="ignore", category=UserWarning
        ):  # a single process is meant to be one
            yield
    except dcp.CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise CheckpointError(f"{folder}: rank {rank}: {type(cause).__name__}: {cause}") from error
