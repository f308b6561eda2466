"""Formats under torch.compile."""

from typing import Any, NamedTuple

import torch

from mx_core.formats import FORMATS, ElementFormat


class _Numbers(NamedTuple):
    """What traced code reads of an ElementFormat, by the same names."""

    bits: int
    mantissa_bits: int
    twos_complement: bool
    sign_bit: int
    nan_code: int
    emax: int
    max_value_bits: int
    min_normal_bits: int
    values: tuple[float, ...]


def static_format(format: ElementFormat) -> Any:
    """`format` with numbers that torch.compile takes for constants; outside of it, `format` itself.

    Read from an argument or a global, they may become symbolic integers (under dynamic=True, or when one
    function is called with two formats): the graph would be slower, and not everything could be traced.
    """
    return _constants(format.name) if torch.compiler.is_compiling() else format


@torch.compiler.assume_constant_result
def _constants(name: str) -> _Numbers:
    return _Numbers(*(getattr(FORMATS[name], field) for field in _Numbers._fields))
