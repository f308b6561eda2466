"""A few seconds: to see that everything runs, and for the tests. It learns little."""

from mx_trainer.config import Config, ModelConfig, OptimConfig

CONFIG = Config(
    preset="smoke",
    model=ModelConfig(layers=2, width=64, heads=2, block=64, experts=4, top_k=2, expert_width=64),
    optim=OptimConfig(steps=60, batch=8, warmup=5, lr=4e-3),
    log_every=5,
    eval_every=20,
    eval_tokens=4096,
    final_eval_tokens=16384,
    save_every=20,
    sample_tokens=40,
)
