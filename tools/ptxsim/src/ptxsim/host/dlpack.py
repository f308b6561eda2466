"""CPU memory that claims to be GPU memory, for code that looks at a tensor's device."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_CPU, _CUDA = 1, 2
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]


class AsCuda:
    """DLPack view of a CPU torch tensor whose device field says CUDA 0; the data stay where they are."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    @staticmethod
    def wrap(x: Any) -> Any:
        """CPU torch tensors are wrapped, everything else is returned as it is."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(x, torch.Tensor) or x.device.type != "cpu":
            return x
        return AsCuda(x.detach() if x.requires_grad else x)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        capsule = self.tensor.__dlpack__()
        name = _get_name(capsule)
        # DLManagedTensor starts with the DLTensor; the versioned struct has version, context, deleter and flags before it
        offset = 8 if name == b"dltensor" else 40
        device = ctypes.c_int32.from_address(_get_pointer(capsule, name) + offset)
        assert device.value == _CPU
        device.value = _CUDA
        return capsule
