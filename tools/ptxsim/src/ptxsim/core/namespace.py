"""Names that translated blocks may use."""

from __future__ import annotations

from typing import Any

from ..errors import Fault
from . import (
    barriers,
    bulk,
    convert,
    copies,
    floats,
    integers,
    memory,
    tcgen05,
    tensormap,
    tma,
    tmem,
    values,
    warpops,
    wgmma,
)
from .state import Warp, Yield


def raise_trap(W: Warp, line: int) -> None:
    raise Fault(f"trap: {memory.who(W, line)}")


def build() -> dict[str, Any]:
    names: dict[str, Any] = {"Yield": Yield, "raise_trap": raise_trap}
    for module in (
        values,
        integers,
        memory,
        warpops,
        barriers,
        tensormap,
        copies,
        tma,
        bulk,
        tmem,
        tcgen05,
        wgmma,
    ):
        names.update({k: v for k, v in vars(module).items() if not k.startswith("_")})
    names.update(
        minmax=integers.minmax,
        float_arithmetic=floats.arithmetic,
        float_mixed=floats.add_mixed,
        float_minmax=floats.minmax,
        float_sign=floats.sign_bits,
        float_compare=floats.compare,
        float_approximate=floats.approximate,
        float_copysign=floats.copysign,
        float_test=floats.test_property,
        cvt_float=convert.float_to_float,
        cvt_pair=convert.pack_pair,
        cvt_pack_bf16=convert.pack_bf16,
        cvt_int_to_float=convert.int_to_float,
        cvt_float_to_int=convert.float_to_int,
        cvt_int_saturating=convert.int_to_int_saturating,
        cvt_pack_narrow=convert.pack_narrow,
        cvt_unpack_narrow=convert.unpack_narrow,
        cvt_pack_e8m0=convert.pack_e8m0,
        cvt_unpack_e8m0=convert.unpack_e8m0,
    )
    return names


NAMES = build()
