"""The fifth-generation tensor core: allocation, copies, matrix multiply, loads and stores of TMEM."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..parser import Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

_BLOCKED_KINDS = {
    # kind: (elements a scale covers by default, allowed spellings → elements)
    "mxf8f6f4": (32, {"block32": 32, "scale_vec::1X": 32}),
    "mxf4": (32, {"block32": 32, "scale_vec::2X": 32}),
    "mxf4nvf4": (None, {"block16": 16, "block32": 32, "scale_vec::4X": 16, "scale_vec::2X": 32}),
}


def _kind(ins: Instruction) -> str:
    return ins.mods[0].split("::")[0]


@instruction(
    "tcgen05",
    writes=lambda i: int(_kind(i) == "ld"),
    ends=lambda i: _kind(i) == "alloc",
    starts=lambda i: _kind(i) == "alloc",
)
def tcgen05(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    kind = _kind(ins)
    ops = ins.operands
    if kind in ("ld", "st"):
        _load_store(e, ins, mods, kind)
        return False
    if kind == "wait":
        what = mods.pick("wait::ld", "wait::st")
        mods.hints("sync", "aligned")
        e.emit(f"tmem_wait(W, {what[6:]!r}, {ins.site})")
        return False
    if kind == "fence":
        what = mods.pick("fence::before_thread_sync", "fence::after_thread_sync")
        e.emit(f"tmem_fence(W, {what[7:]!r})")
        return False
    group = 2 if mods.pick("cta_group::1", "cta_group::2") == "cta_group::2" else 1
    if kind == "alloc":
        mods.left.remove("alloc")
        mods.hints("sync", "aligned", "b32")
        mods.one_of("shared::cta", default=None)
        e.emit(
            f"return tmem_alloc(W, {e.mask}, {e.addr(ops[0])}, {e.val(ops[1])}, {group}, {e.next_block}, {ins.site})"
        )
        return True
    if kind == "dealloc":
        mods.left.remove("dealloc")
        mods.hints("sync", "aligned", "b32")
        e.emit(f"tmem_dealloc(W, {e.mask}, {e.val(ops[0])}, {e.val(ops[1])}, {group}, {ins.site})")
    elif kind == "relinquish_alloc_permit":
        mods.left.remove(kind)
        mods.hints("sync", "aligned")
        e.emit(f"tmem_relinquish(W, {group}, {ins.site})")
    elif kind == "commit":
        mods.left.remove("commit")
        mods.prefixed("mbarrier::arrive::one")
        mods.one_of("shared::cluster", default=None)
        multicast = mods.flag("multicast::cluster")
        mods.hints("b64")
        mask = e.val(ops[1], 16) if multicast else "None"
        e.emit(f"tc_commit(W, {e.addr(ops[0])}, {mask}, {group}, {e.mask}, {ins.site})")
    elif kind == "cp":
        mods.left.remove("cp")
        shape = mods.pick("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
        spread = mods.one_of("warpx4", "warpx2::02_13", "warpx2::01_23", default=None)
        if mods.prefixed("b8x16"):
            raise refuse(ins, "decompression (.b8x16.…) is not modelled")
        if (shape, spread) not in (
            ("128x256b", None),
            ("128x128b", None),
            ("32x128b", "warpx4"),
            ("64x128b", "warpx2::02_13"),
            ("64x128b", "warpx2::01_23"),
            ("4x256b", None),
        ):
            raise refuse(ins, f"{shape} with {spread} is not modelled")
        e.emit(
            f"tc_copy(W, {e.addr(ops[0])}, {e.val(ops[1], 64)}, {shape!r}, {spread!r}, {group}, {e.mask}, {ins.site})"
        )
    elif kind == "shift":
        raise refuse(ins)
    elif kind == "mma":
        _mma(e, ins, mods, group)
    else:
        raise refuse(ins)
    return False


def _load_store(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    mods.left.remove(kind)
    mods.pick("sync")
    mods.pick("aligned")
    shape = mods.pick("32x32b", "16x64b", "16x128b", "16x256b")
    repeat = next((m for m in mods.left if re.fullmatch(r"x\d+", m)), None)
    if repeat is None:
        raise refuse(ins, "repetition expected")
    mods.left.remove(repeat)
    mods.pick("b32")
    n = int(repeat[1:])
    registers = n * {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4}[shape]
    e.emit(f"need_full_warp(W, {e.mask}, {ins.site}, 'tcgen05.{kind}')")
    if kind == "ld":
        packed = mods.flag("pack::16b")
        if packed and shape != "32x32b":
            raise refuse(ins, f".pack::16b with .{shape} is not modelled")
        slots = [e.pinned(d) if d != "_" else -1 for d in e.operands(ins.operands[0])]
        if len(slots) != registers:
            raise refuse(ins, f"{registers} registers expected")
        e.emit(f"tmem_load(W, R, {slots}, {e.addr(ins.operands[1])}, {shape!r}, {n}, {packed}, {ins.site})")
    else:
        unpacked = mods.flag("unpack::16b")
        if unpacked and shape != "32x32b":
            raise refuse(ins, f".unpack::16b with .{shape} is not modelled")
        values = e.operands(ins.operands[-1])
        if len(values) != registers:
            raise refuse(ins, f"{registers} registers expected")
        listed = ", ".join(e.val(v) for v in values)
        e.emit(
            f"tmem_store(W, {e.addr(ins.operands[0])}, {shape!r}, {n}, [{listed}], {unpacked}, {ins.site})"
        )


def _mma(e: Emitter, ins: Instruction, mods: Modifiers, group: int) -> None:
    mods.left.remove("mma")
    for feature in ("sp", "ws"):
        if feature in mods.left:
            raise refuse(ins, f"tcgen05.mma.{feature} is not modelled")
    kind_name = mods.prefixed("kind::")
    if kind_name is None:
        raise refuse(ins, "kind expected")
    kind = kind_name[6:]
    blocked = mods.flag("block_scale")
    vector = mods.one_of(
        "block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X", default=None
    )
    while (hint := mods.prefixed("collector::")) is not None:
        if hint.startswith("collector::a") is False:
            raise refuse(ins, f".{hint} is not modelled")
    mods.hints("ashift")
    if "ashift" in ins.mods:
        raise refuse(ins, ".ashift is not modelled")
    ops = list(ins.operands)
    d, a, b, idesc = ops[:4]
    rest = ops[4:]
    a_in_tmem = a.startswith("[")
    scale_a = scale_b = "None"
    block = 0
    if blocked:
        if kind not in _BLOCKED_KINDS:
            raise refuse(ins, f"kind::{kind} has no block scaling")
        default, spellings = _BLOCKED_KINDS[kind]
        if vector is not None and vector not in spellings:
            raise refuse(ins, f".{vector} with kind::{kind}")
        found = spellings[vector] if vector else default
        if found is None:
            raise refuse(ins, f"kind::{kind} needs a scale vector size")
        block = found
        scale_a, scale_b = e.addr(rest[0]), e.addr(rest[1])
        rest = rest[2:]
    elif kind not in ("f16", "tf32", "f8f6f4", "i8"):
        raise refuse(ins, f"kind::{kind} is not modelled")
    disable = "None"
    if rest[0].startswith("{"):
        disable = "[" + ", ".join(e.val(v) for v in e.operands(rest[0])) + "]"
        rest = rest[1:]
    enable = e.pred(rest[0])
    scale_input = e.val(rest[1]) if len(rest) > 1 else "None"
    if scale_input != "None" and kind not in ("f16", "tf32"):
        raise refuse(ins, "scale-input-d goes with kind::f16 and kind::tf32")
    a_value = e.addr(a) if a_in_tmem else e.val(a, 64)
    e.emit(
        f"tc_mma(W, {kind!r}, {e.addr(d)}, {a_value}, {a_in_tmem}, {e.val(b, 64)}, {e.val(idesc)}, {scale_a}, {scale_b}, "
        f"{block}, {enable}, {disable}, {scale_input}, {group}, {e.mask}, {ins.site})"
    )
