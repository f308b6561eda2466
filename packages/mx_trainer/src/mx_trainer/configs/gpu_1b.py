"""1.1 B parameters, 192 M active."""

from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig

CONFIG = Config(
    preset="gpu_1b",
    model=ModelConfig(layers=14, width=1024, heads=16, block=1024, experts=64, top_k=8, expert_width=384),
    data=DataConfig(data="site-packages"),
    optim=OptimConfig(steps=1500, batch=32, accumulate=2, lr=8e-4, warmup=200),
    parallel=ParallelConfig(reshard=False),
    compile=True,
    eval_every=100,
    eval_tokens=1 << 20,
    final_eval_tokens=1 << 22,
    save_every=500,
)
