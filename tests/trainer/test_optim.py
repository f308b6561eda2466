import itertools
import math
from dataclasses import replace

import pytest
import torch
from mx_trainer.config import OptimConfig
from mx_trainer.optim import decay_groups, lr_at, make_optimizer, set_lr


def test_cosine():
    cfg = OptimConfig(steps=101, warmup=10, lr=1.0, min_lr=0.1, schedule="cosine")
    lr = [lr_at(s, cfg) for s in range(101)]
    assert lr[:10] == pytest.approx([(s + 1) / 10 for s in range(10)])
    assert lr[10] == pytest.approx(1.0)
    assert lr[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(lr[10:]))


def test_wsd():
    cfg = OptimConfig(steps=101, warmup=10, lr=2.0, min_lr=0.0, schedule="wsd", decay_fraction=0.2)
    lr = [lr_at(s, cfg) for s in range(101)]
    assert set(lr[10:80]) == {2.0}
    assert lr[90] == pytest.approx(1.0)
    assert lr[100] == 0.0
    drops = [a - b for a, b in itertools.pairwise(lr[80:])]
    assert drops == pytest.approx([0.1] * 20)


def test_wsd_without_room_for_both_is_a_triangle():
    cfg = OptimConfig(steps=11, warmup=10, lr=1.0, min_lr=0.0, schedule="wsd", decay_fraction=1.0)
    want = [min((s + 1) / 10, (10 - s) / 11) for s in range(11)]
    assert [lr_at(s, cfg) for s in range(11)] == pytest.approx(want)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_one_step_and_no_warmup(schedule):
    cfg = OptimConfig(steps=1, warmup=0, schedule=schedule)
    assert math.isfinite(lr_at(0, cfg))
    assert lr_at(0, replace(cfg, steps=10)) == cfg.lr


def test_decay_groups(make_trainer, small):
    model = make_trainer(small).model
    decay, no_decay = (set(map(id, group)) for group in decay_groups(model))
    names = dict(model.named_parameters())
    assert len(decay) + len(no_decay) == len(names)
    for name, p in names.items():
        wanted = no_decay if name == "embedding.weight" or name.endswith("gain") else decay
        assert id(p) in wanted, name


def test_decay_shrinks_matrices_only():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.5))
    set_lr(optimizer, 0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name] * (0.95 if name == "1.weight" else 1.0))


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(4, 4)
    model.weight.requires_grad_(False)
    decay, no_decay = decay_groups(model)
    assert decay == []
    assert len(no_decay) == 1
