"""Quantise and dequantise: published cases, exact rationals, any axis, any shape."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core import (
    FORMATS,
    MXFP8_E4M3,
    MXINT8,
    ElementFormat,
    MXTensor,
    ScaleLayout,
    ScaleRounding,
    dequantize,
    from_blocked,
    mx_equal,
    quantize,
)
from mx_core.chunks import CHUNK_ELEMENTS
from mx_core.codec import from_storage, to_storage
from support import oracle
from torch import Tensor

FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
RULES = pytest.mark.parametrize("rounding", ScaleRounding)
RCEIL, FLOOR, CEIL = ScaleRounding.RCEIL, ScaleRounding.FLOOR, ScaleRounding.CEIL


def codes_of(mx: MXTensor) -> Tensor:
    return from_storage(mx.data, mx.format, mx.shape[-1])


def check_block(
    values: list[float], expected: str, *rules: ScaleRounding, dtype: torch.dtype = torch.float32
) -> None:
    """One E4M3 block, zeros after the listed values; `expected` is hex, "scale / codes"."""
    x = torch.zeros(32, dtype=dtype)
    x[: len(values)] = torch.tensor(values, dtype=dtype)
    scale, codes = expected.split("/")
    for rule in rules or (RCEIL, FLOOR):
        mx = quantize(x, MXFP8_E4M3, rounding=rule)
        assert f"{mx.scale.item():02X}" == scale.strip(), rule
        assert " ".join(f"{code:02X}" for code in codes_of(mx)[: len(values)].tolist()) == codes.strip(), rule
        assert codes_of(mx)[len(values) :].unique().tolist() in ([0], [])


class TestCases:
    """Cases from public bug reports."""

    def test_c01_scale_rule(self) -> None:
        check_block([450, -450, 17, 19], "80 / 76 F6 50 52", RCEIL)
        check_block([450, -450, 17, 19], "7F / 7E FE 58 5A", FLOOR)

    @pytest.mark.parametrize(("k", "scale"), [(-10, "75"), (0, "7F"), (10, "89")])
    def test_c02_largest_value(self, k: int, scale: str) -> None:
        check_block([448 * 2.0**k, -448 * 2.0**k, 2.0**k], f"{scale} / 7E FE 38")

    def test_c03_ceil(self) -> None:
        check_block([150, -150, 1], "7E / 79 F9 40")
        check_block([150, -150, 1], "7F / 71 F1 38", CEIL)

    def test_c04_floor_clips(self) -> None:
        check_block([957], "80 / 7E", FLOOR)
        check_block([957], "81 / 77", RCEIL)
        x = torch.tensor([957.0])
        assert dequantize(quantize(x, MXFP8_E4M3, rounding=FLOOR)).item() == 896
        assert dequantize(quantize(x, MXFP8_E4M3)).item() == 960

    def test_c06_zero_and_underflow(self) -> None:
        check_block([0.0] * 31 + [-0.0], "00 / " + "00 " * 31 + "80")
        check_block([2.0**-133, -(2.0**-133)], "00 / 08 88")
        check_block([2.0**-126, 2.0**-127, 2.0**-133], "00 / 40 38 08")
        check_block([2.0**-149], "00 / 00")
        for pattern, expected, rules in [
            (0x0460, "00 / 7E", (RCEIL, FLOOR)),
            (0x0461, "01 / 76", (RCEIL,)),
            (0x0461, "00 / 7E", (FLOOR,)),
        ]:
            value = torch.tensor(pattern, dtype=torch.uint16).view(torch.bfloat16).item()
            check_block([value], expected, *rules, dtype=torch.bfloat16)

    @FORMAT
    @pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_c07_bad_value(self, format: ElementFormat, bad: float, dtype: torch.dtype) -> None:
        x = torch.ones(2, 64, dtype=dtype)
        x[1, 5] = bad
        mx = quantize(x, format)
        clean = quantize(torch.ones(32), format)
        assert mx.scale.tolist() == [[clean.scale.item()] * 2, [255, clean.scale.item()]]
        codes = codes_of(mx)
        assert codes[1, :32].unique().tolist() == [format.nan_code]
        assert torch.equal(codes[1, 32:], codes_of(clean))
        assert dequantize(mx)[1, :32].isnan().all()
        assert (dequantize(mx)[1, 32:] == 1).all()
        if format is MXFP8_E4M3:
            assert mx.scale[0, 0] == 0x77
            assert codes[0].unique().tolist() == [0x78]

    def test_c08_element_rounding(self) -> None:
        s = 2.0**-10
        values = [
            448,
            17,
            19,
            -17,
            8.5,
            9.5,
            232,
            248,
            s,
            s * (1 + 2**-7),
            3 * s,
            15 * s,
            -s,
            2 * s,
            16 * s,
            440,
            432,
        ]
        check_block(values, "7F / 7E 58 5A D8 50 52 76 78 00 01 02 08 80 01 08 7E 7E")

    @FORMAT
    def test_c08_every_code(self, format: ElementFormat) -> None:
        """With the scale pinned at 2^0 by the largest value, every code comes back."""
        codes = torch.tensor(
            [c for c in range(1 << format.bits) if c & (format.sign_bit - 1) <= format.max_code]
        )
        codes = codes[codes != 0x80] if format is MXINT8 else codes
        values = torch.tensor(format.values)[codes]
        rows = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
        pinned = torch.cat([torch.full((len(rows), 1), format.max_value), rows], dim=1)
        mx = quantize(pinned, format)
        assert mx.scale.unique().tolist() == [127]
        assert codes_of(mx)[:, 1:].flatten()[: len(codes)].tolist() == codes.tolist()

    def test_c11_block_across_experts(self) -> None:
        """Without groups, a block that spans two experts takes the larger one's scale: hence ALIGNED rows."""
        x = torch.ones(64, 1)
        x[:16] = 448
        mixed = quantize(x, MXFP8_E4M3, axis=-2)
        assert mixed.scale.tolist() == [[0x7F, 0x77]]
        assert codes_of(mixed)[16:32].unique().tolist() == [0x38]

    @pytest.mark.slow
    @pytest.mark.timeout(1200)
    def test_c09_past_2_to_31_elements(self) -> None:
        """bf16 (65537, 32768), in chunks of rows, as a CPU of 16 GB can."""
        rows, cols, step = 65537, 32768, 1 << 13
        scales = torch.empty(rows, cols // 32, dtype=torch.uint8)
        for start in range(0, rows, step):
            x = torch.zeros(min(step, rows - start), cols, dtype=torch.bfloat16)
            if start == 0:
                x[0] = 1
            if start + len(x) == rows:
                x[-1] = 448
            mx = quantize(x, MXFP8_E4M3)
            scales[start : start + len(x)] = mx.scale
            codes = codes_of(mx)
            expected = {r: {0: 0x78, rows - 1: 0x7E}.get(start + r, 0) for r in (0, len(x) - 1)}
            assert all((codes[r] == code).all() for r, code in expected.items())
            assert codes[1:-1].count_nonzero() == 0
        assert (scales[0] == 0x77).all()
        assert (scales[-1] == 0x7F).all()
        assert scales[1:-1].count_nonzero() == 0


@FORMAT
@RULES
def test_same_as_exact_rationals(format: ElementFormat, rounding: ScaleRounding) -> None:
    """Blocks of every size, wide and narrow in range, subnormal and near the top."""
    spans = torch.tensor([0, 2, 8, 20, 60]).repeat(12)[:, None]
    base = torch.randint(-150, 128, (60, 1))
    exponent = base - (torch.rand(60, 32) * spans).floor()
    x = (torch.randn(60, 32, dtype=torch.float64) * exponent.double().exp2()).float()
    x = torch.cat([x, torch.randint(-(1 << 31), 1 << 31, (20, 32)).to(torch.int32).view(torch.float32)])
    mx = quantize(x, format, rounding=rounding)
    for row, scale, codes in zip(x, mx.scale.flatten().tolist(), codes_of(mx).tolist(), strict=True):
        bits = (row.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF).tolist()
        assert (scale, codes) == oracle.quantize_block(bits, format.name, rounding.value)


@FORMAT
@RULES
def test_single_values_of_every_exponent(format: ElementFormat, rounding: ScaleRounding) -> None:
    """Each fp32 exponent with fractions near 0, 1/2, 3/4, 7/8 and 1, alone and beside a smaller one."""
    fractions = torch.tensor(
        [0, 1, 0x3FFFFF, 0x400000, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x7FFFFF]
    )
    bits = ((torch.arange(255) << 23)[:, None] | fractions).flatten()
    x = torch.zeros(len(bits), 32)
    x[:, 0] = bits.to(torch.int32).view(torch.float32)
    x[:, 1] = -x[:, 0] * 0.3
    mx = quantize(x, format, rounding=rounding)
    codes = codes_of(mx)[:, :2].tolist()
    for row, scale, code in zip(x[:, :2], mx.scale.flatten().tolist(), codes, strict=True):
        pair = (row.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF).tolist()
        assert (scale, code) == oracle.quantize_block(pair, format.name, rounding.value)


@FORMAT
def test_dequantise_every_code_with_every_scale(format: ElementFormat) -> None:
    """fp32 is exact, subnormals and Inf past its range included; float64 is exact everywhere."""
    codes = torch.arange(1 << format.bits, dtype=torch.uint8)[:, None].expand(-1, 32)
    values = torch.tensor(format.values, dtype=torch.float64)[:, None]
    scale = torch.arange(256, dtype=torch.uint8)
    data = to_storage(codes.repeat(1, 256), format)
    mx = MXTensor(
        data, scale.expand(len(codes), -1), format, -1, ScaleLayout.LINEAR, torch.Size((len(codes), 8192))
    )
    powers = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [math.nan], dtype=torch.float64)
    exact = (values * powers).repeat_interleave(32, 1)
    torch.testing.assert_close(dequantize(mx, torch.float64), exact, rtol=0, atol=0, equal_nan=True)
    single = dequantize(mx)
    torch.testing.assert_close(single, exact.float(), rtol=0, atol=0, equal_nan=True)
    held = single.isfinite()
    assert torch.equal(single[held].double(), exact[held])  # exact: no rounding at all where it is finite
    lost = exact.isfinite() & ~held
    assert (exact[lost].abs() >= 2.0**128).all()


