"""What `mx-train compare` runs by default: the tiny model on short blocks.

In 64 tokens there is little to copy, so the loss does not fall in sudden steps whose time differs between seeds: the spread
over seeds is a quarter of that with blocks of 256, and a fault in the arithmetic shows.
"""

from dataclasses import replace

from mx_trainer.configs.tiny import CONFIG as TINY

CONFIG = replace(
    TINY,
    preset="tiny_compare",
    model=replace(TINY.model, block=64),
    optim=replace(TINY.optim, batch=32, steps=300),
    eval_every=50,
    save_every=300,
    sample_tokens=0,
)
