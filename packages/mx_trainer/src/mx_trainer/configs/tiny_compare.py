"""What `mx-train compare` runs by default: the tiny model for fewer steps, validated more often."""

from dataclasses import replace

from mx_trainer.config import OptimConfig
from mx_trainer.configs.tiny import CONFIG as TINY

CONFIG = replace(
    TINY,
    preset="tiny_compare",
    optim=OptimConfig(steps=200, warmup=20),
    eval_every=20,
    save_every=200,
    sample_tokens=0,
)
