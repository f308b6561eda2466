"""137 M parameters, 27 M active; one pass over the bytes of the installed packages."""

from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig

CONFIG = Config(
    preset="gpu_125m",
    model=ModelConfig(layers=10, width=512, heads=8, block=1024, experts=32, top_k=4, expert_width=256),
    data=DataConfig(data="site-packages"),
    optim=OptimConfig(steps=1500, batch=64, accumulate=1, lr=1.5e-3, warmup=100),
    parallel=ParallelConfig(reshard=False),
    compile=True,
    eval_every=100,
    eval_tokens=1 << 20,
    final_eval_tokens=1 << 22,
    save_every=500,
)
