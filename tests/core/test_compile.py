"""torch.compile: one graph, the same bytes, MXTensor as argument and result."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from mx_core import (
    FORMATS,
    MXFP4_E2M1,
    MXFP8_E4M3,
    ElementFormat,
    MXTensor,
    ScaleLayout,
    ScaleRounding,
    dequantize,
    groups,
    mx_equal,
    quantize,
    reference,
)
from torch import Tensor

BLOCKED = ScaleLayout.BLOCKED_128X4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def wild_values(*shape: int) -> Tensor:
    """Any fp32 pattern, subnormals, NaN and Inf among them, in blocks of similar and of unlike sizes."""
    x = torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32).view(torch.float32)
    x[::2] = torch.randn(x[::2].shape) * torch.randint(-149, 127, (x[::2].shape[0], 1)).exp2()
    x[0] = 0.0
    x[1, : shape[1] // 2] = 2.0**-149
    x[2, 3] = math.nan
    return x


def check_same(got: object, want: object) -> None:
    if isinstance(want, MXTensor):
        assert isinstance(got, MXTensor)
        assert mx_equal(got, want)
    elif isinstance(want, Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    else:
        for one, other in zip(got, want, strict=True):  # type: ignore[call-overload]
            check_same(one, other)


def test_inductor_gives_the_same_bytes() -> None:
    """Generated C++ keeps subnormals and rounds alike; 80 columns end in half a block.

    A cast to bf16 must not be part of the graph: between fused operations, Inductor leaves such a rounding out.
    """

    def there_and_back(x: Tensor) -> tuple[MXTensor, Tensor]:
        mx = quantize(x, MXFP8_E4M3)
        return mx, dequantize(mx)

    x = wild_values(97, 80).bfloat16()
    check_same(torch.compile(there_and_back, fullgraph=True)(x), there_and_back(x))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("format", "rounding"),
    list(zip(FORMATS.values(), itertools.cycle(ScaleRounding), strict=False)),
    ids=FORMATS,
)
def test_inductor_gives_the_same_bytes_in_every_format(
    format: ElementFormat, rounding: ScaleRounding
) -> None:
    def both(x: Tensor) -> tuple[MXTensor, MXTensor, Tensor, Tensor]:
        row = quantize(x, format, rounding=rounding)
        column = quantize(x, format, axis=0, rounding=rounding, layout=BLOCKED)
        return row, column, dequantize(row), dequantize(column)

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for shape in ((300, 257), (96, 128)):
        x = wild_values(*shape)
        check_same(compiled(x), both(x))


def test_mx_tensors_go_in_and_out() -> None:
    """Two formats and two shapes through one function: the numbers of a format never become dynamic."""

    def halve(mx: MXTensor) -> MXTensor:
        scale = torch.where(mx.scale > 0, mx.scale - 1, mx.scale)
        return MXTensor(mx.data, scale, mx.format, mx.axis, mx.layout, mx.shape)

    compiled = torch.compile(halve, fullgraph=True, dynamic=True, backend="aot_eager")
    for format, shape in ((MXFP8_E4M3, (4, 64)), (MXFP8_E4M3, (7, 96)), (MXFP4_E2M1, (7, 96))):
        mx = quantize(torch.randn(shape), format)
        half = compiled(mx)
        check_same(half, halve(mx))
        assert half.format is format
        assert torch.equal(dequantize(half), dequantize(mx) / 2)


def test_layers_of_the_reference_are_one_graph() -> None:
    """Row maps, routing and SwiGLU: no data-dependent shape, nothing read on the host."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor | MXTensor, ...]:
        slot_of, token_of, offs = reference.route(ids, 4)
        rows = reference.gather(x, token_of)
        w = reference.slot_weights(weights, slot_of, token_of.shape[0])
        a = reference.swiglu(rows, offs)
        dh, wa, dw = reference.dswiglu(a, rows, w, offs)
        dy, dweights = reference.combine_backward(x, rows, slot_of, weights)
        compact = groups.compact_rows(rows, offs, ids.numel())
        column = quantize(groups.align_rows(compact, offs), MXFP8_E4M3, axis=-2, layout=BLOCKED)
        out = reference.combine(rows, slot_of, weights)
        return slot_of, token_of, offs, a, dh, wa, dw, out, dy, dweights, compact, column

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (50, 67):
        arguments = torch.randn(tokens, 64), torch.randint(-1, 5, (tokens, 2)), torch.rand(tokens, 2)
        check_same(compiled(*arguments), layer(*arguments))
