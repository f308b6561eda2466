"""torch.library.opcheck of every torch.ops.mx op: schema, fake, autograd registration, dynamic shapes."""

import mx_kernels
import pytest
import torch
from mx_core import MXFP8_E4M3, MXINT8, ElementFormat, quantize, reference
from mx_core.groups import aligned_rows
from mx_core.scale_layout import to_blocked
from mx_kernels.ops.library import LIBRARY

E4M3, RCEIL, BLOCKED, LINEAR = "mxfp8_e4m3", "rceil", "blocked_128x4", "linear"
HOW = (E4M3, RCEIL, BLOCKED)
T, k, E, D, H = 20, 2, 3, 32, 64
P = aligned_rows(T * k, E)

IDS = torch.arange(T * k).reshape(T, k) % E
SLOT_OF, TOKEN_OF, OFFS = reference.route(IDS, E)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def mx(*shape: int, axis: int, format: ElementFormat = MXINT8) -> tuple[torch.Tensor, torch.Tensor, str]:
    q = quantize(rand(*shape), format, axis=axis)
    return q.data, to_blocked(q.scale), format.name


def plain(*shape: int) -> tuple[torch.Tensor, None, str]:
    return rand(*shape), None, "bf16"


def leaf(*shape: int) -> torch.Tensor:
    return rand(*shape, dtype=torch.float32).requires_grad_()


def real_rows(x: torch.Tensor) -> torch.Tensor:
    """x with zero padding rows."""
    return torch.where(TOKEN_OF[:, None] >= 0, x, 0)


WEIGHTS = rand(T, k, dtype=torch.float32).abs()
SLOT_WEIGHTS = reference.slot_weights(WEIGHTS, SLOT_OF, P)
X_P, H_P, DA_P = real_rows(rand(P, D)), real_rows(rand(P, 2 * H)), real_rows(rand(P, H))

ALL_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

SAMPLES = {
    "quantize": [
        (rand(40, D), E4M3, -1, RCEIL, LINEAR),
        (rand(E, 64, D), "mxfp4_e2m1", -2, "floor", BLOCKED, None, "aligned", "cpu"),
        (rand(T * k, D), E4M3, -1, RCEIL, BLOCKED, OFFS, "compact", "auto"),
        (rand(T * k, D), E4M3, -2, RCEIL, BLOCKED, OFFS, "aligned", "auto"),
    ],
    "quantize_dual": [(rand(40, D), *HOW), (rand(T * k, D), *HOW, OFFS), (rand(E, 64, D), E4M3, RCEIL, LINEAR)],
    "route": [(IDS, E), (IDS.int(), E)],
    "slot_weights": [(WEIGHTS, SLOT_OF, P)],
    "gather": [(rand(T, D), TOKEN_OF)],
    "gather_quantize": [
        (rand(T, D), TOKEN_OF, None, E4M3, -1, RCEIL, BLOCKED),
        (rand(T, D), TOKEN_OF, SLOT_WEIGHTS, E4M3, -2, RCEIL, LINEAR),
    ],
    "gather_quantize_dual": [(rand(T, D), TOKEN_OF, SLOT_WEIGHTS, *HOW), (rand(T, D), TOKEN_OF, None, *HOW)],
    "swiglu": [(H_P, OFFS), (H_P.float().requires_grad_(), OFFS)],
    "swiglu_quantize": [(H_P, OFFS, *HOW)],
    "dswiglu": [(DA_P, H_P, SLOT_WEIGHTS, OFFS)],
    "dswiglu_quantize": [(DA_P, H_P, SLOT_WEIGHTS, OFFS, *HOW)],
    "dswiglu_quantize_row": [(DA_P, H_P, SLOT_WEIGHTS, OFFS, *HOW)],
    "combine": [
        (X_P, SLOT_OF, WEIGHTS),
        (X_P, SLOT_OF, None),
        (X_P.float().requires_grad_(), SLOT_OF, WEIGHTS.clone().requires_grad_()),
        (X_P.float().requires_grad_(), SLOT_OF),
    ],
    "combine_backward": [(rand(T, D), X_P, SLOT_OF, WEIGHTS)],
    "grouped_gemm": [
        ("fprop", *mx(P, D, axis=-1), *mx(E, 64, D, axis=-1), OFFS, torch.bfloat16),
        ("dgrad", *mx(P, 64, axis=-1), *mx(E, 64, D, axis=-2), OFFS, torch.float32),
        ("wgrad", *mx(P, 64, axis=-2), *mx(P, D, axis=-2), OFFS, torch.float32),
        ("fprop", *mx(P, D, axis=-1, format=MXFP8_E4M3), *mx(E, 64, D, axis=-1, format=MXFP8_E4M3), OFFS, torch.bfloat16),
        ("fprop", *plain(T * k, D), *plain(E, 64, D), OFFS, torch.bfloat16, "compact"),
        ("fprop", *plain(40, D), *plain(1, 64, D), None, torch.bfloat16),
    ],
    "grouped_gemm_out": [
        ("wgrad", *plain(P, 64), *plain(P, D), OFFS, rand(E, 64, D, dtype=torch.float32), True),
        ("fprop", *mx(P, D, axis=-1), *mx(E, 64, D, axis=-1), OFFS, rand(P, 64)),
    ],
}  # fmt: skip

