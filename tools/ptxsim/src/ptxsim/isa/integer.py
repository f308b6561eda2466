"""Integer arithmetic, logic, shifts and bit fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import WIDTH, Instruction, constant
from . import floating
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2", "f32x2")
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_COMPARE = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}


def has_float_type(ins: Instruction) -> bool:
    return any(m in FLOATS for m in ins.mods)


def _ones(width: int) -> int:
    return (1 << width) - 1


@instruction("add", "sub", predicated=True)
def add_sub(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if has_float_type(ins):
        return floating.arithmetic(e, ins, mods)
    saturate, carry = mods.flag("sat"), mods.flag("cc")
    ty = mods.type()
    dst, a, b = ins.operands
    w = WIDTH[ty]
    va, vb = e.val(a, w), e.val(b, w)
    if ty.endswith("16x2"):
        e.set(dst, f"packed_16({ins.op!r}, {va}, {vb}, {ty[0] == 's'})")
    elif saturate:
        if ty != "s32":
            raise refuse(ins, ".sat is for .s32")
        e.set(dst, f"saturating({ins.op!r}, {va}, {vb})")
    elif carry:
        _carry(e, ins.op, dst, va, vb, "0", w)
    else:
        e.set(dst, f"({va}{'+' if ins.op == 'add' else '-'}{vb})&{_ones(w)}")
    return None


@instruction("addc", "subc", predicated=True)
def add_sub_carry(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.flag("cc")
    w = WIDTH[mods.type()]
    dst, a, b = ins.operands
    _carry(e, ins.op[:3], dst, e.val(a, w), e.val(b, w), "W.carry", w)


def _carry(e: Emitter, op: str, dst: str, a: str, b: str, carry: str, width: int) -> None:
    f = "carry_add" if op == "add" else "carry_subtract"
    pair = e.temp(f"{f}({a}, {b}, {carry}, {width})")
    e.set(dst, f"{pair}[0]")
    e.emit(f"W.carry = {pair}[1]")


@instruction("mul", "mad", predicated=True)
def mul_mad(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if has_float_type(ins):
        return floating.arithmetic(e, ins, mods)
    mode = mods.pick("lo", "hi", "wide")
    ty = mods.type()
    w, is_signed = WIDTH[ty], ty[0] == "s"
    dst, a, b, *c = ins.operands
    va, vb = e.val(a, w), e.val(b, w)
    if mode == "lo":
        product, out = f"({va}*{vb})", w
    elif mode == "wide":
        out = 2 * w
        if is_signed:
            va, vb = f"sign_extend({va}, {w}, {out})", f"sign_extend({vb}, {w}, {out})"
        product = f"({va}*{vb})"
    elif w == 64:
        product, out = f"multiply_high_64({va}, {vb}, {is_signed})", w
    else:
        out = w
        if is_signed:
            va, vb = f"sign_extend({va}, {w}, 64)", f"sign_extend({vb}, {w}, 64)"
        product = f"((({va}*{vb})&{_ones(64)})>>{w})"
    e.set(dst, f"({product}+{e.val(c[0], out)})&{_ones(out)}" if c else f"{product}&{_ones(out)}")
    return None


@instruction("mul24", "mad24", predicated=True)
def mul24(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mode = mods.pick("lo", "hi")
    ty = mods.type()
    dst, a, b, *c = ins.operands
    product = f"multiply_24({mode!r}, {e.val(a)}, {e.val(b)}, {ty[0] == 's'})"
    e.set(dst, f"({product}+{e.val(c[0])})&4294967295" if c else product)


@instruction("and", "or", "xor", predicated=True)
def logic(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    dst, a, b = ins.operands
    if ty == "pred":
        e.set(dst, f"({e.pred(a)} {_LOGIC[ins.op]} {e.pred(b)})")
    else:
        w = WIDTH[ty]
        e.set(dst, f"({e.val(a, w)}{_LOGIC[ins.op]}{e.val(b, w)})")


@instruction("not", predicated=True)
def not_(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    dst, a = ins.operands
    if ty == "pred":
        e.set(dst, f"logical_not({e.pred(a)})")
    else:
        e.set(dst, f"({e.val(a, WIDTH[ty])}^{_ones(WIDTH[ty])})")


@instruction("cnot", predicated=True)
def cnot(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    e.set(ins.operands[0], f"select_zero({e.val(ins.operands[1], WIDTH[mods.type()])})")


@instruction("neg", "abs", predicated=True)
def neg_abs(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    dst, a = ins.operands
    if has_float_type(ins):
        ftz = mods.flag("ftz")
        ty = mods.type()
        e.set(dst, f"float_sign({ins.op!r}, {ty!r}, {ftz}, {e.val(a, WIDTH[ty])})")
        return
    w = WIDTH[mods.type()]
    e.set(dst, f"(0-{e.val(a, w)})&{_ones(w)}" if ins.op == "neg" else f"absolute({e.val(a, w)}, {w})")


@instruction("min", "max", predicated=True)
def min_max(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if has_float_type(ins):
        return floating.min_max(e, ins, mods)
    relu = mods.flag("relu")
    ty = mods.type()
    w, is_signed = WIDTH[ty], ty[0] == "s"
    dst, a, b = ins.operands
    va, vb = e.val(a, w), e.val(b, w)
    if ty.endswith("16x2"):
        e.set(dst, f"packed_16({ins.op!r}, {va}, {vb}, {is_signed}, {relu})")
    else:
        e.set(dst, f"minmax({ins.op!r}, {va}, {vb}, {w}, {is_signed}, {relu})")
    return None


@instruction("div", "rem", predicated=True)
def div_rem(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if has_float_type(ins):
        return floating.divide(e, ins, mods)
    ty = mods.type()
    w = WIDTH[ty]
    dst, a, b = ins.operands
    e.set(dst, f"divide({ins.op!r}, {e.val(a, w)}, {e.val(b, w)}, {w}, {ty[0] == 's'})")
    return None


@instruction("shl", "shr", predicated=True)
def shift(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    w, is_signed = WIDTH[ty], ty[0] == "s"
    dst, a, n = ins.operands
    amount = constant(n, 32)
    va = e.val(a, w)
    if amount is None:
        e.set(dst, f"shift({ins.op!r}, {va}, {e.val(n)}, {w}, {is_signed})")
    elif ins.op == "shl":
        e.set(dst, f"({va}<<{amount})&{_ones(w)}" if amount < w else "0")
    elif is_signed:
        e.set(dst, f"shift_right_signed({va}, {min(amount, w - 1)}, {w})")
    else:
        e.set(dst, f"({va}>>{amount})" if amount < w else "0")


@instruction("shf", predicated=True)
def shf(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    direction, mode = mods.pick("l", "r"), mods.pick("wrap", "clamp")
    mods.type()
    dst, low, high, n = ins.operands
    e.set(dst, f"funnel_shift({direction!r}, {mode!r}, {e.val(low)}, {e.val(high)}, {e.val(n)})")


@instruction("prmt", predicated=True)
def prmt(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mode = mods.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default=None)
    mods.type()
    dst, a, b, c = ins.operands
    e.set(dst, f"permute_bytes({e.val(a)}, {e.val(b)}, {e.val(c)}, {mode!r})")


@instruction("lop3", predicated=True)
def lop3(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    combine = mods.one_of("or", "and", default=None)
    mods.type()
    dst, a, b, c, table, *q = ins.operands
    value = e.temp(f"lop3({e.val(a)}, {e.val(b)}, {e.val(c)}, {int(table, 0)})")
    if combine:
        e.set_pair(dst, value, f"(({value} != 0) {_LOGIC[combine]} {e.pred(q[0])})")
    else:
        e.set(dst, value)


@instruction("bfe", predicated=True)
def bfe(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    w = WIDTH[ty]
    dst, a, p, n = ins.operands
    e.set(dst, f"bit_field_extract({e.val(a, w)}, {e.val(p)}, {e.val(n)}, {w}, {ty[0] == 's'})")


@instruction("bfi", predicated=True)
def bfi(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    w = WIDTH[mods.type()]
    dst, a, b, p, n = ins.operands
    e.set(dst, f"bit_field_insert({e.val(a, w)}, {e.val(b, w)}, {e.val(p)}, {e.val(n)}, {w})")


@instruction("bmsk", predicated=True)
def bmsk(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mode = mods.pick("clamp", "wrap")
    mods.type()
    e.set(ins.operands[0], f"bit_mask({mode!r}, {e.val(ins.operands[1])}, {e.val(ins.operands[2])})")


@instruction("szext", predicated=True)
def szext(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mode = mods.pick("clamp", "wrap")
    ty = mods.type()
    dst, a, n = ins.operands
    e.set(dst, f"sign_zero_extend({e.val(a)}, {e.val(n)}, {ty[0] == 's'}, {mode!r})")


@instruction("popc", "clz", "brev", "bfind", predicated=True)
def count(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    shift_amount = mods.flag("shiftamt")
    ty = mods.type()
    w = WIDTH[ty]
    e.set(
        ins.operands[0],
        f"count_bits({ins.op!r}, {e.val(ins.operands[1], w)}, {w}, {ty[0] == 's'}, {shift_amount})",
    )


@instruction("fns", predicated=True)
def fns(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.type()
    dst, mask, base, offset = ins.operands
    e.set(dst, f"find_nth_set({e.val(mask)}, {e.val(base)}, {e.val(offset)})")


@instruction("dp4a", predicated=True)
def dp4a(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ta, tb = mods.types()
    dst, a, b, c = ins.operands
    e.set(dst, f"dot_product_4({e.val(a)}, {e.val(b)}, {e.val(c)}, {ta[0] == 's'}, {tb[0] == 's'})")


@instruction("sad", predicated=True)
def sad(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    w = WIDTH[ty]
    dst, a, b, c = ins.operands
    e.set(dst, f"sum_abs_difference({e.val(a, w)}, {e.val(b, w)}, {e.val(c, w)}, {w}, {ty[0] == 's'})")


@instruction("setp", predicated=True)
def setp(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    result = _comparison(e, ins, mods, ins.operands[1], ins.operands[2])
    combine = mods.one_of("and", "or", "xor", default=None)
    p, _, q = ins.operands[0].partition("|")
    if combine:
        result, other = e.temp(result), e.pred(ins.operands[3])
        positive = f"({other} {_LOGIC[combine]} {result})"
        negative = f"({other} {_LOGIC[combine]} logical_not({result}))"
    else:
        if q:
            result = e.temp(result)
        positive, negative = result, f"logical_not({result})"
    if q:
        positive, negative = e.temp(positive), e.temp(negative)
    if p != "_":
        e.set(p, positive)
    if q and q != "_":
        e.set(q, negative)


@instruction("set", predicated=True)
def set_(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    dst_type = next(m for m in mods.left if m in WIDTH)
    mods.left.remove(dst_type)
    result = _comparison(e, ins, mods, ins.operands[1], ins.operands[2])
    if mods.one_of("and", "or", "xor", default=None):
        raise refuse(ins, "boolean combination of set is not modelled")
    one = {"f32": 0x3F800000, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF}.get(dst_type)
    if one is None:
        raise refuse(ins, f"result type .{dst_type} of set is not modelled")
    e.set(ins.operands[0], f"select({result}, {one}, 0)")


def _comparison(e: Emitter, ins: Instruction, mods: Modifiers, a: str, b: str) -> str:
    ftz = mods.flag("ftz")
    op = mods.left.pop(0)
    ty = mods.type()
    w = WIDTH[ty]
    va, vb = e.val(a, w), e.val(b, w)
    if ty in FLOATS:
        if ty.endswith("x2") or op not in floating.COMPARISONS:
            raise refuse(ins, f"comparison .{op}.{ty} is not modelled")
        return f"float_compare({op!r}, {ty!r}, {ftz}, {va}, {vb})"
    symbol = COMPARE.get(op) or (UNSIGNED_COMPARE.get(op) if ty[0] in "ub" else None)
    if symbol is None:
        raise refuse(ins, f"comparison .{op}.{ty} is not modelled")
    if ty[0] == "s" and op not in ("eq", "ne"):
        va, vb = _biased(a, va, w), _biased(b, vb, w)
    return f"({va}{symbol}{vb})"


def _biased(token: str, expression: str, width: int) -> str:
    """Signed order as unsigned order."""
    number = constant(token, width)
    sign = 1 << (width - 1)
    return str(number ^ sign) if number is not None else f"({expression}^{sign})"
