"""Small PTX kernels for the emulator's own tests."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import ptxsim

_DECLARATIONS = """
  .reg .pred p, q, r, z;
  .reg .b16 h, h<8>;
  .reg .b32 tx, lane, smem, d, s, u, t<40>;
  .reg .b64 w, w<8>;
  mov.u32 tx, %tid.x;
  mov.u32 lane, %laneid;
  mov.u32 smem, dynamic_shared;
"""


def text(body: str, buffers: int = 1, target: str = "sm_100a") -> str:
    """A module with one kernel; buffer addresses are the registers a0, a1, …"""
    params = ", ".join(f".param .u64 p{i}" for i in range(buffers))
    loads = "".join(f"  .reg .b64 a{i}; ld.param.u64 a{i}, [p{i}];\n" for i in range(buffers))
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n"
        ".extern .shared .align 1024 .b8 dynamic_shared[];\n"
        f".visible .entry kernel({params}) {{\n{_DECLARATIONS}{loads}\n{body}\nret;\n}}\n"
    )


def run(
    body: str, *buffers: Any, block: int = 32, smem: int = 4096, target: str = "sm_100a", **options: Any
) -> ptxsim.api.LaunchRecord:
    """Run a body over buffers (numpy arrays; their addresses are a0, a1, …)."""
    return ptxsim.run_ptx(text(body, len(buffers), target), block=block, smem=smem, args=buffers, **options)


def evaluate(code: str, *inputs: np.ndarray, outputs: int = 1, wide: bool = False) -> np.ndarray:
    """One instruction sequence per lane: `$1…` are inputs, `$0` the result (`$o1` a second one); 32-bit, or 64 if `wide`.

    Inputs of any length are run 32 lanes at a time; returns [outputs, n] or [n].
    """
    n = len(inputs[0])
    lanes = -(-n // 32) * 32
    width, unit = ("64", 8) if wide else ("32", 4)
    dtype = np.uint64 if wide else np.uint32
    padded = [np.concatenate([x.astype(dtype), np.zeros(lanes - n, dtype)]) for x in inputs]
    result = np.full((outputs, lanes), 0xDEADBEEF, dtype)
    lines = [
        f".reg .b{width} in<5>, out<3>; .reg .b64 at; mad.lo.u32 t0, %ctaid.x, 32, tx; mul.wide.u32 w, t0, {unit};"
    ]
    lines += [f"add.u64 at, a{i}, w; ld.global.b{width} in{i + 1}, [at];" for i in range(len(inputs))]
    code = re.sub(r"\$o1", "out1", re.sub(r"\$0", "out0", re.sub(r"\$([1-4])", r"in\1", code)))
    lines.append(code)
    lines.append(f"add.u64 at, a{len(inputs)}, w;")
    lines += [f"st.global.b{width} [at+{o * lanes * unit}], out{o};" for o in range(outputs)]
    run("\n".join(lines), *padded, result, grid=lanes // 32, target="sm_100a")
    return result[0, :n] if outputs == 1 else result[:, :n]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def as_f32(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)
