"""Integer and bit operations that are more than one Python expression."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .values import M32, M64, U64, Array, Value, spread


def _mask(width: int) -> int:
    return (1 << width) - 1


def per_lane(f: Callable[..., int], *args: Value) -> Value:
    """Apply a scalar function lane by lane; uniform arguments give a uniform result."""
    if not any(type(a) is Array for a in args):
        return f(*args)
    return np.array([f(*map(int, lane)) for lane in zip(*map(spread, args), strict=True)], dtype=np.uint64)


def sign_extend(x: Value, src: int, dst: int) -> Value:
    """Low `src` bits of x, as a signed number, in `dst` bits."""
    sign = 1 << (src - 1)
    x = x & _mask(src)
    return ((x ^ sign) - sign) & _mask(dst)


def signed(x: Value, width: int) -> Value:
    """As a Python int or int64 array."""
    if type(x) is Array:
        return sign_extend(x, width, 64).view(np.int64)
    sign = 1 << (width - 1)
    return ((x & _mask(width)) ^ sign) - sign


def unsigned(x: Value, width: int) -> Value:
    if type(x) is Array:
        return (x if x.dtype == np.uint64 else x.astype(np.int64).view(np.uint64)) & U64(_mask(width))
    return x & _mask(width)


def shift_right_signed(x: Value, n: int, width: int) -> Value:
    if type(x) is Array:
        return unsigned(signed(x, width) >> np.int64(n), width)
    return (signed(x, width) >> n) & _mask(width)


def shift(op: str, x: Value, n: Value, width: int, is_signed: bool) -> Value:
    """Shl / shr: amounts of `width` and more give 0, or copies of the sign."""
    if type(x) is not Array and type(n) is not Array:
        if op == "shl":
            return (x << n) & _mask(width) if n < width else 0
        if is_signed:
            return (signed(x, width) >> min(n, width - 1)) & _mask(width)
        return x >> n if n < width else 0
    x, n = spread(x), spread(n)
    if op == "shr" and is_signed:
        return unsigned(signed(x, width) >> np.minimum(n, U64(width - 1)).astype(np.int64), width)
    amount = np.minimum(n, U64(63))
    r = (x << amount) & U64(_mask(width)) if op == "shl" else x >> amount
    return np.where(n >= width, U64(0), r)


def funnel_shift(direction: str, mode: str, low: Value, high: Value, n: Value) -> Value:
    n = n & 31 if mode == "wrap" else np.minimum(n, U64(32)) if type(n) is Array else min(n, 32)
    if any(type(v) is Array for v in (low, high, n)):
        pair = (spread(high) << U64(32)) | spread(low)
        n = spread(n)
        return (pair >> n) & U64(M32) if direction == "r" else (pair >> (U64(32) - n)) & U64(M32)
    pair = (high << 32) | low
    return (pair >> n) & M32 if direction == "r" else (pair >> (32 - n)) & M32


def absolute(x: Value, width: int) -> Value:
    return unsigned(abs(signed(x, width)), width)


def minmax(op: str, a: Value, b: Value, width: int, is_signed: bool, relu: bool = False) -> Value:
    if type(a) is not Array and type(b) is not Array:
        pick = min if op == "min" else max
        r = pick(signed(a, width), signed(b, width)) if is_signed else pick(a, b)
        return max(r, 0) & _mask(width) if relu else r & _mask(width)
    a, b = spread(a), spread(b)
    smaller = signed(a, width) < signed(b, width) if is_signed else a < b
    r = np.where(smaller == (op == "min"), a, b)
    return np.where(signed(r, width) < 0, U64(0), r) if relu else r


def divide(op: str, a: Value, b: Value, width: int, is_signed: bool) -> Value:
    """Div / rem, truncating; by zero all ones for both (an H200 gives that for `rem` too)."""

    def one(a: int, b: int) -> int:
        if is_signed:
            a, b = signed(a, width), signed(b, width)
        if b == 0:
            return _mask(width)
        q = abs(a) // abs(b)
        q = -q if (a < 0) != (b < 0) else q
        return (q if op == "div" else a - q * b) & _mask(width)

    return per_lane(one, a, b)


def multiply_high_64(a: Value, b: Value, is_signed: bool) -> Value:
    def one(a: int, b: int) -> int:
        if is_signed:
            a, b = signed(a, 64), signed(b, 64)
        return ((a * b) >> 64) & M64

    return per_lane(one, a, b)


def multiply_24(mode: str, a: Value, b: Value, is_signed: bool) -> Value:
    def one(a: int, b: int) -> int:
        a, b = a & 0xFFFFFF, b & 0xFFFFFF
        if is_signed:
            a, b = signed(a, 24), signed(b, 24)
        return (a * b >> (16 if mode == "hi" else 0)) & M32

    return per_lane(one, a, b)


def saturating(op: str, a: Value, b: Value) -> Value:
    """add.sat.s32 / sub.sat.s32."""

    def one(a: int, b: int) -> int:
        r = signed(a, 32) + (signed(b, 32) if op == "add" else -signed(b, 32))
        return min(max(r, -(1 << 31)), (1 << 31) - 1) & M32

    return per_lane(one, a, b)


def packed_16(op: str, a: Value, b: Value, is_signed: bool, relu: bool = False) -> Value:
    """add, sub, min, max on two 16-bit halves."""
    halves = []
    for shift_ in (0, 16):
        x, y = (a >> shift_) & 0xFFFF, (b >> shift_) & 0xFFFF
        if op in ("min", "max"):
            r = minmax(op, x, y, 16, is_signed, relu)
        else:
            r = (x + y if op == "add" else x - y) & 0xFFFF
        halves.append(r << shift_)
    return halves[0] | halves[1]


_PERMUTE_MODES = {
    "f4e": lambda i, s: s + i,
    "b4e": lambda i, s: (s - i) & 7,
    "rc8": lambda i, s: s & 3,
    "ecl": lambda i, s: max(i, s & 3),
    "ecr": lambda i, s: min(i, s & 3),
    "rc16": lambda i, s: (s & 1) * 2 + (i & 1),
}


def permute_bytes(a: Value, b: Value, c: Value, mode: str | None) -> Value:
    """prmt: four bytes chosen from the eight of b:a."""
    if mode is not None:
        pick = _PERMUTE_MODES[mode]

        def one(a: int, b: int, c: int) -> int:
            pair = (b << 32) | a
            return sum((pair >> 8 * pick(i, c & 3) & 255) << 8 * i for i in range(4))

        return per_lane(one, a, b, c)
    if not any(type(v) is Array for v in (a, b, c)):
        pair, r = (b << 32) | a, 0
        for i in range(4):
            s = (c >> (4 * i)) & 15
            byte = (pair >> (8 * (s & 7))) & 255
            r |= ((255 if byte & 128 else 0) if s & 8 else byte) << (8 * i)
        return r
    pair = (spread(b) << U64(32)) | spread(a)
    if type(c) is not Array:
        r = np.zeros(32, np.uint64)
        for i in range(4):
            s = (c >> (4 * i)) & 15
            byte = (pair >> U64(8 * (s & 7))) & U64(255)
            if s & 8:
                byte = np.where(byte & U64(128) != 0, U64(255), U64(0))
            r |= byte << U64(8 * i)
        return r
    r = np.zeros(32, np.uint64)
    for i in range(4):
        s = (c >> U64(4 * i)) & U64(15)
        byte = (pair >> (U64(8) * (s & U64(7)))) & U64(255)
        sign = np.where(byte & U64(128) != 0, U64(255), U64(0))
        r |= np.where(s & U64(8) != 0, sign, byte) << U64(8 * i)
    return r


def lop3(a: Value, b: Value, c: Value, table: int) -> Value:
    r = 0
    for i in range(8):
        if table >> i & 1:
            r = r | (a if i & 4 else a ^ M32) & (b if i & 2 else b ^ M32) & (c if i & 1 else c ^ M32)
    return r


def _field(position: int, length: int, width: int) -> tuple[int, int]:
    """Of 32-bit fields the low 8 bits of position and length count; 64-bit ones use all 32 (seen on an H200)."""
    return (position & 255, length & 255) if width == 32 else (min(position, width), min(length, width))


def bit_field_extract(a: Value, position: Value, length: Value, width: int, is_signed: bool) -> Value:
    def one(a: int, p: int, n: int) -> int:
        p, n = _field(p, n, width)
        if n == 0:
            return 0
        if p >= width:
            return _mask(width) if is_signed and a >> (width - 1) & 1 else 0
        n = min(n, width - p)
        v = (a >> p) & _mask(n)
        return sign_extend(v, n, width) if is_signed else v

    if type(a) is Array and type(position) is not Array and type(length) is not Array:
        p, n = position & 255, length & 255
        if n > 0 and p + n <= width:
            v = (a >> U64(p)) & U64(_mask(n))
            return sign_extend(v, n, width) if is_signed else v
    return per_lane(one, a, position, length)


def bit_field_insert(a: Value, b: Value, position: Value, length: Value, width: int) -> Value:
    def one(a: int, b: int, p: int, n: int) -> int:
        p, n = _field(p, n, width)
        if p >= width or n == 0:
            return b
        field = (_mask(n) << p) & _mask(width)
        return (b & ~field) | ((a << p) & field)

    return per_lane(one, a, b, position, length)


def bit_mask(mode: str, position: Value, length: Value) -> Value:
    """bmsk: `length` ones from bit `position`."""

    def one(p: int, n: int) -> int:
        if mode == "wrap":
            p, n = p & 31, n & 31
        else:
            p, n = min(p, 32), min(n, 32)
        return (_mask(n) << p) & M32

    return per_lane(one, position, length)


def sign_zero_extend(a: Value, n: Value, is_signed: bool, mode: str) -> Value:
    """szext: extend from bit n."""

    def one(a: int, n: int) -> int:
        n = n & 31 if mode == "wrap" else min(n, 32)
        if n == 0:
            return 0
        v = a & _mask(n)
        return sign_extend(v, n, 32) if is_signed and n < 32 else v

    return per_lane(one, a, n)


def count_bits(op: str, a: Value, width: int, is_signed: bool, shift_amount: bool = False) -> Value:
    """popc, clz, brev, bfind."""

    def one(v: int) -> int:
        if op == "popc":
            return v.bit_count()
        if op == "clz":
            return width - v.bit_length()
        if op == "brev":
            return int(f"{v:0{width}b}"[::-1], 2)
        if is_signed and v >> (width - 1):
            v ^= _mask(width)
        if not v:
            return M32
        return width - v.bit_length() if shift_amount else v.bit_length() - 1

    return per_lane(one, a)


def find_nth_set(mask: Value, base: Value, offset: Value) -> Value:
    """fns: the bit that is `offset` set bits away from `base`."""

    def one(mask: int, base: int, offset: int) -> int:
        off = signed(offset, 32)
        if off == 0:
            return base if mask >> (base & 31) & 1 else M32
        position, step, left = base, 1 if off > 0 else -1, abs(off)
        while 0 <= position < 32:
            if mask >> position & 1:
                left -= 1
                if left == 0:
                    return position
            position += step
        return M32

    return per_lane(one, mask, base, offset)


def dot_product_4(a: Value, b: Value, c: Value, signed_a: bool, signed_b: bool) -> Value:
    def one(a: int, b: int, c: int) -> int:
        total = c
        for i in range(0, 32, 8):
            x, y = a >> i & 255, b >> i & 255
            total += (signed(x, 8) if signed_a else x) * (signed(y, 8) if signed_b else y)
        return total & M32

    return per_lane(one, a, b, c)


def sum_abs_difference(a: Value, b: Value, c: Value, width: int, is_signed: bool) -> Value:
    def one(a: int, b: int, c: int) -> int:
        x, y = (signed(a, width), signed(b, width)) if is_signed else (a, b)
        return (abs(x - y) + c) & _mask(width)

    return per_lane(one, a, b, c)


def carry_add(a: Value, b: Value, carry: Value, width: int) -> tuple[Value, Value]:
    """Sum and carry out."""
    if width == 64:
        low = per_lane(lambda a, b, c: (a + b + c) & M64, a, b, carry)
        return low, per_lane(lambda a, b, c: (a + b + c) >> 64, a, b, carry)
    total = a + b + carry
    return total & _mask(width), total >> width


def carry_subtract(a: Value, b: Value, borrow: Value, width: int) -> tuple[Value, Value]:
    """Difference and borrow out."""
    low = per_lane(lambda a, b, c: (a - b - c) & _mask(width), a, b, borrow)
    return low, per_lane(lambda a, b, c: int(a - b - c < 0), a, b, borrow)


def compare(op: str, a: Value, b: Value, width: int, is_signed: bool) -> Value:
    """Integer comparison to a predicate, for instructions off the fast path."""
    x, y = (signed(a, width), signed(b, width)) if is_signed else (a, b)
    base = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(op, op)
    return {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[base]


def select_zero(a: Value) -> Value:
    """cnot: 1 where a is 0."""
    return np.where(a == 0, U64(1), U64(0)) if type(a) is Array else int(a == 0)


def pack_128(low: Value, high: Value) -> int:
    """A uniform 128-bit register (only handles of the cluster scheduler use them)."""
    if type(low) is Array or type(high) is Array:
        low, high = int(spread(low)[0]), int(spread(high)[0])
    return low | high << 64
