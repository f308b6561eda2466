"""The model: case C18, causality, and that the precision switch reaches the GEMMs."""

from dataclasses import replace

import pytest
import torch
from mx_trainer.config import RouterConfig, validate
from mx_trainer.configs import load_preset, preset_names
from mx_trainer.metrics import flops_per_token, parameter_counts
from mx_trainer.model import GPT, Rotary
from mx_trainer.precision import resolve_precision

CPU = torch.device("cpu")


def make_model(cfg, precision="fp32", linear="high", **model) -> GPT:
    torch.manual_seed(cfg.seed)
    cfg = replace(cfg, model=replace(cfg.model, vocab=64, **model))
    return GPT(cfg, resolve_precision(precision, linear, "auto", CPU))


def batch(rows: int = 4, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("precision", ["fp32", "mxfp8"])
def test_c18_recomputation_changes_nothing(small, precision):
    results = []
    for recompute in (False, True):
        cfg = replace(small, checkpoint_activations=recompute)
        model = make_model(cfg, precision, dropout=0.1, shared_width=32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.prepare_weights(optimizer)
        log = []
        for _ in range(3):
            model.train()
            out = model(*batch())
            (out.loss + out.aux_loss + out.z_loss).backward()
            counts = [r.tokens_since_update.clone() for r in model.routers()]
            assert all(c.sum() == 4 * 32 * 2 for c in counts)  # T * k, not twice that
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            for router in model.routers():
                router.update_bias()
            log += [
                out.loss,
                out.aux_loss,
                out.z_loss,
                *counts,
                *grads,
                *(r.expert_bias.clone() for r in model.routers()),
            ]
            model.eval()
            with torch.no_grad():
                model(*batch())
            assert all(r.tokens_since_update.sum() == 0 for r in model.routers())  # evaluation adds nothing
        results.append(log)
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_no_look_ahead(small):
    model = make_model(small).eval()
    tokens, _ = batch(1)
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 64
    with torch.no_grad():
        a, b = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(
        a[:, :20], b[:, :20], rtol=1e-5, atol=1e-6
    )  # other groups, other orders of sums
    assert (a[:, 20:] - b[:, 20:]).abs().amax(-1).min() > 1e-3


def test_shorter_context_gives_the_same_logits(small):
    model = make_model(small).eval()
    tokens, _ = batch(1)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits[:, :7], model(tokens[:, :7]).logits, rtol=1e-4, atol=1e-5
        )


def test_rotary_scores_depend_on_distance_only():
    torch.manual_seed(0)
    rotary = Rotary(16, 32)
    q, k = torch.randn(2, 16)
    rotate = lambda v: rotary(v.expand(1, 1, 32, 16))[0, 0]  # noqa: E731
    scores = rotate(q) @ rotate(k).T
    for distance in range(4):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(q).norm(dim=-1), q.norm().expand(32))


def first_losses(cfg, precision, linear="high", steps=3) -> list[float]:
    model = make_model(cfg, precision, linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.prepare_weights(optimizer)
    losses = []
    for _ in range(steps):
        out = model(*batch())
        losses.append(out.loss.item())
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_the_precision_switch_does_something(small):
    losses = {p: first_losses(small, p) for p in ("fp32", "bf16", "mxfp8", "mxfp8_floor", "mxfp4")}
    for step in range(3):
        assert len({run[step] for run in losses.values()}) == len(losses), step
    distance = {p: abs(run[2] - losses["fp32"][2]) for p, run in losses.items()}
    assert distance["bf16"] < distance["mxfp4"]
    assert distance["mxfp8"] < distance["mxfp4"]
    assert distance["mxfp8"] < 0.02 * losses["fp32"][2]


def test_linear_precision_does_something(small):
    assert first_losses(small, "mxfp8", "mxfp8")[0] != first_losses(small, "mxfp8", "high")[0]


def test_bf16_activations(small):
    cfg = replace(small, model=replace(small.model, vocab=64))
    torch.manual_seed(0)
    model = GPT(cfg, resolve_precision("mxfp8", "high", "bfloat16", CPU))
    out = model(*batch())
    out.loss.backward()
    assert out.logits.dtype == out.loss.dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert abs(out.loss.item() - make_model(small)(*batch()).loss.item()) < 0.05


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_overfits_one_batch(small, gate):
    """64 random tokens have no structure: only a model that learns gets below the entropy of guessing."""
    cfg = replace(small, router=RouterConfig(gate=gate))
    model = make_model(cfg, "mxfp8", shared_width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.prepare_weights(optimizer)
    inputs, targets = batch(2, 32)
    for _ in range(60):
        loss = model(inputs, targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.3


def test_every_parameter_gets_a_gradient(small):
    model = make_model(small, "mxfp8", shared_width=32)
    model(*batch()).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert (p.grad != 0).any(), name


def test_seeds(small):
    a, b, c = make_model(small), make_model(small), make_model(replace(small, seed=1))
    for x, y, z in zip(a.parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(x, y)
        assert x.ndim < 2 or not torch.equal(x, z)


@pytest.mark.parametrize("name", preset_names())
def test_presets(name):
    cfg = load_preset(name)
    assert cfg.preset == name
    validate(cfg)
    with torch.device("meta"):
        model = GPT(
            replace(cfg, model=replace(cfg.model, vocab=256)), resolve_precision("mxfp8", "high", "auto", CPU)
        )
    total, active = parameter_counts(model, cfg.model)
    sizes = {"tiny": 1.9e6, "gpu_50m": 53e6, "gpu_125m": 137e6, "gpu_350m": 369e6, "gpu_1b": 1.1e9}
    if name in sizes:
        assert total == pytest.approx(sizes[name], rel=0.05)
    assert active < total
    assert flops_per_token(model, cfg.model) > 5 * active


@pytest.mark.slow
def test_compiled_blocks_train_like_eager_ones(make_trainer, small):
    losses = []
    for compiled in (False, True):
        trainer = make_trainer(small, compile=compiled)
        losses.append([trainer.train_step()[0][0].item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