def test_e4m3_is_exact_in_bfloat16_for_scale_bytes_3_to_246_only() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32 * 255).view(torch.float8_e4m3fn)
    scale = torch.arange(255, dtype=torch.uint8).expand(256, -1).contiguous()
    mx = MXTensor(codes, scale, MXFP8_E4M3, -1, ScaleLayout.LINEAR, codes.shape)
    exact = dequantize(mx, torch.float64)
    kept = (
        (exact.isnan() | (dequantize(mx, torch.bfloat16).double() == exact)).view(256, 255, 32).all(2).all(0)
    )
    assert kept.nonzero().flatten().tolist() == list(range(3, 247))


FIRST_BF16_TO_INF = {  # under RCEIL; None: the largest scale, 2^127, saturates instead
    "mxfp8_e4m3": 0x7F78,
    "mxfp8_e5m2": 0x7F70,
    "mxfp6_e3m2": 0x7F70,
    "mxfp6_e2m3": 0x7F78,
    "mxfp4_e2m1": 0x7F60,
    "mxint8": None,
}


@FORMAT
def test_the_largest_bfloat16_round_up_to_inf(format: ElementFormat) -> None:
    patterns = torch.arange(0x7F00, 0x7F80, dtype=torch.int32)
    x = patterns.to(torch.uint16).view(torch.bfloat16)[:, None]
    restored = dequantize(quantize(x, format))[:, 0]
    first = FIRST_BF16_TO_INF[format.name]
    assert restored.isinf().tolist() == [first is not None and p >= first for p in patterns.tolist()]
    assert dequantize(quantize(x, format), torch.float64).isfinite().all()


