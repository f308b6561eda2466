"""moe_mlp: values and gradients against float64, the contract's cases, frozen parts, checkpointing."""

import mx_kernels as mk
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core.reference.gemm import float32_holds
from mx_kernels.recipe import RECIPES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels.layer import Layer, exact_layer, ids_of_sizes, make_layer, quantised_layer, relative_error

pytestmark = pytest.mark.usefixtures("float64_sums")

NAMES = ("out", "dx", "dweights", "dw1", "dw2")
MX_RECIPES = [name for name, recipe in RECIPES.items() if recipe.is_mx]


def check(got: tuple, want: tuple, tolerance: float) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.isfinite().all(), name
        assert relative_error(a, b) <= tolerance, (name, relative_error(a, b))


# values and gradients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-7), (torch.bfloat16, 6e-3)])
def test_bf16_recipe_is_the_exact_layer(dtype, tolerance) -> None:
    layer = make_layer(dtype=dtype)
    got = layer.run(mk.moe_mlp, recipe="bf16")
    assert got[0].dtype == dtype
    check(got, exact_layer(layer), tolerance)


@pytest.mark.parametrize("recipe", MX_RECIPES)
def test_mx_recipes_follow_the_contract(recipe) -> None:
    """Same operands, so only the order and precision of sums is left: near exact."""
    layer = make_layer()
    check(layer.run(mk.moe_mlp, recipe=recipe), quantised_layer(layer, recipe), 3e-7)


def test_mxfp8_follows_the_contract_in_bf16() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    check(layer.run(mk.moe_mlp), quantised_layer(layer, "mxfp8"), 3e-3)


@pytest.mark.parametrize(("recipe", "tolerance"), [("bf16", 1e-6), ("mxfp8", 2e-3)])
def test_fp32_sums(recipe, tolerance, monkeypatch) -> None:
    """As above with the backend's own sums; a few operands may then take a neighbouring code."""
    monkeypatch.setattr("mx_kernels.cpu.backend.float32_holds", float32_holds)
    layer = make_layer(T=200)
    check(
        layer.run(mk.moe_mlp, recipe=recipe),
        exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe),
        tolerance,
    )


@pytest.mark.parametrize(("recipe", "least", "most"), [("mxfp8", 0.02, 0.09), ("mxfp4", 0.15, 0.45)])
def test_quantisation_error_is_that_of_the_format(recipe, least, most) -> None:
    layer = make_layer(T=200)
    for name, a, b in zip(NAMES, layer.run(mk.moe_mlp, recipe=recipe), exact_layer(layer), strict=True):
        assert least < relative_error(a, b) < most, (name, relative_error(a, b))


def test_recipes_differ() -> None:
    layer = make_layer()
    outs = [layer.run(mk.moe_mlp, recipe=recipe)[0] for recipe in RECIPES]
    for i, a in enumerate(outs):
        for b in outs[:i]:
            assert not torch.equal(a, b)


def test_fp32_weights_with_bf16_activations_get_fp32_gradients() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    layer.w1, layer.w2 = layer.w1.float(), layer.w2.float()
    for recipe, tolerance in (("bf16", 8e-3), ("mxfp8", 0.09)):
        got = layer.run(mk.moe_mlp, recipe=recipe)
        assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 3]
        check(got, exact_layer(layer), tolerance)


def test_leading_axes_and_strides() -> None:
    layer = make_layer(T=60)
    want = layer.run(mk.moe_mlp)

    def strided(x, ids, weights, w1, w2):
        x = x.T.contiguous().T.view(60, 64)
        w1 = w1.transpose(1, 2).contiguous().transpose(1, 2)
        out = mk.moe_mlp(x.view(3, 20, -1), ids.int().view(3, 20, -1), weights.view(3, 20, -1), w1, w2)
        assert out.shape == (3, 20, 64)
        return out.view(60, 64)

    for a, b in zip(layer.run(strided), want, strict=True):
        assert torch.equal(a, b)


def test_autocast_casts_x() -> None:
    layer = make_layer()
    with torch.autocast("cpu", torch.bfloat16):
        out = mk.moe_mlp(layer.x, layer.ids, layer.weights, layer.w1, layer.w2)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, mk.moe_mlp(layer.x.bfloat16(), layer.ids, layer.weights, layer.w1, layer.w2))


# groups ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize(
    "sizes",
    [
        [0, 0, 7],
        [5, 0, 0],
        [0, 40, 0, 3],
        [16, 48, 0, 33],
        [127, 128, 129],
        [1, 1, 1, 1],
        [130, 0, 1, 1, 0, 1],
    ],
    ids=str,
)
def test_group_sizes(sizes, recipe) -> None:
    """C10, C11, C13 at the layer: skewed and empty experts; an empty one's gradients are exact zeros."""
    layer = make_layer(D=32, H=32, E=len(sizes), ids=ids_of_sizes(sizes))
    got = layer.run(mk.moe_mlp, recipe=recipe)
    check(got, exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe), 3e-7)
    for e, size in enumerate(sizes):
        if size == 0:
            assert not got[3][e].any()
            assert not got[4][e].any()


