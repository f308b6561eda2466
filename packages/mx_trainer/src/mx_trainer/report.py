"""Pictures of a run, drawn from its `metrics.jsonl`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mx_trainer.metrics import read_metrics

_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "legend.frameon": False,
}


def series(records: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric."""
    pairs = [(r["step"], r[name]) for r in records if r.get(name) is not None]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.asarray(steps), np.asarray(values, dtype=float)


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average, unbiased at the start, over a fiftieth of the values; up to 50 it changes nothing."""
    weight = 1 - min(1.0, 50 / max(len(values), 1))
    out, total, norm = np.empty_like(values), 0.0, 0.0
    for i, value in enumerate(values):
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out[i] = total / norm
    return out


def min_expert_share(records: list[dict[str, Any]], last_fraction: float = 0.25) -> float:
    """Smallest share of tokens that any expert of any layer got in the last part of the run, as a fraction of 1 / E."""
    load = [np.asarray(r["expert_tokens"], dtype=float) for r in records if "expert_tokens" in r]
    total_LE = np.sum(load[-max(1, int(len(load) * last_fraction)) :], axis=0)
    return float((total_LE / total_LE.mean(axis=1, keepdims=True)).min())


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure without pyplot: no global state, no display."""
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def plot_loss(run_dir: Path, title: str) -> Path:
    """`loss.png`: training loss (raw and smoothed) and validation loss, in nats per token, by step."""
    records = read_metrics(run_dir)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(8, 4.5)
        ax: Axes = axes[0, 0]
        steps, train = series(records, "train_loss")
        ax.plot(steps, train, color="C0", alpha=0.3, linewidth=0.8)
        ax.plot(steps, smooth(train), color="C0", linewidth=1.6, label="train")
        val_steps, val = series(records, "val_loss")
        _, bpb = series(records, "val_bpb")
        label = f"validation: {bpb[-1]:.3f} bits per byte at the end" if len(bpb) else "validation"
        ax.plot(val_steps, val, color="C3", marker="o", markersize=3.5, linewidth=1.4, label=label)
        if len(train) > 1:  # the first steps' fall would flatten the rest
            ax.set_ylim(top=min(ax.get_ylim()[1], float(np.max(train[len(train) // 20 :])) * 1.05))
        ax.set(xlabel="step", ylabel="loss, nats per token", title=title)
        ax.legend()
        return _save(figure, run_dir / "loss.png")


def plot_expert_load(run_dir: Path, title: str) -> Path:
    """`expert_load.png`: for each layer, every expert's tokens over time as a multiple of its fair share."""
    records = [r for r in read_metrics(run_dir) if "expert_tokens" in r]
    steps = np.asarray([r["step"] for r in records])
    load_SLE = np.asarray([r["expert_tokens"] for r in records], dtype=float)
    share_SLE = load_SLE / np.maximum(load_SLE.mean(axis=2, keepdims=True), 1e-9)
    layers = share_SLE.shape[1]
    columns = math.ceil(math.sqrt(layers))
    rows = -(-layers // columns)
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(3.4 * columns + 1, 2.2 * rows + 0.6, rows, columns)
        top = min(4.0, max(2.0, 1.05 * float(share_SLE.max())))
        for layer in range(layers):
            panel = axes[layer // columns, layer % columns]
            _expert_lines(panel, steps, share_SLE[:, layer])
            panel.set(title=f"layer {layer}", ylim=(0, top))
        for spare in range(layers, rows * columns):
            axes[spare // columns, spare % columns].set_axis_off()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.supxlabel("step", fontsize=10)
        figure.supylabel("tokens, as a multiple of the fair share", fontsize=10)
        return _save(figure, run_dir / "expert_load.png")


def _expert_lines(ax: Axes, steps: np.ndarray, share_SE: np.ndarray) -> None:
    experts = share_SE.shape[1]
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.95, experts))
    for e in range(experts):
        ax.plot(steps, share_SE[:, e], color=colours[e], linewidth=0.9)
    ax.axhline(0.25, color="C3", linewidth=0.8, linestyle="--")


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path)
    return path


def plot_comparison(
    curves: Sequence[tuple[str, str, dict[int, list[dict[str, Any]]]]],
    tolerance_percent: float,
    path: Path,
    title: str,
) -> Path:
    """One picture of several precisions: validation loss by step, and the gap to the first of them.

    Args:
        curves: (label, colour, records by seed); the first is the baseline.
        tolerance_percent: half the height of the band of parity.
        path: the PNG to write.
        title: the picture's title.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(11, 4.5, 1, 2)
        left, right = axes[0]
        base = {seed: series(r, "val_loss") for seed, r in curves[0][2].items()}
        for label, colour, runs in curves:
            own = {seed: series(r, "val_loss") for seed, r in runs.items()}
            for steps, values in own.values():
                left.plot(steps, values, color=colour, alpha=0.35, linewidth=0.8)
            steps = next(iter(own.values()))[0]
            mean = np.mean([values for _, values in own.values()], axis=0)
            count = f"{len(own)} seeds" if len(own) > 1 else "1 seed"
            left.plot(steps, mean, color=colour, linewidth=1.8, label=f"{label} ({count})")
            if runs is curves[0][2]:
                continue
            gaps = np.asarray([100 * (own[s][1] / base[s][1] - 1) for s in own if s in base])
            right.fill_between(steps, gaps.min(0), gaps.max(0), color=colour, alpha=0.2, linewidth=0)
            right.plot(steps, gaps.mean(0), color=colour, marker="o", markersize=3, label=label)
        band, label = (
            (-tolerance_percent, tolerance_percent),
            f"parity at the end: ±{tolerance_percent:.2f} %",
        )
        right.axhspan(*band, color="black", alpha=0.08, linewidth=0, label=label)
        right.axhline(0, color="black", linewidth=0.8)
        left.set(xlabel="step", ylabel="validation loss, nats per token", title=title)
        right.set(
            xlabel="step", ylabel="%", title=f"difference to {curves[0][0]}, same seed (mean and range)"
        )
        for ax in (left, right):
            ax.legend()
        return _save(figure, path)
