"""A conformance case: one small PTX kernel, its inputs from a fixed seed, and the buffers to compare.

The same PTX text runs in the emulator and, through the driver, on a real GPU (`record.py`). A kernel body is written
against a fixed set of declarations (`DECLARATIONS`), so that it holds nothing but the instructions under test.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

PTX_HEADER = ".version 8.8\n.target {target}\n.address_size 64\n"
DYNAMIC_SHARED = ".extern .shared .align 1024 .b8 dynamic_shared[];\n"
DECLARATIONS = """\
  .reg .b32 tx, bx, gi, smem;                  // thread, block, global thread (block size known), shared base
  .reg .pred p, q, r, z;
  .reg .b16 h, h<8>;
  .reg .b32 d, s, u, t<12>;
  .reg .b64 w, w<8>;
"""


@dataclass(frozen=True)
class TensorMap:
    """A buffer that holds the 128 bytes of a tensor map over another buffer."""

    of: str
    dtype: str  # a key of `TENSOR_MAP_TYPES`
    dims: tuple[int, ...]  # elements, innermost first
    strides: tuple[int, ...]  # bytes, of the second axis on
    box: tuple[int, ...]
    swizzle: int = 0  # 0 none, 1 32B, 2 64B, 3 128B
    nan_fill: bool = False


TENSOR_MAP_TYPES = {  # name: (value of CUtensorMapDataType, bytes)
    "u8": (0, 1), "u16": (1, 2), "u32": (2, 4), "s32": (3, 4), "u64": (4, 8), "s64": (5, 8), "f16": (6, 2),
    "f32": (7, 4), "f64": (8, 8), "bf16": (9, 2), "f32ftz": (10, 4), "tf32": (11, 4), "tf32ftz": (12, 4),
}  # fmt: skip

Buffers = Mapping[str, "np.ndarray | TensorMap"]


@dataclass(frozen=True)
class Case:
    """One kernel and what goes in and out of it.

    `body` sees every buffer's address as a .b64 register of the buffer's name. Buffers are read and written in place;
    those in `outputs` are compared afterwards.
    """

    name: str
    body: str
    buffers: Callable[[np.random.Generator], Buffers]
    outputs: tuple[str, ...] = ("out",)
    grid: tuple[int, int, int] = (1, 1, 1)
    block: int = 128
    cluster: tuple[int, int, int] = (1, 1, 1)
    smem: int = 0
    target: str = "sm_90a"
    labels: tuple[str, ...] = ()  # names of the first output's rows, for messages
    ulps: Mapping[str, int] | None = None  # rows that only have to be this close (approximate functions)

    def inputs(self) -> Buffers:
        """The buffers, drawn from a generator seeded with the case's name."""
        return self.buffers(self.rng())

    def rng(self) -> np.random.Generator:
        """The generator of the inputs, from its start."""
        return np.random.default_rng(zlib.crc32(self.name.encode()))

    def ptx(self) -> str:
        """The whole module; its entry is called `kernel`."""
        names = list(self.inputs())
        x, y, z = self.cluster
        lines = [
            PTX_HEADER.format(target=self.target) + DYNAMIC_SHARED,
            f".visible .entry kernel({', '.join(f'.param .u64 param_{n}' for n in names)})",
            f".reqntid {self.block}, 1, 1",
            *([f".explicitcluster\n.reqnctapercluster {x}, {y}, {z}"] if self.cluster != (1, 1, 1) else []),
            "{",
            DECLARATIONS + f"  .reg .b64 {', '.join(names)};",
            *(f"  ld.param.u64 {n}, [param_{n}];" for n in names),
            f"  mov.u32 tx, %tid.x; mov.u32 bx, %ctaid.x; mad.lo.u32 gi, bx, {self.block}, tx; mov.u32 smem, dynamic_shared;",
            self.body.rstrip(),
            "  ret;",
            "}",
        ]
        return "\n".join(lines) + "\n"


