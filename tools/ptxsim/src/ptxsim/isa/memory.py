"""Loads, stores, atomics, matrix moves and cp.async."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import WIDTH, Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

_SPACES = ("global", "shared::cta", "shared::cluster", "shared", "local", "param", "param::entry", "const")
_ATOMIC_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


def space(mods: Modifiers) -> str:
    name = mods.one_of(*_SPACES, default="generic")
    assert name is not None
    return name.split("::")[0]


def cache_hints(mods: Modifiers) -> bool:
    """Take cache modifiers; True if the instruction has a cache-policy operand."""
    mods.hints("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "uc")
    while mods.prefixed("L1::") or mods.prefixed("L2::evict") or mods.prefixed("L2::64B"):
        pass
    mods.hints("L2::128B", "L2::256B")
    return mods.flag("L2::cache_hint")


def ordering(mods: Modifiers, default: str) -> tuple[str, str]:
    """Memory-ordering semantics and scope."""
    semantics = mods.one_of(
        "weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", default=default
    )
    scope = mods.one_of("cta", "cluster", "gpu", "sys", default="gpu")
    assert semantics is not None
    assert scope is not None
    return semantics, scope


def _vector(mods: Modifiers) -> int:
    name = mods.one_of("v2", "v4", "v8", default=None)
    return int(name[1:]) if name else 1


def _may_block(ins: Instruction) -> bool:
    return any(m in ("acquire", "volatile", "relaxed") for m in ins.mods)


@instruction("ld", "ldu", ends=_may_block)
def ld(e: Emitter, ins: Instruction, mods: Modifiers) -> bool | None:
    where = space(mods)
    semantics, _ = ordering(mods, "weak")
    hint = cache_hints(mods)
    n = _vector(mods)
    ty = mods.type()
    width = WIDTH[ty]
    results, address, *rest = ins.operands
    if len(rest) > hint:
        raise refuse(ins, "unified-address operand is not modelled")
    results = e.operands(results)
    if ty == "b128":
        raise refuse(ins, "128-bit scalar load is not modelled")
    if len(results) != n:
        raise refuse(ins, f"{n} results expected")
    strong = semantics != "weak" and where in ("global", "generic")
    if strong:
        e.emit("W.strong = True")
    values = e.temp(f"load_{where}(W, {e.addr(address)}, {width // 8}, {n}, {e.mask}, {ins.site})")
    if strong:
        e.emit("W.strong = False")
    for i, dst in enumerate(results):
        if dst == "_":
            continue
        value = f"{values}[{i}]"
        register = WIDTH[e.register_type(dst) or ty]
        if ty[0] == "s" and register > width:
            value = f"sign_extend({value}, {width}, {register})"
        e.set(dst, value)
    if semantics in ("acquire", "volatile", "relaxed"):
        if semantics == "acquire" or semantics == "volatile":
            e.emit(f"acquire_location(W, {where!r}, {e.addr(address)}, {e.mask})")
        e.emit(f"return Yield({e.next_block})")
        return True
    return None


@instruction("st", writes=0)
def st(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if mods.flag("async"):
        _st_async(e, ins, mods)
        return
    if mods.flag("bulk"):
        raise refuse(ins, "st.bulk is not modelled")
    where = space(mods)
    semantics, _ = ordering(mods, "weak")
    cache_hints(mods)
    n = _vector(mods)
    ty = mods.type()
    width = WIDTH[ty]
    address, values = ins.operands[:2]
    values = e.operands(values)
    if ty == "b128" or len(values) != n:
        raise refuse(ins, f"{n} values of at most 64 bits expected")
    if where in ("param", "const"):
        raise refuse(ins, f"store to .{where} is not modelled")
    if semantics in ("release", "volatile"):
        e.emit(f"release_location(W, {where!r}, {e.addr(address)}, {e.mask})")
    listed = ", ".join(e.val(v, width) for v in values)
    strong = semantics != "weak" and where in ("global", "generic")
    if strong:
        e.emit("W.strong = True")
    e.emit(f"store_{where}(W, {e.addr(address)}, {width // 8}, [{listed}], {e.mask}, {ins.site})")
    if strong:
        e.emit("W.strong = False")


def _st_async(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """st.async: completes on an mbarrier of the destination CTA."""
    mods.hints("weak")
    mods.pick("shared::cluster")
    mods.pick("mbarrier::complete_tx::bytes")
    n = _vector(mods)
    ty = mods.type()
    address, values, barrier = ins.operands
    listed = ", ".join(e.val(v, WIDTH[ty]) for v in e.operands(values))
    if len(e.operands(values)) != n:
        raise refuse(ins, f"{n} values expected")
    e.emit(
        f"store_async(W, {e.addr(address)}, {WIDTH[ty] // 8}, [{listed}], {e.addr(barrier)}, {e.mask}, {ins.site})"
    )


@instruction("atom", "red", writes=lambda i: i.op == "atom", ends=True)
def atom(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    if mods.flag("async"):
        return _red_async(e, ins, mods)
    where = space(mods)
    semantics, _ = ordering(mods, "relaxed")
    cache_hints(mods)
    noftz = mods.flag("noftz")
    op = mods.pick(*_ATOMIC_OPS)
    n = _vector(mods)
    ty = mods.type()
    width = WIDTH[ty]
    if where not in ("generic", "global", "shared"):
        raise refuse(ins, f"atomics on .{where} are not modelled")
    if ty in ("f16", "bf16", "f16x2", "bf16x2") and not noftz and op == "add":
        raise refuse(ins, f"atomic add of .{ty} without .noftz is not modelled")
    if ty in _FLOATS and op not in ("add", "min", "max", "exch", "cas"):
        raise refuse(ins, f"atomic .{op}.{ty} is not modelled")
    operands = ins.operands if ins.op == "red" else ins.operands[1:]
    address, values = e.temp(e.addr(operands[0])), e.operands(operands[1])
    if len(values) != n:
        raise refuse(ins, f"{n} values expected")
    if semantics in ("release", "acq_rel"):
        e.emit(f"release_location(W, {where!r}, {address}, {e.mask})")
    swap = e.val(operands[2], width) if op == "cas" else "None"
    results = e.operands(ins.operands[0]) if ins.op == "atom" else [None] * n
    for i, (value, dst) in enumerate(zip(values, results, strict=True)):
        call = (
            f"atomic(W, {where!r}, {op!r}, {ty!r}, {address}+{i * width // 8}, {e.val(value, width)}, {swap}, "
            f"{e.mask}, {ins.site})"
        )
        if dst is None:
            e.emit(call)
        else:
            e.set(dst, call)
    if semantics in ("acquire", "acq_rel"):
        e.emit(f"acquire_location(W, {where!r}, {address}, {e.mask})")
    e.emit(f"return Yield({e.next_block})")
    return True


def _red_async(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    """red.async: an update of another CTA's shared memory that completes on an mbarrier there."""
    mods.pick("relaxed")
    mods.pick("cluster")
    mods.pick("shared::cluster")
    mods.pick("mbarrier::complete_tx::bytes")
    op = mods.pick("inc", "dec", "min", "max", "add", "and", "or", "xor")
    ty = mods.type()
    allowed = {"inc": "u32", "dec": "u32", "min": "u32 s32", "max": "u32 s32", "add": "u32 s32 u64"}.get(
        op, "b32"
    )
    if ty not in allowed.split():
        raise refuse(ins, f".{op}.{ty} does not exist")
    address, value, barrier = ins.operands
    e.emit(
        f"reduce_async(W, {op!r}, {ty!r}, {e.addr(address)}, {e.val(value, WIDTH[ty])}, {e.addr(barrier)}, {e.mask}, {ins.site})"
    )
    e.emit(f"return {e.next_block}")
    return True