@given(st.lists(st.integers(0, 140), min_size=1, max_size=6), st.integers(0, 2**31))
def test_any_group_sizes(sizes, seed) -> None:
    layer = make_layer(D=32, H=32, E=len(sizes), ids=ids_of_sizes(sizes, seed), seed=seed)
    check(layer.run(mk.moe_mlp), quantised_layer(layer, "mxfp8"), 3e-7)


@pytest.mark.parametrize("E", [1, 3])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_no_token(recipe, E) -> None:
    """C12: zero gradients, not None."""
    layer = make_layer(T=0, k=1, E=E)
    out, dx, dweights, dw1, dw2 = layer.run(mk.moe_mlp, recipe=recipe)
    assert (out.shape, dx.shape, dweights.shape) == ((0, 64), (0, 64), (0, 1))
    assert dw1.shape == layer.w1.shape
    assert not dw1.any()
    assert not dw2.any()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_dropped_choices(recipe) -> None:
    """Ids outside [0, E) add nothing and get no gradient: expert parallelism relies on it."""
    layer = make_layer(k=3)
    layer.ids[::3, 1] = -1
    layer.ids[1::4, 0] = 4
    layer.ids[5] = 100
    got = layer.run(mk.moe_mlp, recipe=recipe)
    check(got, exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe), 3e-7)
    assert not got[2][(layer.ids < 0) | (layer.ids >= 4)].any()
    assert not got[0][5].any()
    assert not got[1][5].any()


def test_one_expert_twice() -> None:
    layer = make_layer(ids=torch.tensor([[1, 1], [0, 1], [2, 2]]))
    check(layer.run(mk.moe_mlp), quantised_layer(layer, "mxfp8"), 3e-7)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("M", [127, 128, 129])
def test_gate_is_the_first_half(recipe, M) -> None:
    """C14: silu(1) * 2, not silu(2) * 1."""
    w1 = torch.zeros(1, 64, 32)
    w1[0, :32, 0], w1[0, 32:, 0] = 1.0, 2.0
    x = torch.zeros(M, 32)
    x[:, 0] = 1.0
    w2 = torch.eye(32)[None]
    out = mk.moe_mlp(x, torch.zeros(M, 1, dtype=torch.int64), torch.ones(M, 1), w1, w2, recipe=recipe)
    want = 1.4621171572600098
    # In MXFP8 the activation is one E4M3 number: half a step of 2^-3 at 1.46, where swapped halves give 1.76.
    assert (out / want - 1).abs().max() <= (1e-6 if recipe == "bf16" else 0.0625 / want)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_weight_zero(recipe, dtype) -> None:
    """C22: w = 0, w = 1e-30 and a token with all weights 0: finite and right, dw at w = 0 too."""
    layer = make_layer(dtype=dtype)
    layer.weights[0, 0], layer.weights[1, 1], layer.weights[2], layer.weights[3, 0] = 0.0, 1e-30, 0.0, 1e-30
    got = layer.run(mk.moe_mlp, recipe=recipe)
    exact = exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe)
    check(got, exact, 3e-7 if dtype is torch.float32 else 6e-3)
    assert (got[2][[0, 1, 2, 3], [0, 1, 1, 0]] != 0).all()
    assert not got[0][2].any()
    assert not got[1][2].any()
    for row in ((0, 0), (2, 0), (2, 1)):
        assert relative_error(got[2][row], exact[2][row]) <= (1e-5 if dtype is torch.float32 else 2e-2)


def test_gradients_of_tiny_weights_alone() -> None:
    """All router weights 1e-30: everything scales with them, to the bit of the scale bytes."""
    layer = make_layer()
    tiny = Layer(
        layer.x, layer.ids, torch.full_like(layer.weights, 2.0**-100), layer.w1, layer.w2, layer.dout
    )
    ones = Layer(layer.x, layer.ids, torch.ones_like(layer.weights), layer.w1, layer.w2, layer.dout)
    for name, a, b in zip(NAMES, tiny.run(mk.moe_mlp), ones.run(mk.moe_mlp), strict=True):
        factor = 1.0 if name == "dweights" else 2.0**-100
        assert torch.equal(a, b * factor), name


# memory that nobody wrote ------------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned():
    """Every torch.empty, inside torch too, is filled with NaN or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_uninitialised_memory_does_not_show(recipe, poisoned) -> None:
    assert torch.empty(3).isnan().all()
    layer = make_layer(D=32, H=32, ids=ids_of_sizes([3, 0, 130, 1]))
    got = layer.run(mk.moe_mlp, recipe=recipe)
    check(got, exact_layer(layer) if recipe == "bf16" else quantised_layer(layer, recipe), 3e-7)


# what is left out ------------------------------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Names of the mx ops called, GEMMs with their mode."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mx":
            name = func._schema.name.removeprefix("mx::")
            self.names.append(f"{name} {args[0]}" if name == "grouped_gemm" else name)
        return func(*args, **(kwargs or {}))


def calls(layer: Layer, needs: str, recipe: str, **arguments) -> tuple[list[str], list[torch.Tensor | None]]:
    """The backward's op calls and gradients with only the named inputs ("x w 1 2") requiring grad."""
    leaves = [t.detach().clone() for t in layer.leaves]
    for leaf, name in zip(leaves, "xw12", strict=True):
        leaf.requires_grad_(name in needs)
    out = mk.moe_mlp(leaves[0], layer.ids, *leaves[1:], recipe=recipe, **arguments)
    with Calls() as seen:
        out.backward(layer.dout)
    return seen.names, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("needs", ["x", "w", "1", "2", "xw", "12", "x1", "x2", "w1", "xw1", "xw12"])
