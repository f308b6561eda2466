"""Run a case in the emulator."""

from __future__ import annotations

import numpy as np
import ptxsim
from emulator.conformance.case import TENSOR_MAP_TYPES, Case, TensorMap
from ptxsim.core.tensormap import encode_tiled


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy at a 1024-byte boundary, as cudaMalloc would place it."""
    raw = np.zeros(x.nbytes + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    copy = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def tensor_map_bytes(spec: TensorMap, address: int) -> np.ndarray:
    """The emulator's encoding of a tensor map."""
    raw = encode_tiled(
        TENSOR_MAP_TYPES[spec.dtype][0], address, list(spec.dims), list(spec.strides), list(spec.box), [1] * len(spec.dims),
        interleave=0, swizzle=spec.swizzle, l2_promotion=0, nan_fill=int(spec.nan_fill),
    )  # fmt: skip
    return np.frombuffer(raw, np.uint8)


def emulate(
    case: Case, *, schedule: str = "early", seed: int = 0, **options: object
) -> dict[str, np.ndarray]:
    """The case's outputs. `options` as in `ptxsim.gpu`."""
    memory: dict[str, np.ndarray] = {}
    for name, x in case.inputs().items():
        memory[name] = aligned(
            tensor_map_bytes(x, memory[x.of].ctypes.data)
            if isinstance(x, TensorMap)
            else np.ascontiguousarray(x)
        )
    ptxsim.run_ptx(
        case.ptx(), "kernel", grid=case.grid, block=case.block, cluster=case.cluster, smem=case.smem,
        args=list(memory.values()), schedule=schedule, seed=seed, **options,
    )  # fmt: skip
    return {name: memory[name] for name in case.outputs}
