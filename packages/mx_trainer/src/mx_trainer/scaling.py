"""`torchrun --nproc-per-node N -m mx_trainer scaling`: the same training steps in one process and spread in several ways.

Every layout takes the same steps on the same global batches from the same initial weights, so the losses can be compared, and
the rates are those of strong scaling: N GPUs share the batch that one had. Beside the rates stand what could hold them back:
the host's time for a step, the GPU's, and the rate of the link. A world of one shows what FSDP costs without a link.
"""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from mx_trainer.config import QUANTIZED_DISPATCH, Config, ParallelConfig, validate
from mx_trainer.errors import ConfigError
from mx_trainer.expert_parallel import ParallelExperts
from mx_trainer.launch import create_run_dir, load_corpus_once
from mx_trainer.metrics import PeakMemory
from mx_trainer.parallel import Parallel, join_processes, launched_world
from mx_trainer.profiling import COMMUNICATION, Profile, profile_training
from mx_trainer.report import markdown_table
from mx_trainer.speed import forget
from mx_trainer.trainer import Trainer, resolve_vocab

WARMUP_STEPS = 10
"""Not timed: compilation, first allocations, NCCL's connections."""


@dataclass(frozen=True)
class Scaling:
    """One layout of one precision."""

    layout: str
    processes: int
    tokens_per_s: float
    efficiency: float
    """Tokens/s of one process times the number of processes, of that the fraction reached."""
    peak_memory: int
    """Bytes of the main process's device."""
    first_step_s: float
    """Compilation included."""
    losses: list[float]
    """Nats per token, by step."""
    loss_differences: list[float]
    """Relative, to one process, by step. They grow: training amplifies the last bits in which the sums differ."""
    bytes_per_token: dict[str, float]
    """Handed to all-to-alls by layer and token, forward and backward, by what it was; what stays on its rank included."""
    link_bytes_per_token: float
    """Of these, what went to other ranks."""
    checkpoint_loss: float
    """Validation loss at the end."""
    host_ms: float | None = None
    """Milliseconds until the host has issued a step to a device that has nothing else to do: no step is faster."""
    profile: Profile | None = None
    """Of the main process's next steps."""


def layouts(world: int, precision: str, reshard: bool) -> dict[str, ParallelConfig]:
    """Names of the ways to spread a model over `world` processes, and their configurations."""
    ways = {"FSDP": ParallelConfig(reshard=reshard)}
    if world == 1:
        return ways
    ways["EP"] = ParallelConfig(ep=world, fsdp=False)
    if precision in QUANTIZED_DISPATCH:
        ways["EP, rows in MXFP8"] = replace(ways["EP"], dispatch="mxfp8")
    inner = next(n for n in range(2, world + 1) if world % n == 0)
    ways[f"FSDP × EP, {world // inner}×{inner}"] = ParallelConfig(ep=inner, reshard=reshard)
    ways["EP, padded"] = replace(ways["EP"], padded_dispatch=True)
    return ways


def run_scaling(cfg: Config, precisions: list[str], console: Console) -> dict[str, list[Scaling]]:
    """Train `cfg.optim.steps` steps in every layout; rank 0 prints a table and writes it into a run folder, with a checkpoint
    of FSDP × EP.
    """
    if "RANK" not in os.environ:
        raise ConfigError("mx-train scaling compares several processes: start it with torchrun")
    if cfg.optim.steps <= WARMUP_STEPS:
        raise ConfigError(f"--steps must be above {WARMUP_STEPS} (untimed ones), got {cfg.optim.steps}")
    for precision in precisions:
        for way in layouts(launched_world(), precision, cfg.parallel.reshard).values():
            validate(replace(cfg, precision=precision, parallel=way))
    main = join_processes(replace(cfg, parallel=ParallelConfig()))
    console = console if main.is_main else Console(quiet=True)
    corpus = load_corpus_once(cfg, main)
    cfg = resolve_vocab(cfg, corpus)
    out = main.on_main(lambda: create_run_dir(cfg, "scaling"))
    link = link_rate(main)
    results: dict[str, list[Scaling]] = {}
    for precision in precisions:
        base: Scaling | None = None
        ways = layouts(main.world, precision, cfg.parallel.reshard)
        for layout, way in {"one process": ParallelConfig(), **ways}.items():
            run_cfg = replace(cfg, precision=precision, parallel=way, name=f"{out.name}-{precision}")
            alone = base is None  # every process then trains the same model by itself, on its own device
            parallel = Parallel(main.device) if alone else join_processes(run_cfg)
            with main.device:
                trainer = Trainer(run_cfg, corpus, parallel)
            result = _measure(trainer, layout, base)
            base = base or result
            console.print(
                f"{precision} {layout}: {result.tokens_per_s:,.0f} tokens/s, efficiency {result.efficiency:.2f}, "
                f"first step {result.first_step_s:.1f} s, loss {result.losses[-1]:.4f}",
                highlight=False,
            )
            if way.fsdp and way.ep > 1:
                trainer.save(out / precision)
                if main.is_main:
                    trainer.cfg.save(out / precision / "config.json")
            result = replace(result, host_ms=_host_ms(trainer), profile=profile_training(trainer, 3))
            results.setdefault(precision, []).append(result)
            del trainer
            forget()
            if main.is_main:
                _write(results, link, cfg.tokens_per_step, out)
    if main.is_main:
        console.print(f"{(out / 'scaling.md').read_text()}\ntables {out}", highlight=False, soft_wrap=True)
    dist.destroy_process_group()
    return results


