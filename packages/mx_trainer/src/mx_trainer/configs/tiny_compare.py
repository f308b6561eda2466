"""What `mx-train compare` runs by default: the tiny model, as long as by itself.

Not shorter: in the first hundred steps, precisions differ by less than seeds do, and the control would pass.
"""

from dataclasses import replace

from mx_trainer.configs.tiny import CONFIG as TINY

CONFIG = replace(TINY, preset="tiny_compare", eval_every=40, save_every=400, sample_tokens=0)
