"""369 M parameters, 71 M active."""

from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig

CONFIG = Config(
    preset="gpu_350m",
    model=ModelConfig(layers=12, width=768, heads=12, block=1024, experts=32, top_k=4, expert_width=384),
    data=DataConfig(data="site-packages"),
    optim=OptimConfig(steps=1500, batch=64, accumulate=1, lr=1e-3, warmup=150),
    parallel=ParallelConfig(reshard=False),
    compile=True,
    eval_every=100,
    eval_tokens=1 << 20,
    final_eval_tokens=1 << 22,
    save_every=500,
)
