"""What `mx-train compare` runs by default: the tiny model for fewer steps, validated more often."""

from dataclasses import replace

from mx_trainer.config import OptimConfig
from mx_trainer.configs.tiny import CONFIG as TINY

CONFIG = replace(
    TINY,
    preset="tiny_compare",
    optim=OptimConfig(steps=300, warmup=30),
    eval_every=25,
    save_every=300,
    sample_tokens=0,
)
