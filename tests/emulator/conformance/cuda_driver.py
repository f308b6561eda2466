"""Just enough of the CUDA driver to run a case's PTX on a real GPU: module, tensor map, launch (ctypes; memory by torch)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from emulator.conformance.case import TENSOR_MAP_TYPES, Case, TensorMap

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NON_PORTABLE_CLUSTER = 15  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


def assemble(case: Case) -> bytes:
    """The case's cubin by ptxas where there is one, else the PTX for the driver's own compiler."""
    ptxas = shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")
    if ptxas is None:
        return case.ptx().encode() + b"\0"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "case.ptx", Path(folder) / "case.cubin"
        source.write_text(case.ptx())
        done = subprocess.run(
            [ptxas, f"-arch={case.target}", source, "-o", cubin], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"ptxas refuses {case.name}: {done.stderr}")
        return cubin.read_bytes()


class Driver:
    """The current device's context."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device="cuda")  # makes the context
        self._cuda = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def encode_tensor_map(self, spec: TensorMap, address: int) -> np.ndarray:
        """The 128 bytes that cuTensorMapEncodeTiled writes."""
        rank = len(spec.dims)
        u64, u32 = (
            lambda xs: (ctypes.c_uint64 * max(len(xs), 1))(*xs),
            lambda xs: (ctypes.c_uint32 * len(xs))(*xs),
        )
        raw = (ctypes.c_uint8 * 192)()
        aligned = -(-ctypes.addressof(raw) // 64) * 64
        self._call(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned), ctypes.c_int(TENSOR_MAP_TYPES[spec.dtype][0]), ctypes.c_uint32(rank),
            ctypes.c_void_p(address), u64(spec.dims), u64(spec.strides), u32(spec.box), u32([1] * rank),
            ctypes.c_int(0), ctypes.c_int(spec.swizzle), ctypes.c_int(0), ctypes.c_int(int(spec.nan_fill)),
        )  # fmt: skip
        return np.frombuffer(ctypes.string_at(aligned, 128), np.uint8).copy()

    def run(self, case: Case, image: bytes) -> dict[str, np.ndarray]:
        """Launch and return the outputs."""
        host = case.inputs()
        device = {}
        for name, x in host.items():
            data = (
                self.encode_tensor_map(x, device[x.of].data_ptr())
                if isinstance(x, TensorMap)
                else np.ascontiguousarray(x)
            )
            device[name] = torch.from_numpy(data.reshape(-1).view(np.uint8).copy()).cuda()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), image)
        self._call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, case.smem)
        pointers = [ctypes.c_uint64(t.data_ptr()) for t in device.values()]
        params = (ctypes.c_void_p * len(pointers))(*[ctypes.addressof(p) for p in pointers])
        self._call("cuLaunchKernel", function, *case.grid, case.block, 1, 1, case.smem, None, params, None)
        torch.cuda.synchronize()
        outputs = {}
        for name in case.outputs:
            x = host[name]
            assert isinstance(x, np.ndarray)
            outputs[name] = device[name].cpu().numpy().view(x.dtype).reshape(x.shape)
        self._call("cuModuleUnload", module)
        return outputs
