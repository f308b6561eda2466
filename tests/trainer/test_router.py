"""Case C19 and C12, and what a router promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_trainer.config import RouterConfig
from mx_trainer.moe import Router, RouterStats, load_balancing_loss, top_k_lowest_id


def make_router(experts: int, top_k: int, width: int = 8, **cfg) -> Router:
    router = Router(width, experts, top_k, RouterConfig(**cfg))
    torch.nn.init.normal_(router.weight)
    return router


def aux_loss(stats: RouterStats) -> torch.Tensor:
    return load_balancing_loss(stats.tokens_E, stats.chance_E)


def test_c19a_close_logits_are_told_apart():
    ids, _, _ = make_router(4, 1).choose(torch.tensor([[1.0, 1.001, 0.0, -1.0]]))
    assert ids.tolist() == [[1]]


def test_c19a_bf16_activations_are_routed_in_fp32():
    router = make_router(2, 1, width=1)
    router.weight.data = torch.tensor([[1.0], [1.001]])  # equal in bf16
    with torch.autocast("cpu", torch.bfloat16):
        ids, weights, _ = router(torch.ones(1, 1, dtype=torch.bfloat16))
    assert ids.tolist() == [[1]]
    assert weights.dtype == torch.float32


def test_c19b_ties_go_to_the_lowest_ids():
    assert top_k_lowest_id(torch.zeros(1, 8), 2).tolist() == [[0, 1]]
    assert top_k_lowest_id(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), 2).tolist() == [[1, 2]]


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.data())
def test_c19b_any_ties(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    want = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]
    assert top_k_lowest_id(torch.tensor([scores], dtype=torch.float32), k).tolist() == [want]


def test_c19c_counts_do_not_stall():
    router = make_router(2, 1)
    for _ in range(300):  # a bf16 counter stops at 256
        router.count(torch.tensor([1, 0]))
    assert router.tokens_since_update.tolist() == [300, 0]


def test_c19d_small_bias_steps_are_kept():
    router = make_router(2, 1, bias_step=0.001)
    router.expert_bias.fill_(1.0)
    router.count(torch.tensor([0, 1]))
    router.update_bias()
    assert router.expert_bias.tolist() == pytest.approx([1.001, 0.999], abs=1e-7)
    assert router.expert_bias.dtype == torch.float32


def test_c19e_the_overloaded_expert_loses():
    router = make_router(2, 1, bias_step=0.3)
    router.count(torch.tensor([3, 1]))
    assert router.update_bias().tolist() == [3, 1]
    torch.testing.assert_close(router.expert_bias, torch.tensor([-0.3, 0.3]))
    assert router.tokens_since_update.tolist() == [0, 0]
    router.update_bias()  # nothing counted: nothing moves
    torch.testing.assert_close(router.expert_bias, torch.tensor([-0.3, 0.3]))


def test_c12_no_tokens():
    router = make_router(4, 2)
    ids, weights, stats = router(torch.empty(0, 8))
    assert ids.shape == weights.shape == (0, 2)
    assert aux_loss(stats).item() == stats.z_loss.item() == 0
    assert stats.tokens_E.tolist() == [0, 0, 0, 0]
    (aux_loss(stats) + stats.z_loss).backward()
    assert torch.equal(router.weight.grad, torch.zeros_like(router.weight))


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_bias_moves_the_choice_not_the_weights(gate, normalize):
    router = make_router(4, 2, gate=gate, normalize=normalize)
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
    router.expert_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    ids, weights, _ = router.choose(logits)
    assert ids.tolist() == [[3, 0]]
    want = scores[0, [3, 0]]
    want = want / want.sum() if normalize else want
    torch.testing.assert_close(weights[0], want)


def test_losses_against_their_formulas():
    torch.manual_seed(3)
    logits = torch.randn(50, 4, dtype=torch.float64)
    ids, _, stats = make_router(4, 2).choose(logits.float())
    probability = (logits.exp() / logits.exp().sum(1, keepdim=True)).mean(0)
    share = torch.bincount(ids.flatten(), minlength=4).double() / 100
    torch.testing.assert_close(aux_loss(stats).double(), 4 * (share * probability).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        stats.z_loss.double(), (logits.exp().sum(1).log() ** 2).mean(), rtol=1e-5, atol=0
    )


def test_aux_loss_is_1_when_even_and_pulls_towards_it():
    even = torch.eye(4).repeat(8, 1) * 30
    assert aux_loss(make_router(4, 1).choose(even)[2]).item() == pytest.approx(1.0, abs=1e-5)
    logits = torch.zeros(8, 4)
    logits[:, 2] = 1.0
    logits.requires_grad_()
    _, _, stats = make_router(4, 1).choose(logits)
    assert aux_loss(stats).item() > 1
    aux_loss(stats).backward()
    assert (logits.grad[:, 2] > 0).all()  # descent lowers the crowded expert
    assert (logits.grad[:, [0, 1, 3]] < 0).all()


def test_bias_balances_a_skewed_router():
    torch.manual_seed(0)
    router = make_router(8, 2, bias_step=0.01)
    offset = torch.linspace(0, 3, 8)
    counts = []
    for _ in range(300):
        _, _, stats = router.choose(torch.randn(512, 8) + offset)
        router.count(stats.tokens_E)
        counts.append(router.update_bias().float())
    first, last = counts[0], torch.stack(counts[-50:]).mean(0)
    assert first.min() / first.mean() < 0.1
    assert last.min() / last.mean() > 0.9