def elementwise(
    name: str,
    operations: Mapping[str, str],
    inputs: Callable[[np.random.Generator], Iterable[np.ndarray]],
    *,
    block: int = 128,
    ulps: Mapping[str, int] | None = None,
    target: str = "sm_90a",
) -> Case:
    """One kernel that applies every operation to the same words: row i of `out` is operation i's result.

    An operation reads the .b32 registers a, b, c (their 16-bit halves are al, ah, bl, …; ab and bc are the .b64 pairs
    {a, b} and {b, c}) and writes one of d (.b32), h (.b16), p (.pred) or w (.b64, whose two words are added).
    """
    body = ["  .reg .b32 a, b, c; .reg .b16 al, ah, bl, bh, cl, ch; .reg .b64 ab, bc;", _LOAD_ABC]
    for row, text in enumerate(operations.values()):
        result = next(r for r in ("d", "h", "p", "w") if re.search(rf"(?<![\w.%]){r}(?![\w.])", text))
        finish = {
            "d": "",
            "h": "cvt.u32.u16 d, h;",
            "p": "selp.b32 d, 1, 0, p;",
            "w": "mov.b64 {t10, t11}, w; mad.lo.u32 d, t11, 0x9e3779b1, t10;",
        }[result]
        body.append(
            f"  {{ {text} {finish} mad.lo.u32 t10, t9, {row}, gi; mad.wide.u32 w7, t10, 4, out; st.global.b32 [w7], d; }}"
        )

    def buffers(rng: np.random.Generator) -> Buffers:
        columns = [np.asarray(x, np.uint32) for x in inputs(rng)]
        order = rng.permutation(
            len(columns[0])
        )  # so that the first values, which are stored, are a fair sample
        columns = [x[order] for x in columns]
        columns += [np.zeros_like(columns[0])] * (3 - len(columns))
        n = -(-len(columns[0]) // block) * block
        padded = [np.concatenate([x, np.zeros(n - len(x), np.uint32)]) for x in columns]
        return dict(zip(("in_a", "in_b", "in_c"), padded, strict=True)) | {
            "out": np.full((len(operations), n), 0xDEADBEEF, np.uint32)
        }

    n = len(next(iter(buffers(np.random.default_rng(0)).values())))
    return Case(name, "\n".join(body), buffers, grid=(n // block, 1, 1), block=block, labels=tuple(operations), ulps=ulps, target=target)  # fmt: skip


_LOAD_ABC = """\
  mul.wide.u32 w, gi, 4; add.u64 w0, in_a, w; add.u64 w1, in_b, w; add.u64 w2, in_c, w;
  ld.global.b32 a, [w0]; ld.global.b32 b, [w1]; ld.global.b32 c, [w2];
  mov.b32 {al, ah}, a; mov.b32 {bl, bh}, b; mov.b32 {cl, ch}, c; mov.b64 ab, {a, b}; mov.b64 bc, {b, c};
  mov.u32 t9, %nctaid.x; mov.u32 t10, %ntid.x; mul.lo.u32 t9, t9, t10;"""


# ---- inputs that distinguish ---------------------------------------------------------------------------------------

SPECIAL_F32 = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000, 0x3F800001,
     0x3F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF,
     0x7FFFFFFF, 0x4B000001, 0x43E00000, 0x33800000, 0x34000000, 0x00400000],
    np.uint32,
)  # fmt: skip
SPECIAL_INT = np.array(
    [0, 1, 2, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000,
     0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x12345678, 0xDEADBEEF],
    np.uint32,
)  # fmt: skip


def random_bits(rng: np.random.Generator, n: int) -> np.ndarray:
    """n random words."""
    return rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)


def f32_bits(x: np.ndarray) -> np.ndarray:
    """Values as the bits of fp32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).view(np.uint32)


def near_ties(rng: np.random.Generator, n: int, mantissa: int, emin: int, emax: int) -> np.ndarray:
    """fp32 bits at, just under and just over the midpoints of a format with `mantissa` fraction bits."""
    exponent = rng.integers(emin - mantissa - 2, emax + 2, n)
    fraction = rng.integers(0, 1 << (mantissa + 2), n)
    bits = f32_bits((1 + fraction / 2.0 ** (mantissa + 2)) * 2.0**exponent).astype(np.int64) + rng.integers(
        -1, 2, n
    )
    return bits.astype(np.uint32) ^ (rng.integers(0, 2, n).astype(np.uint32) << np.uint32(31))


def combinations(rng: np.random.Generator, values: np.ndarray, columns: int, n: int) -> np.ndarray:
    """n rows of `columns` values each: every combination when they fit, else a random choice of them."""
    every = np.stack(np.meshgrid(*[values] * columns, indexing="ij"), -1).reshape(-1, columns)
    return every[rng.permutation(len(every))[:n]]
