"""`mx-train compare`: the same model, data and seeds in several precisions, judged against the spread between seeds."""

import gc
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mx_kernels import RECIPES
from rich.console import Console
from rich.table import Table

from mx_trainer import report
from mx_trainer.checkpoint import find_checkpoint
from mx_trainer.config import Config
from mx_trainer.data import load_corpus
from mx_trainer.errors import CheckpointError, ConfigError
from mx_trainer.faults import fault_of
from mx_trainer.launch import create_run_dir, train_into
from mx_trainer.metrics import PeakMemory, read_metrics
from mx_trainer.precision import resolve_device
from mx_trainer.quant_error import KINDS, KindError, measure_quantization
from mx_trainer.summary import load_summary, summarise
from mx_trainer.trainer import Trainer, check_data, resolve_vocab

PARITY_PERCENT = 0.5
_COLOURS = ("black", "C0", "C3", "C1", "C2", "C4", "C5")
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Roles:
    """Which precision is what; others in a comparison are shown and not judged."""

    baseline: str
    candidate: str
    control: str = ""
    """Empty: none."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.baseline, self.candidate, self.control) if name]


@dataclass(frozen=True)
class PrecisionResult:
    """What one precision came to, over its seeds. Losses in nats per token."""

    precision: str
    final_loss: dict[int, float]
    """By seed."""
    mean: float
    spread: float | None
    """Sample standard deviation over the seeds; None for a single one."""
    difference_percent: float
    """Of the mean to the baseline's, over the seeds that both have."""
    by_seed_percent: list[float]
    """The same for each of those seeds: from the same initial weights, on the same batches."""
    largest_gap_percent: float
    """Largest absolute difference of the mean validation curves after warm-up."""
    tokens_per_s: float
    """Median over the runs."""
    peak_memory: int
    """Bytes, the largest of the runs."""
    parity: bool
    """Whether |difference| is within the tolerance."""


@dataclass(frozen=True)
class Comparison:
    """The outcome, as `results.json` holds it."""

    roles: Roles
    results: dict[str, PrecisionResult]
    """By precision, the baseline first."""
    tolerance_percent: float
    """max(0.5 %, twice the baseline's spread)."""
    quantization: dict[str, KindError]
    """Of the candidate's recipe on the baseline's trained model."""
    run_dir: Path

    @property
    def candidate(self) -> PrecisionResult:
        return self.results[self.roles.candidate]

    @property
    def control(self) -> PrecisionResult | None:
        return self.results.get(self.roles.control)

    @property
    def control_fails(self) -> bool:
        """The control, if there is one, is worse by more than the tolerance."""
        return self.control is None or self.control.difference_percent > self.tolerance_percent

    @property
    def as_expected(self) -> bool:
        """The candidate is at parity, and the control is visibly worse."""
        return self.candidate.parity and self.control_fails


def run_comparison(cfg: Config, roles: Roles, seeds: int, console: Console) -> Comparison:
    """Train every precision from every seed; seeds outside, so that a slow machine slows all precisions alike."""
    corpus = load_corpus(cfg.data)
    cfg = resolve_vocab(cfg, corpus)
    check_data(cfg, corpus)
    resolve_device(cfg.device)
    out = create_run_dir(cfg, "compare")
    run_dirs = []
    for seed in range(cfg.seed, cfg.seed + seeds):
        for precision in roles.names:
            run_dirs.append(out / f"{precision}-seed{seed}")
            run_dirs[-1].mkdir()
            run_cfg = replace(
                cfg, precision=precision, seed=seed, name=run_dirs[-1].name, out=str(out), sample_tokens=0
            )
            console.rule(run_dirs[-1].name)
            gc.collect()
            trainer = Trainer(run_cfg, corpus)
            peak = PeakMemory(trainer.device)
            result = train_into(run_dirs[-1], trainer, console)
            if result.evaluation is None:
                raise KeyboardInterrupt
            summarise(run_dirs[-1], trainer, result.evaluation, peak.read())
            del trainer
    return compare_runs(run_dirs, roles, lambda: out, console)


def compare_runs(
    run_dirs: Sequence[Path], roles: Roles, out: Callable[[], Path], console: Console
) -> Comparison:
    """Judge finished runs; pictures and tables go to the folder that `out` gives once the runs are known to fit.

    Raises:
        ConfigError: unless all are finished and differ in precision and seed only.
    """
    runs: dict[str, dict[int, Path]] = {name: {} for name in roles.names}
    configs = {run_dir: Config.load(run_dir / "config.json") for run_dir in run_dirs}
    _refuse_others(configs)
    for run_dir, cfg in configs.items():
        runs.setdefault(cfg.precision, {})[cfg.seed] = run_dir
    for name in roles.names:
        if not runs[name]:
            raise ConfigError(f"no run of {name} among {', '.join(map(str, run_dirs))}")
    if len(runs[roles.baseline]) < 2:
        raise ConfigError(f"at least 2 seeds of {roles.baseline} are needed, to have a spread, got 1")
    cfg = configs[runs[roles.baseline][min(runs[roles.baseline])]]
    records = {p: {seed: read_metrics(d) for seed, d in by_seed.items()} for p, by_seed in runs.items()}
    memory = {p: max(load_summary(d).peak_memory for d in by_seed.values()) for p, by_seed in runs.items()}
    results, tolerance = judge(records, memory, roles.baseline, warmup=cfg.optim.warmup)
    quantization = _quantization(runs[roles.baseline][min(runs[roles.baseline])], cfg, roles.candidate)
    comparison = Comparison(roles, results, tolerance, quantization, out())
    _write(comparison, records, cfg, console)
    return comparison


