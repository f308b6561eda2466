"""`mx-train compare`: the same model, data and seeds in several precisions, judged against the spread between seeds."""

import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mx_kernels import RECIPES
from rich.console import Console
from rich.table import Table

from mx_trainer import report
from mx_trainer.config import Config
from mx_trainer.data import load_corpus
from mx_trainer.launch import create_run_dir, train_into
from mx_trainer.metrics import PeakMemory, read_metrics
from mx_trainer.precision import resolve_device
from mx_trainer.quant_error import KINDS, KindError, measure_quantization
from mx_trainer.trainer import Trainer, check_data, resolve_vocab

PARITY_PERCENT = 0.5
_COLOURS = ("black", "C0", "C3", "C1", "C2")


@dataclass(frozen=True)
class PrecisionResult:
    """What one precision came to, over all seeds. Losses in nats per token."""

    precision: str
    final_loss: list[float]
    """One per seed."""
    mean: float
    spread: float
    """Sample standard deviation over the seeds."""
    difference_percent: float
    """Of the mean to the baseline's."""
    largest_gap_percent: float
    """Largest absolute difference of the mean validation curves after warm-up."""
    tokens_per_s: float
    """Median over the runs' log records."""
    peak_memory: int
    """Bytes, the largest of the seeds."""
    parity: bool
    """Whether |difference| is within the tolerance."""


@dataclass(frozen=True)
class Comparison:
    """The outcome, as `results.json` holds it."""

    results: list[PrecisionResult]
    """Baseline, candidate, and, if there is one, the control."""
    tolerance_percent: float
    """max(0.5 %, twice the baseline's spread)."""
    quantization: dict[str, KindError]
    """Of the candidate's recipe on the first baseline model."""
    run_dir: Path

    @property
    def as_expected(self) -> bool:
        """The candidate is at parity, and the control (if there is one) is visibly worse."""
        control_fails = all(
            not r.parity and r.difference_percent > self.tolerance_percent for r in self.results[2:]
        )
        return self.results[1].parity and control_fails


def run_comparison(cfg: Config, precisions: list[str], seeds: int, console: Console) -> Comparison:
    """Train every precision from every seed; seeds outside, so that a slow machine slows all precisions alike."""
    corpus = load_corpus(cfg.data)
    cfg = resolve_vocab(cfg, corpus)
    check_data(cfg, corpus)
    resolve_device(cfg.device)
    out = create_run_dir(replace(cfg, name=cfg.name or f"compare-{time.strftime('%Y%m%d-%H%M%S')}"))
    records: dict[str, list[list[dict[str, Any]]]] = {p: [] for p in precisions}
    memory = dict.fromkeys(precisions, 0)
    quantization: dict[str, KindError] = {}
    for seed in range(cfg.seed, cfg.seed + seeds):
        for precision in precisions:
            run_dir = out / f"{precision}-seed{seed}"
            run_dir.mkdir()
            run_cfg = replace(cfg, precision=precision, seed=seed, name=run_dir.name, out=str(out))
            console.rule(run_dir.name)
            gc.collect()
            trainer = Trainer(run_cfg, corpus)
            peak = PeakMemory(trainer.device)
            result = train_into(run_dir, trainer, console)
            if not result.finished:
                raise KeyboardInterrupt
            memory[precision] = max(memory[precision], peak.read())
            records[precision].append(read_metrics(run_dir))
            if not quantization and precision == precisions[0]:
                quantization = _quantization(trainer, precisions[1])
    results, tolerance = judge(records, memory, warmup=cfg.optim.warmup)
    comparison = Comparison(results, tolerance, quantization, out)
    _write(comparison, records, cfg, console)
    return comparison


def judge(
    records: dict[str, list[list[dict[str, Any]]]], memory: dict[str, int], warmup: int
) -> tuple[list[PrecisionResult], float]:
    """Results of each precision, the first being the baseline, and the tolerance in percent."""
    curves = {p: [report.series(r, "val_loss") for r in runs] for p, runs in records.items()}
    final = {p: [float(values[-1]) for _, values in c] for p, c in curves.items()}
    base_name = next(iter(records))
    base = statistics.mean(final[base_name])
    tolerance = max(PARITY_PERCENT, 2 * 100 * statistics.stdev(final[base_name]) / base)
    steps = curves[base_name][0][0]
    base_curve = np.mean([values for _, values in curves[base_name]], axis=0)
    results = []
    for precision, runs in records.items():
        curve = np.mean([values for _, values in curves[precision]], axis=0)
        gaps = 100 * np.abs(curve / base_curve - 1)[steps > warmup]
        difference = 100 * (statistics.mean(final[precision]) / base - 1)
        rates = [r["tokens_per_s"] for run in runs for r in run if "tokens_per_s" in r]
        results.append(
            PrecisionResult(
                precision=precision,
                final_loss=final[precision],
                mean=statistics.mean(final[precision]),
                spread=statistics.stdev(final[precision]),
                difference_percent=difference,
                largest_gap_percent=float(gaps.max(initial=0.0)),
                tokens_per_s=statistics.median(rates),
                peak_memory=memory[precision],
                parity=abs(difference) <= tolerance,
            )
        )
    return results, tolerance