@instruction("ldmatrix", starts=True)
def ldmatrix(e: Emitter, ins: Instruction, mods: Modifiers) -> bool | None:
    _matrix_shape(ins, mods)
    n = int(mods.pick("x1", "x2", "x4")[1:])
    trans = mods.flag("trans")
    space(mods)
    mods.pick("b16")
    e.emit(f"need_full_warp(W, {e.mask}, {ins.site}, 'ldmatrix')")
    tiles = e.temp(f"load_matrix(W, {e.addr(ins.operands[1])}, {n}, {trans}, {ins.site})")
    for i, dst in enumerate(e.operands(ins.operands[0])):
        e.set(dst, f"{tiles}[{i}]")
    return None


@instruction("stmatrix", writes=0, starts=True)
def stmatrix(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    _matrix_shape(ins, mods)
    n = int(mods.pick("x1", "x2", "x4")[1:])
    trans = mods.flag("trans")
    space(mods)
    mods.pick("b16")
    values = e.operands(ins.operands[1])
    if len(values) != n:
        raise refuse(ins, f"{n} values expected")
    e.emit(f"need_full_warp(W, {e.mask}, {ins.site}, 'stmatrix')")
    e.emit(
        f"store_matrix(W, {e.addr(ins.operands[0])}, [{', '.join(map(e.val, values))}], {trans}, {ins.site})"
    )


@instruction("movmatrix", starts=True)
def movmatrix(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    _matrix_shape(ins, mods)
    mods.pick("trans")
    mods.pick("b16")
    e.emit(f"need_full_warp(W, {e.mask}, {ins.site}, 'movmatrix')")
    e.set(ins.operands[0], f"transpose_matrix({e.val(ins.operands[1])})")


def _matrix_shape(ins: Instruction, mods: Modifiers) -> None:
    mods.pick("sync")
    mods.pick("aligned")
    if not mods.flag("m8n8"):
        raise refuse(ins, "only 8x8 matrices of 16 bits (.m8n8) are modelled")


def cp_async(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.{ca,cg}: 4, 8 or 16 bytes a thread, with optional zero fill."""
    mods.pick("ca", "cg")
    mods.pick("shared", "shared::cta")
    mods.pick("global")
    hint = cache_hints(mods)
    dst, src, size, *rest = ins.operands
    if len(rest) > 1 + hint:
        raise refuse(ins, "operand count")
    source_size = e.val(rest[0]) if len(rest) > hint else "None"
    n = int(size, 0)
    if len(rest) > hint and e.is_register(rest[0]) and e.register_type(rest[0]) == "pred":
        source_size = f"select({e.val(rest[0])}, 0, {n})"  # ignore-src: zeros instead of the source
    e.emit(f"copy_async(W, {e.addr(dst)}, {e.addr(src)}, {n}, {source_size}, {e.mask}, {ins.site})")
