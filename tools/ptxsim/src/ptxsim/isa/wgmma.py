"""Hopper's warpgroup matrix multiply."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..parser import Instruction, constant
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

_TYPES = {
    "bf16": 16, "f16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8,
}  # fmt: skip


@instruction(
    "wgmma", writes=lambda i: int(i.mods[0] == "mma_async"), ends=lambda i: i.mods[0] == "wait_group"
)
def wgmma(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    kind = mods.pick("fence", "commit_group", "wait_group", "mma_async")
    mods.pick("sync")
    mods.pick("aligned")
    e.emit(f"need_full_warp(W, {e.mask}, {ins.site}, 'wgmma')")
    if kind == "fence":
        e.emit("wgmma_fence(W)")
    elif kind == "commit_group":
        e.emit(f"wgmma_commit(W, {ins.site})")
    elif kind == "wait_group":
        e.emit(f"return wgmma_wait(W, {int(ins.operands[0], 0)}, {e.next_block}, {ins.site})")
        return True
    else:
        _mma_async(e, ins, mods)
    return False


def _mma_async(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if "sp" in mods.left:
        raise refuse(ins, "sparse wgmma is not modelled")
    satfinite = mods.flag("satfinite")
    shape = mods.prefixed("m64n")
    match = re.fullmatch(r"m64n(\d+)k(\d+)", shape or "")
    if match is None:
        raise refuse(ins, "shape expected")
    n, k = int(match.group(1)), int(match.group(2))
    if len(mods.left) < 3:
        raise refuse(ins, "three types expected")
    d_type, a_type, b_type = mods.left[:3]
    mods.left = mods.left[3:]
    if a_type not in _TYPES or b_type not in _TYPES or d_type not in ("f32", "f16", "s32"):
        raise refuse(ins, f"types .{d_type}.{a_type}.{b_type} are not modelled")
    if k * _TYPES[a_type] != 256 or n % 8 or not 8 <= n <= 256 or satfinite:
        raise refuse(ins, "shape or .satfinite is not modelled")
    d, a, b, scale_d, *immediates = ins.operands
    slots = [e.pinned(r) for r in e.operands(d)]
    if len(slots) != (n // 4 if d_type == "f16" else n // 2):
        raise refuse(ins, "accumulator registers")
    in_registers = a.startswith("{")
    a_value = "[" + ", ".join(e.val(r) for r in e.operands(a)) + "]" if in_registers else e.val(a, 64)
    numbers = [constant(x, 32) for x in immediates]
    negate_a = len(numbers) > 0 and numbers[0] == 0xFFFFFFFF
    negate_b = len(numbers) > 1 and numbers[1] == 0xFFFFFFFF
    transposes = [bool(x) for x in numbers[2:]]
    if in_registers:
        transposes = [False, *transposes]
    transpose_a, transpose_b = ([*transposes, False, False])[:2]
    e.emit(
        f"wgmma_mma(W, R, {slots}, {n}, {d_type!r}, {a_type!r}, {b_type!r}, {a_value}, {in_registers}, {e.val(b, 64)}, "
        f"{e.pred(scale_d)}, {negate_a}, {negate_b}, {transpose_a}, {transpose_b}, {ins.site})"
    )