def test_frozen_inputs(needs, recipe) -> None:
    """Gradients are the same bits whatever else is frozen, and None for what is."""
    layer = make_layer()
    _, full = calls(layer, "xw12", recipe)
    names, got = calls(layer, needs, recipe)
    for name, a, b in zip("xw12", got, full, strict=True):
        assert (a is None) if name not in needs else torch.equal(a, b)
    assert names.count("grouped_gemm wgrad") == ("1" in needs) + ("2" in needs)
    assert names.count("grouped_gemm dgrad") == 1 + ("x" in needs)
    assert names.count("combine") == ("x" in needs)
    if recipe == "mxfp8":
        frozen = "1" not in needs and "2" not in needs
        assert ("dswiglu_quantize_row" in names) is frozen
        assert ("gather_quantize_dual" in names) is ("2" in needs)


def test_the_flow_is_the_contracts_table() -> None:
    layer = make_layer()
    leaves = [t.detach().clone().requires_grad_() for t in layer.leaves]
    wq = mk.prepare_weights(leaves[2], leaves[3])
    with Calls() as forward:
        out = mk.moe_mlp(leaves[0], layer.ids, *leaves[1:], wq=wq)
    with Calls() as backward:
        out.backward(layer.dout)
    assert forward.names == [
        "route", "gather_quantize", "grouped_gemm fprop", "swiglu_quantize", "grouped_gemm fprop", "combine",
    ]  # fmt: skip
    assert backward.names == [
        "slot_weights", "gather_quantize_dual", "grouped_gemm dgrad", "dswiglu_quantize", "grouped_gemm wgrad",
        "gather_quantize", "grouped_gemm wgrad", "grouped_gemm dgrad", "combine",
    ]  # fmt: skip


def test_nothing_is_kept_without_grad() -> None:
    layer = make_layer()
    with torch.no_grad():
        out = mk.moe_mlp(layer.x, layer.ids, layer.weights, layer.w1.requires_grad_(), layer.w2)
    assert not out.requires_grad


def test_a_second_derivative_is_refused() -> None:
    layer = make_layer(T=8)
    x = layer.x.requires_grad_()
    out = mk.moe_mlp(x, layer.ids, layer.weights, layer.w1, layer.w2)
    (dx,) = torch.autograd.grad(out, x, layer.dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# checkpointing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_activation_checkpointing(recipe) -> None:
    """C18 at the layer: whole and selective recomputation give the same bits; the policy decides which ops run again."""
    layer = make_layer()
    want = layer.run(mk.moe_mlp, recipe=recipe)

    def checkpointed(context_fn):
        def run(*args, **kwargs):
            more = {"context_fn": context_fn} if context_fn else {}
            return checkpoint(lambda *a: mk.moe_mlp(*a, **kwargs), *args, use_reentrant=False, **more)

        return run

    def keep_gemms():
        def policy(ctx, op, *args, **kwargs):
            kept = op in (torch.ops.mx.grouped_gemm.default, torch.ops.mx.route.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    counts = {}
    for how, context_fn in (("plain", None), ("whole", None), ("gemms kept", keep_gemms)):
        function = mk.moe_mlp if how == "plain" else checkpointed(context_fn)
        with Calls() as seen:
            got = layer.run(function, recipe=recipe)
        counts[how] = seen.names
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    fprops = {how: names.count("grouped_gemm fprop") for how, names in counts.items()}
    assert fprops["plain"] == 2
    assert fprops["whole"] > 2  # the second fprop is not needed again, and torch stops early
    assert fprops["gemms kept"] == 2
    assert counts["gemms kept"].count("route") == 1


# the module --------------------------------------------------------------------------------------------------------------


def test_module() -> None:
    layer = make_layer()
    experts = mk.MXExperts(4, 64, 96, recipe="mxfp8")
    assert {name: tuple(p.shape) for name, p in experts.named_parameters()} == {
        "w1": (4, 192, 64),
        "w2": (4, 64, 96),
    }
    assert experts.w1.abs().max() <= 64**-0.5
    out = experts(layer.x, layer.ids, layer.weights)
    assert torch.equal(out, mk.moe_mlp(layer.x, layer.ids, layer.weights, experts.w1, experts.w2))
    assert "recipe=mxfp8_e4m3" in repr(experts)
    experts.prepare()
    assert torch.equal(experts(layer.x, layer.ids, layer.weights), out)
    assert list(experts.state_dict()) == ["w1", "w2"]
