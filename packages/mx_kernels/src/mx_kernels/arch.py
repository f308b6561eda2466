"""What GPU a tensor lives on, as kernels need to know it.

Inside `emulated(target, num_sms)` CPU tensors count as memory of that GPU, so that a kernel can be run by an emulator
through the same ops, registry and autograd as on hardware.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

#: Compute capability → compile target. sm_12x (consumer and workstation Blackwell) has no tcgen05 and is not here.
TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


@dataclass(frozen=True, slots=True)
class EmulatedGpu:
    """A GPU that CPU tensors stand for."""

    target: str
    num_sms: int


_emulated: EmulatedGpu | None = None


@contextlib.contextmanager
def emulated(target: str, num_sms: int) -> Iterator[EmulatedGpu]:
    """Let CPU tensors count as memory of a GPU of this target ("sm_90a", "sm_100a", "sm_103a")."""
    global _emulated
    if target not in TARGETS.values():
        raise ValueError(f"target: expected one of {', '.join(TARGETS.values())}, got {target!r}")
    if num_sms < 1:
        raise ValueError(f"num_sms: expected at least 1, got {num_sms}")
    before, _emulated = _emulated, EmulatedGpu(target, num_sms)
    try:
        yield _emulated
    finally:
        _emulated = before


def active_emulation() -> EmulatedGpu | None:
    """The GPU that CPU tensors stand for now, if any."""
    return _emulated


@functools.cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def target_of(device: torch.device) -> str | None:
    """Compile target of a device: "sm_90a", "sm_100a", "sm_103a", or None where there are no kernels for it."""
    if device.type == "cpu":
        return _emulated.target if _emulated else None
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    properties = _properties(_cuda_index(device))
    return TARGETS.get((properties.major, properties.minor))


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a device that has a target."""
    if device.type == "cpu" and _emulated:
        return _emulated.num_sms
    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {device}")
    return _properties(_cuda_index(device)).multi_processor_count


def describe(device: torch.device) -> str:
    """A device in words, for messages: `cuda:0, NVIDIA B200 (capability 10.0)`."""
    if device.type == "cpu":
        return f"cpu, standing for {_emulated.target}" if _emulated else "cpu"
    if device.type != "cuda":
        return str(device)
    properties = _properties(_cuda_index(device))
    words = f"{device}, {properties.name} (capability {properties.major}.{properties.minor}"
    return words + (", Blackwell without tcgen05)" if properties.major == 12 else ")")
