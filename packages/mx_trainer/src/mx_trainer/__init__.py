"""A small mixture-of-experts GPT trainer with MXFP8 experts.

Read `model.py`, `moe.py` and `trainer.py` first; they are the whole of it. The rest: `config.py` and `configs/` (what a
run is), `data.py`, `optim.py`, `precision.py`, `checkpoint.py`, `metrics.py`, `report.py` (pictures), `sample.py`,
`compare.py` (BF16 against MXFP8), `cli.py` (`mx-train`, `mx-sample`). Several processes: `parallel.py`, `sharding.py`,
`expert_parallel.py`; `run_state.py` and `shards.py` (their checkpoints), `failure.py`, `rendezvous.py` and `restart.py`.
"""