#: Ops that are functions of the others, differentiable; mxint8 because test_schema cannot compare float8 tensors.
COMPOSITES = {
    "moe_mlp": ((leaf(T, D), IDS, leaf(T, k), leaf(E, 2 * H, D), leaf(E, D, H)), {"recipe": "mxint8"}),
    "mx_linear": ((leaf(5, D), leaf(H, D)), {"recipe": "mxint8"}),
    "mx_grouped_mm": ((leaf(E, 7, D), leaf(E, D, H)), {"recipe": "mxint8"}),
}


def test_every_op_has_a_sample() -> None:
    defined = {name.split("::")[1].split(".")[0] for name in LIBRARY._op_defs}
    assert defined == {*SAMPLES, *COMPOSITES}


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        pytest.param(op, arguments, id=f"{op}-{i}")
        for op, many in SAMPLES.items()
        for i, arguments in enumerate(many)
    ],
)
def test_opcheck(op: str, arguments: tuple) -> None:
    # test_schema multiplies its inputs to compare them, which torch cannot do with float8 tensors.
    has_float8 = any(isinstance(a, torch.Tensor) and a.dtype is torch.float8_e4m3fn for a in arguments)
    tests = tuple(t for t in ALL_TESTS if not (has_float8 and t == "test_schema"))
    torch.library.opcheck(getattr(torch.ops.mx, op).default, arguments, test_utils=tests)


@pytest.mark.parametrize("op", COMPOSITES)
def test_opcheck_of_composites(op: str) -> None:
    torch.library.opcheck(getattr(torch.ops.mx, op).default, *COMPOSITES[op])


@pytest.mark.parametrize(
    "op", ["quantize", "gather_quantize", "swiglu_quantize", "dswiglu", "route", "gather"]
)
def test_ops_without_a_formula_give_results_without_grad(op: str) -> None:
    arguments = tuple(
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in SAMPLES[op][0]
    )
    results = getattr(torch.ops.mx, op)(*arguments)
    for result in results if isinstance(results, (tuple, list)) else (results,):
        assert not result.requires_grad


def test_composite_ops_are_the_functions() -> None:
    a, b = rand(20, D), rand(E, D, H)
    assert torch.equal(
        torch.ops.mx.mx_grouped_mm(a, b, offs=OFFS // 2), mx_kernels.mx_grouped_mm(a, b, offs=OFFS // 2)
    )
    layer = COMPOSITES["moe_mlp"][0]
    for recipe in ("bf16", "mxfp8"):
        assert torch.equal(
            torch.ops.mx.moe_mlp(*layer, recipe=recipe), mx_kernels.moe_mlp(*layer, recipe=recipe)
        )
