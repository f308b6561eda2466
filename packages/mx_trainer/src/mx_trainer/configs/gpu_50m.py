"""53 M parameters, 12 M active: a first run on one GPU."""

from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig

CONFIG = Config(
    preset="gpu_50m",
    model=ModelConfig(layers=10, width=384, heads=6, block=512, experts=16, top_k=2, expert_width=256),
    data=DataConfig(data="site-packages"),
    optim=OptimConfig(steps=2000, batch=64, accumulate=1, lr=2e-3, warmup=100),
    parallel=ParallelConfig(reshard=False),
    compile=True,
    eval_every=100,
    eval_tokens=1 << 20,
    final_eval_tokens=1 << 22,
    save_every=500,
)