def _measure(trainer: Trainer, layout: str, base: Scaling | None) -> Scaling:
    cfg, parallel, steps = trainer.cfg, trainer.parallel, trainer.cfg.optim.steps
    peak = PeakMemory(trainer.device)
    losses = []
    start = time.perf_counter()
    first = 0.0
    for step in range(steps):
        if step == WARMUP_STEPS:
            losses[-1].item()  # waits for the GPU
            start = time.perf_counter()
        losses.append(trainer.train_step()[0][0])
        if step == 0:
            losses[0].item()
            first = time.perf_counter() - start
    losses[-1].item()
    rate = (steps - WARMUP_STEPS) * cfg.tokens_per_step / (time.perf_counter() - start)
    values = (parallel.sum_(torch.stack(losses)) / parallel.world).tolist()
    experts = [m for m in trainer.model.modules() if isinstance(m, ParallelExperts)]
    handed, sent = (
        _of_all_ranks((getattr(m.traffic, k) for m in experts), parallel) for k in ("handed", "sent")
    )
    per_token = steps * cfg.tokens_per_step * len(experts)
    return Scaling(
        layout=layout,
        processes=parallel.world,
        tokens_per_s=rate,
        efficiency=1.0 if base is None else rate / (base.tokens_per_s * parallel.world),
        peak_memory=peak.read(),
        first_step_s=first,
        losses=values,
        loss_differences=[
            abs(a / b - 1) for a, b in zip(values, base.losses if base else values, strict=True)
        ],
        bytes_per_token={kind: count / per_token for kind, count in handed.items()},
        link_bytes_per_token=sent.total() / per_token if experts else 0.0,
        checkpoint_loss=trainer.evaluate(cfg.eval_tokens).loss,
    )


def _host_ms(trainer: Trainer) -> float:
    """Of a step that is issued to an idle device; the median of five."""
    issued = []
    for _ in range(5):
        trainer.parallel.barrier()
        start = time.perf_counter()
        trainer.train_step()
        issued.append(time.perf_counter() - start)
    return 1e3 * statistics.median(issued)


def link_rate(parallel: Parallel) -> float:
    """Bytes a second that an all-gather brings to each rank from the others: 256 MiB a rank between GPUs, 4 between CPUs.

    0 in a world of one.
    """
    size = (256 if parallel.device.type == "cuda" else 4) << 20
    mine = torch.zeros(size, dtype=torch.uint8, device=parallel.device)
    whole = mine.new_empty(parallel.world * size)
    seconds = []
    for _ in range(2 + 5):  # two to set up the connections
        parallel.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, mine)
        whole[-1].item()
        seconds.append(time.perf_counter() - start)
    return (parallel.world - 1) * size / statistics.median(seconds[2:])


def _of_all_ranks(counters: Iterable[Counter[str]], parallel: Parallel) -> Counter[str]:
    total = sum(counters, Counter())
    counts = parallel.sum_(torch.tensor(list(total.values()), device=parallel.device))
    return Counter(dict(zip(total, counts.tolist(), strict=True)))


def _write(results: dict[str, list[Scaling]], link: float, tokens_per_step: int, out: Path) -> None:
    by_precision = {precision: [asdict(r) for r in rows] for precision, rows in results.items()}
    (out / "scaling.json").write_text(
        json.dumps({"link_bytes_per_s": link, "precisions": by_precision}, indent=2) + "\n"
    )
    head = ["experts", "layout", "tokens/s", "efficiency", "ms a step", "host", "GPU busy", "of it communication",
            "peak memory", "last loss", "loss differs by (step 1, 3, 10, last)", "all-to-all bytes per token and layer",
            "of these over the link", "validation loss"]  # fmt: skip
    rows = [
        [
            precision,
            r.layout,
            f"{r.tokens_per_s:,.0f}",
            f"{r.efficiency:.2f}",
            *(f"{t:.1f}" for t in _milliseconds(r, tokens_per_step)),
            f"{r.peak_memory / 2**30:.1f} GiB",
            f"{r.losses[-1]:.5f}",
            ", ".join(f"{r.loss_differences[i]:.0e}" for i in (0, 2, 9, -1)),
            f"{sum(r.bytes_per_token.values()):,.0f}",
            f"{r.link_bytes_per_token:,.0f}",
            f"{r.checkpoint_loss:.6f}",
        ]
        for precision, precision_results in results.items()
        for r in precision_results
    ]
    rate = f"An all-gather brings {link / 1e9:.1f} GB/s to each process.\n\n" if link else ""
    (out / "scaling.md").write_text(f"{rate}{markdown_table(head, rows)}\n")


def _milliseconds(r: Scaling, tokens_per_step: int) -> tuple[float, ...]:
    """Of a step: all of it, the host's, the GPU's (on a CPU, the operators'), and what of that is communication."""
    assert r.profile is not None
    assert r.host_ms is not None
    communication = r.profile.parts.get(COMMUNICATION, 0.0)
    return 1e3 * tokens_per_step / r.tokens_per_s, r.host_ms, r.profile.busy, communication
