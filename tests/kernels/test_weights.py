"""PreparedWeights: fixed buffers, refreshed whenever the weights change (C21)."""

import copy
import io

import mx_kernels as mk
import pytest
import torch
from mx_core import MXFP8_E4M3, ScaleLayout, mx_equal, quantize

from kernels.layer import make_layer


@pytest.fixture
def experts() -> mk.MXExperts:
    return mk.MXExperts(4, 64, 96)


LAYER = make_layer()


def forward(experts: mk.MXExperts) -> torch.Tensor:
    return experts(LAYER.x, LAYER.ids, LAYER.weights)


def fresh(experts: mk.MXExperts) -> torch.Tensor:
    """The forward with weights quantised now."""
    return mk.moe_mlp(LAYER.x, LAYER.ids, LAYER.weights, experts.w1, experts.w2)


def buffers(wq: mk.PreparedWeights) -> list[int]:
    return [t.data_ptr() for i in range(len(wq)) for pair in wq[i].parts() for t in pair]


def snapshot(wq: mk.PreparedWeights) -> list[torch.Tensor]:
    return [t.view(torch.uint8).clone() for i in range(len(wq)) for pair in wq[i].parts() for t in pair]


@pytest.mark.parametrize(("orientations", "factor"), [("both", 2.0625), ("row_only", 1.03125)])
def test_what_is_prepared(experts, orientations, factor) -> None:
    wq = mk.prepare_weights(experts.w1, experts.w2, orientations=orientations)
    for prepared, w in zip(wq, (experts.w1, experts.w2), strict=True):
        for mx, axis in zip(prepared, (-1, -2), strict=True):
            if mx is None:
                assert (orientations, axis) == ("row_only", -2)
                continue
            assert mx_equal(mx, quantize(w, MXFP8_E4M3, axis=axis, layout=ScaleLayout.BLOCKED_128X4))
    params = experts.w1.numel() + experts.w2.numel()
    scales = wq.nbytes - (2 if orientations == "both" else 1) * params
    assert wq.nbytes / params >= factor
    assert scales < 0.2 * params  # these small weights have more tile padding than 1/32
    assert "both" in repr(wq) or "row_only" in repr(wq)


@pytest.mark.parametrize("orientations", ["both", "row_only"])
def test_same_bits_as_without(experts, orientations) -> None:
    x = LAYER.x.clone().requires_grad_()
    plain = torch.autograd.grad(
        mk.moe_mlp(x, LAYER.ids, LAYER.weights, experts.w1, experts.w2).sum(), (x, experts.w1, experts.w2)
    )
    experts.prepare(orientations=orientations)
    prepared = torch.autograd.grad(experts(x, LAYER.ids, LAYER.weights).sum(), (x, experts.w1, experts.w2))
    for a, b in zip(plain, prepared, strict=True):
        assert torch.equal(a, b)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "adamw, lr a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_optimiser_steps(experts, make) -> None:
    optimizer = make(experts.parameters())
    wq = experts.prepare(optimizer)
    where = buffers(wq)
    for _ in range(3):
        before = snapshot(wq)
        forward(experts).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(forward(experts), fresh(experts))
        assert any(not torch.equal(a, b) for a, b in zip(before, snapshot(wq), strict=True))
    assert buffers(wq) == where


def test_detach(experts) -> None:
    optimizer = torch.optim.SGD(experts.parameters(), 10.0)
    wq = mk.prepare_weights(experts.w1, experts.w2).attach(optimizer).attach(experts)
    wq.detach()
    before = snapshot(wq)
    fresh(experts).sum().backward()
    optimizer.step()
    experts.load_state_dict({name: torch.randn_like(t) for name, t in experts.state_dict().items()})
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(wq), strict=True))


def test_edits_outside_the_optimiser_need_a_refresh(experts) -> None:
    """Documented: nothing sees a `.data` edit, and nothing pretends to by looking at version counters."""
    wq = experts.prepare()
    where = buffers(wq)
    old = forward(experts)
    experts.w1.data.mul_(2)
    assert torch.equal(forward(experts), old)
    wq.refresh()
    assert torch.equal(forward(experts), fresh(experts))
    assert not torch.equal(forward(experts), old)
    assert buffers(wq) == where


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_load_state_dict(experts, assign, nested) -> None:
    model = torch.nn.Sequential(experts) if nested else experts
    experts.prepare()
    state = {name: torch.randn_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert torch.equal(forward(experts), fresh(experts))
    experts.prepared.refresh()  # of the parameters that are there now
    assert torch.equal(forward(experts), fresh(experts))


def test_attached_to_a_parent(experts) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), experts)
    wq = mk.prepare_weights(experts.w1, experts.w2)
    wq.attach(model)
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
    out = mk.moe_mlp(LAYER.x, LAYER.ids, LAYER.weights, experts.w1, experts.w2, wq=wq)
    assert torch.equal(out, fresh(experts))


def test_gathered_weights(experts) -> None:
    """What an FSDP user does after the all-gather: the prepared buffers take values that are not the sources'."""
    wq = experts.prepare()
    full = [torch.randn_like(w) for w in (experts.w1, experts.w2)]
    where = buffers(wq)
    wq.refresh(*full)
    out = mk.moe_mlp(LAYER.x, LAYER.ids, LAYER.weights, *full, wq=wq)
    assert torch.equal(out, mk.moe_mlp(LAYER.x, LAYER.ids, LAYER.weights, *full))
    assert buffers(wq) == where
    with pytest.raises(ValueError, match="weights: expected tensors, as in the refresh before, got none"):
        wq.refresh()


def test_module_moves_and_casts(experts) -> None:
    experts.prepare()
    experts.to(torch.bfloat16)
    layer = make_layer(dtype=torch.bfloat16)
    out = experts(layer.x, layer.ids, layer.weights)
    assert torch.equal(out, mk.moe_mlp(layer.x, layer.ids, layer.weights, experts.w1, experts.w2))
    experts.reset_parameters()
    out = experts(layer.x, layer.ids, layer.weights)
    assert torch.equal(out, mk.moe_mlp(layer.x, layer.ids, layer.weights, experts.w1, experts.w2))


def test_copies_are_independent(experts) -> None:
    experts.prepare()
    twin = copy.deepcopy(experts)
    twin.load_state_dict({name: torch.randn_like(t) for name, t in experts.state_dict().items()})
    assert torch.equal(forward(twin), fresh(twin))
    assert torch.equal(forward(experts), fresh(experts))


def test_state_dict_does_not_hold_quantised_weights(experts) -> None:
    experts.prepare()
    file = io.BytesIO()
    torch.save(experts.state_dict(), file)
    file.seek(0)
    assert set(torch.load(file)) == {"w1", "w2"}