def _refuse_others(configs: dict[Path, Config]) -> None:
    """Runs that are not finished, or that differ in more than precision and seed."""

    def rest(cfg: Config) -> dict[str, Any]:
        free = {"precision": "", "seed": 0, "name": "", "out": "", "device": "", "profile_steps": 0}
        return replace(cfg, **free, sample_tokens=0).to_dict()

    first, *others = configs
    for run_dir in configs:
        if not (run_dir / "summary.json").exists():
            raise ConfigError(f"{run_dir} is not finished (it has no summary.json)")
    for other in others:
        a, b = rest(configs[first]), rest(configs[other])
        unlike = [name for name in a if a[name] != b[name]]
        if unlike:
            raise ConfigError(
                f"{first} and {other} differ in more than precision and seed: {unlike[0]} is {a[unlike[0]]} and "
                f"{b[unlike[0]]}"
            )


def judge(
    records: dict[str, dict[int, Records]], memory: dict[str, int], baseline: str, warmup: int
) -> tuple[dict[str, PrecisionResult], float]:
    """Results of each precision, from its records by seed, and the tolerance in percent."""
    curves = {
        p: {seed: report.series(r, "val_loss") for seed, r in runs.items()} for p, runs in records.items()
    }
    final = {p: {seed: float(values[-1]) for seed, (_, values) in c.items()} for p, c in curves.items()}
    base, base_curves = final[baseline], curves[baseline]
    spread = statistics.stdev(base.values())
    tolerance = max(PARITY_PERCENT, 2 * 100 * spread / statistics.mean(base.values()))
    results = {}
    for precision, runs in records.items():
        seeds = sorted(base.keys() & final[precision].keys())
        if not seeds:
            raise ConfigError(f"{precision} has no seed in common with {baseline}")
        steps = base_curves[seeds[0]][0]
        mean_curve, base_curve = (
            _mean(c[seed][1] for seed in seeds) for c in (curves[precision], base_curves)
        )
        gaps = 100 * np.abs(mean_curve / base_curve - 1)[steps > warmup]
        difference = 100 * (_mean(final[precision][s] for s in seeds) / _mean(base[s] for s in seeds) - 1)
        losses = final[precision]
        rates = [r["tokens_per_s"] for run in runs.values() for r in run if "tokens_per_s" in r]
        results[precision] = PrecisionResult(
            precision=precision,
            final_loss=losses,
            mean=statistics.mean(losses.values()),
            spread=statistics.stdev(losses.values()) if len(losses) > 1 else None,
            difference_percent=float(difference),
            by_seed_percent=[100 * (losses[seed] / base[seed] - 1) for seed in seeds],
            largest_gap_percent=float(gaps.max(initial=0.0)),
            tokens_per_s=statistics.median(rates),
            peak_memory=memory[precision],
            parity=bool(abs(difference) <= tolerance),
        )
    return results, tolerance


def _mean(values: Iterable[Any]) -> Any:
    return np.mean(list(values), axis=0)


def _quantization(run_dir: Path, cfg: Config, precision: str) -> dict[str, KindError]:
    """Errors of a recipe on the trained model of a run and the batch that would have come next; without a checkpoint, none."""
    recipe = RECIPES.get(precision)
    if recipe is None or recipe.format is None or cfg.model.expert_kernels != "mx":
        return {}
    try:
        checkpoint = find_checkpoint(run_dir)
    except CheckpointError:
        return {}
    trainer = Trainer(replace(cfg, compile=False), load_corpus(cfg.data))  # compiled blocks take no hooks
    trainer.resume(checkpoint)
    tokens, targets = trainer.sampler.next_batch(cfg.optim.batch, trainer.device)
    with fault_of(cfg.precision):
        return measure_quantization(trainer.model, tokens, targets, recipe)


# --- what is written --------------------------------------------------------------------------------------------------


def _write(c: Comparison, records: dict[str, dict[int, Records]], cfg: Config, console: Console) -> None:
    outcome = {
        "roles": asdict(c.roles),
        "results": {name: asdict(r) for name, r in c.results.items()},
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
        "seed by seed",
        "largest gap",
        "tokens/s",
        "peak memory",
        "parity",
    ]
    rows = []
    for r in c.results.values():
        versus = [
            f"{r.difference_percent:+.2f} %",
            ", ".join(f"{d:+.2f}" for d in r.by_seed_percent),
            f"{r.largest_gap_percent:.2f} %",
        ]
        is_base = r.precision == c.roles.baseline
        rows.append(
            [
                r.precision,
                f"{r.mean:.4f}",
                "" if r.spread is None else f"{r.spread:.4f}",
                *(["", "", ""] if is_base else versus),
                f"{r.tokens_per_s:,.0f}",
                f"{r.peak_memory / 2**20:,.0f} MiB",
                "baseline" if is_base else "yes" if r.parity else "no",
            ]
        )
    seeds = sorted({seed for r in c.results.values() for seed in r.final_loss})
    return f"nats per token, seeds {', '.join(map(str, seeds))}", head, rows


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
    return f"quantisation error of {c.roles.candidate}", head, rows


def _markdown(caption: str, head: list[str], rows: list[list[str]]) -> str:
    return f"{caption}:\n\n{report.markdown_table(head, rows)}"


def _verdict(c: Comparison) -> str:
    r = c.candidate
    text = (
        f"{r.precision} is {'at' if r.parity else 'NOT at'} parity with {c.roles.baseline}: "
        f"{r.difference_percent:+.2f} %, tolerance {c.tolerance_percent:.2f} % "
        f"(the larger of {PARITY_PERCENT} % and twice the spread over seeds)."
    )
    if c.control is not None:
        how = "fails, as it must" if c.control_fails else "does NOT fail: the test is too weak"
        text += f" The control {c.control.precision} {how}: {c.control.difference_percent:+.2f} %."
    return text