@FORMAT
@RULES
def test_quantising_twice_changes_no_value(format: ElementFormat, rounding: ScaleRounding) -> None:
    """Bytes may differ, values do not: but where the first rounding left fp32's range, and gave Inf."""
    magnitude = torch.randint(0, 0x7F80_0000, (4000,), dtype=torch.int32).view(torch.float32)[:, None]
    x = magnitude * torch.randn(4000, 32).clamp(-1, 1)
    once = dequantize(quantize(x, format, rounding=rounding))
    inside = once.isfinite().all(1)
    assert inside.float().mean() > 0.99
    twice = dequantize(quantize(once, format, rounding=rounding))
    assert torch.equal(once[inside], twice[inside])


@FORMAT
@pytest.mark.parametrize("layout", ScaleLayout)
@given(
    shape=st.lists(st.integers(0, 70), min_size=2, max_size=3).filter(lambda s: math.prod(s) < 20_000),
    data=st.data(),
)
def test_any_axis_is_the_last_axis_of_the_transpose(
    format: ElementFormat, layout: ScaleLayout, shape: list[int], data: st.DataObject
) -> None:
    """Blocks run along `axis` and nowhere else; a short last block counts as zero-padded."""
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    mx = quantize(x, format, axis=axis, layout=layout)
    assert mx.axis == (axis if axis < 0 else axis - len(shape))
    moved = x.movedim(axis, -1)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 32))
    reference = quantize(padded.contiguous(), format)
    length = moved.shape[-1]
    assert torch.equal(codes_of(mx).movedim(axis, -1), codes_of(reference)[..., :length])
    scale = (
        mx.scale
        if layout is ScaleLayout.LINEAR
        else from_blocked(mx.scale, moved.shape[-2], -(-length // 32))
    )
    assert torch.equal(scale, reference.scale)
    assert torch.equal(dequantize(mx).movedim(axis, -1), dequantize(reference)[..., :length])
    assert mx.data.is_contiguous()
    assert mx.scale.is_contiguous()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("rows", [31, CHUNK_ELEMENTS // 96 - 1, CHUNK_ELEMENTS // 32 + 7])
def test_pieces_do_not_show(rows: int, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU long tensors are done a piece at a time; one pass over the whole gives the same bytes."""
    x = torch.randn(rows, 70)
    x[0, 0] = math.nan
    in_pieces = quantize(x, MXFP8_E4M3, axis=axis)
    monkeypatch.setattr("mx_core.chunks.CHUNK_ELEMENTS", 1 << 30)
    assert mx_equal(in_pieces, quantize(x, MXFP8_E4M3, axis=axis))


def test_strides_and_dtypes_do_not_matter() -> None:
    x = torch.randn(96, 80, dtype=torch.bfloat16)
    wanted = quantize(x.float(), MXFP8_E4M3)
    same = [
        x,
        x.t().contiguous().t(),
        torch.stack([x, x], -1)[..., 0],
        x.clone().requires_grad_(),
        x[::1, ::1],
    ]
    assert all(mx_equal(quantize(y, MXFP8_E4M3), wanted) for y in same)
    assert mx_equal(quantize(x[::3, 5::2], MXFP8_E4M3), quantize(x[::3, 5::2].contiguous(), MXFP8_E4M3))
    expanded = torch.tensor([[3.0]]).expand(64, 64)
    assert mx_equal(quantize(expanded, MXFP8_E4M3), quantize(expanded.contiguous(), MXFP8_E4M3))
    half = torch.randn(4, 64).half()
    assert mx_equal(quantize(half, MXINT8), quantize(half.float(), MXINT8))


@pytest.mark.parametrize("shape", [(0,), (0, 32), (32, 0), (0, 0), (2, 0, 64), (1,), (1, 1)])
@FORMAT
def test_empty_and_tiny(format: ElementFormat, shape: tuple[int, ...]) -> None:
    x = torch.full(shape, -3.0)
    for axis in range(-len(shape), 0):
        mx = quantize(x, format, axis=axis)
        assert mx.shape == shape
        assert torch.equal(dequantize(mx), x)
        if len(shape) > 1:
            blocked = quantize(x, format, axis=axis, layout=ScaleLayout.BLOCKED_128X4)
            assert torch.equal(dequantize(blocked), dequantize(mx))


def test_input_is_left_alone() -> None:
    x = torch.randn(64, 64)
    before = x.clone()
    quantize(x, MXFP8_E4M3, axis=-2)
    assert torch.equal(x, before)


def test_dequantise_dtypes() -> None:
    x = torch.randn(8, 64) * 1e-3
    mx = quantize(x, MXFP8_E4M3)
    exact = dequantize(mx, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(mx, dtype), exact.float().to(dtype))


def test_errors() -> None:
    x = torch.zeros(4, 32)
    with pytest.raises(
        TypeError, match=r"x: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.int32"
    ):
        quantize(x.int(), MXFP8_E4M3)
    with pytest.raises(TypeError, match=r"got torch.float64"):
        quantize(x.double(), MXFP8_E4M3)
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor, got list"):
        quantize([1.0], MXFP8_E4M3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x: expected at least one axis, got shape \(\)"):
        quantize(torch.tensor(1.0), MXFP8_E4M3)
    with pytest.raises(ValueError, match=r"axis: expected an axis in \[-2, 2\), got 2"):
        quantize(x, MXFP8_E4M3, axis=2)
    with pytest.raises(ValueError, match=r"format: expected one of .*'mxint8'\], got 'fp8'"):
        quantize(x, "fp8")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"layout: expected one of \['linear', 'blocked_128x4'\], got 'tiled'"
    ):
        quantize(x, MXFP8_E4M3, layout="tiled")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"x: expected two axes or more with blocked scales, got shape \(32,\)"
    ):
        quantize(x[0], MXFP8_E4M3, layout=ScaleLayout.BLOCKED_128X4)
    with pytest.raises(TypeError, match=r"dtype: expected .*, got torch.int8"):
        dequantize(quantize(x, MXFP8_E4M3), torch.int8)