def _quantization(trainer: Trainer, precision: str) -> dict[str, KindError]:
    recipe = RECIPES.get(precision)
    if recipe is None or recipe.format is None:
        return {}
    tokens, targets = trainer.sampler.next_batch(trainer.cfg.optim.batch, trainer.device)
    return measure_quantization(trainer.model, tokens, targets, recipe)


# --- what is written --------------------------------------------------------------------------------------------------


def _write(
    c: Comparison, records: dict[str, list[list[dict[str, Any]]]], cfg: Config, console: Console
) -> None:
    outcome = {
        "results": [asdict(r) for r in c.results],
        "tolerance_percent": c.tolerance_percent,
        "as_expected": c.as_expected,
        "quantization": {kind: asdict(error) for kind, error in c.quantization.items()},
        "config": cfg.to_dict(),
        "torch": torch.__version__,
    }
    (c.run_dir / "results.json").write_text(json.dumps(outcome, indent=2) + "\n")
    curves = [(p, _COLOURS[i % len(_COLOURS)], runs) for i, (p, runs) in enumerate(records.items())]
    title = f"{cfg.preset}, {cfg.optim.steps} steps of {cfg.tokens_per_step:,} tokens"
    picture = report.plot_comparison(curves, c.tolerance_percent, c.run_dir / "comparison.png", title)
    tables = [_loss_table(c), _quantization_table(c)] if c.quantization else [_loss_table(c)]
    verdict = _verdict(c)
    text = "\n\n".join([f"# {c.run_dir.name}", title, *(_markdown(*t) for t in tables), verdict])
    (c.run_dir / "comparison.md").write_text(text + "\n")
    console.rule("comparison")
    for caption, head, rows in tables:
        table = Table(*head, title=caption, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(verdict, highlight=False)
    console.print(
        f"picture {picture}\ntable   {c.run_dir / 'comparison.md'}", highlight=False, soft_wrap=True
    )


TableData = tuple[str, list[str], list[list[str]]]


def _loss_table(c: Comparison) -> TableData:
    head = [
        "precision",
        "final val loss",
        "± seeds",
        "difference",
        "largest gap",
        "tokens/s",
        "peak memory",
        "parity",
    ]
    rows = [
        [
            r.precision,
            f"{r.mean:.4f}",
            f"{r.spread:.4f}",
            "" if r is c.results[0] else f"{r.difference_percent:+.2f} %",
            "" if r is c.results[0] else f"{r.largest_gap_percent:.2f} %",
            f"{r.tokens_per_s:,.0f}",
            f"{r.peak_memory / 2**20:,.0f} MiB",
            "baseline" if r is c.results[0] else "yes" if r.parity else "no",
        ]
        for r in c.results
    ]
    return f"nats per token, mean of {len(c.results[0].final_loss)} seeds", head, rows


def _quantization_table(c: Comparison) -> TableData:
    head = ["tensor", "SQNR rows", "SQNR columns", "to zero", "saturated"]
    rows = [
        [
            f"{kind}: {KINDS[kind]}",
            f"{e.row.sqnr_db:.1f} dB",
            f"{e.column.sqnr_db:.1f} dB",
            f"{100 * max(e.row.underflow, e.column.underflow):.3f} %",
            f"{100 * max(e.row.saturation, e.column.saturation):.3f} %",
        ]
        for kind, e in c.quantization.items()
    ]
    return f"quantisation error of {c.results[1].precision}", head, rows


def _markdown(caption: str, head: list[str], rows: list[list[str]]) -> str:
    return f"{caption}:\n\n{report.markdown_table(head, rows)}"


def _verdict(c: Comparison) -> str:
    base, candidate, *controls = c.results
    text = (
        f"{candidate.precision} is {'at' if candidate.parity else 'NOT at'} parity with {base.precision}: "
        f"{candidate.difference_percent:+.2f} %, tolerance {c.tolerance_percent:.2f} % "
        f"(the larger of {PARITY_PERCENT} % and twice the spread over seeds)."
    )
    for r in controls:
        fails = not r.parity and r.difference_percent > 0
        text += (
            f" The control {r.precision} {'fails, as it must' if fails else 'does NOT fail: the test is too weak'}: "
            f"{r.difference_percent:+.2f} %."
        )
    return text
