"""The pictures of docs/block_scaling.md, drawn from mx_core: `uv run python tools/docs/block_scaling.py [FOLDER]`."""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from mx_bench.project.layer import GroupedGemm
from mx_bench.project.machines import B200
from mx_bench.project.model import gemm_estimate, pass_seconds
from mx_core import (
    FORMATS,
    MXFP8_E4M3,
    ScaleRounding,
    amax_to_e8m0,
    decode,
    dequantize,
    e8m0_to_float,
    encode,
    quantize,
)
from mx_core.scale_layout import blocked_offset
from torch import Tensor

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

FOLDER = Path(__file__).parents[2] / "docs" / "images"
BLUE, LIGHT, ORANGE, GREY, RED = "#1f5fa8", "#7fb0e6", "#e0a458", "#b9bec6", "#b3372f"
BLOCK = 32


def save(figure: plt.Figure, folder: Path, name: str) -> None:
    """Write one picture and say so."""
    path = folder / f"block_scaling_{name}.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(f"wrote {path}")


def tidy(axes: Axes, title: str, x: str = "", y: str = "") -> None:
    """Title to the left, no frame above and on the right."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def with_tensor_scale(x: Tensor) -> Tensor:
    """E4M3 with one scale for all of x, the largest value at 448: what MX is compared with."""
    scale = x.abs().max() / MXFP8_E4M3.max_value
    return decode(encode(x / scale, MXFP8_E4M3), MXFP8_E4M3) * scale


def blocks(folder: Path) -> None:
    """Four blocks with an outlier in one: values, scales, and the error of a block scale and of a tensor scale."""
    x = torch.randn(1, 4 * BLOCK, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [1.0, 0.05, 1.0, 0.002]
    ).repeat_interleave(BLOCK)
    x[0, 70] = 300.0
    mx = quantize(x, MXFP8_E4M3)
    scales = e8m0_to_float(mx.scale)[0]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 5.4), sharex=True, layout="constrained")
    at = range(4 * BLOCK)
    top.bar(at, x[0].abs().tolist(), color=BLUE, width=0.8)
    for b, scale in enumerate(scales.tolist()):
        top.hlines(scale * 448, b * BLOCK - 0.5, (b + 1) * BLOCK - 0.5, color=ORANGE, linewidth=2)
        label = f"scale byte {int(mx.scale[0, b])}: 2^{int(mx.scale[0, b]) - 127}"
        top.text(b * BLOCK, scale * 448 * 1.4, label, fontsize=8, color=ORANGE)
    top.set(yscale="log", ylim=(1e-6, 3e3))
    tidy(top, "|x|, and 448 times each block's scale: the largest value that its codes can hold", y="|x|")
    for restored, color, label in (
        (with_tensor_scale(x), GREY, "one scale for the tensor"),
        (dequantize(mx), BLUE, "a scale for every 32"),
    ):
        error = ((restored - x).abs() / x.abs())[0]
        bottom.plot(at, error.clamp(min=1e-4).tolist(), ".", color=color, label=label, markersize=5)
    bottom.set(yscale="log", ylim=(1e-4, 2))
    bottom.axhline(2**-4, color="#444", linewidth=0.7, linestyle="--")
    bottom.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(bottom, "relative error; dashed: 2^-4, half a unit of E4M3's last place", "element", "error")
    for axes in (top, bottom):
        for b in range(1, 4):
            axes.axvline(b * BLOCK - 0.5, color="#00000030", linewidth=0.8)
    save(figure, folder, "block")


def rules(folder: Path) -> None:
    """Where each rule puts a block's maximum, over two octaves."""
    amax = torch.exp2(torch.linspace(0, 2, 1025))[:-1]
    figure, panels = plt.subplots(1, 4, figsize=(11, 2.9), sharey=True, layout="constrained")
    for axes, rule in zip(panels, ScaleRounding, strict=True):
        code = amax / e8m0_to_float(amax_to_e8m0(amax, MXFP8_E4M3, rule))
        axes.fill_between(amax.numpy(), 448, code.clamp(min=448).numpy(), color=RED, alpha=0.35, linewidth=0)
        axes.plot(amax.numpy(), code.numpy(), color=BLUE, linewidth=1.5)
        axes.axhline(448, color="#444", linewidth=0.8, linestyle="--")
        axes.set(ylim=(100, 530), xlim=(1, 4))
        saturated = (code > 448).float().mean().item()
        tidy(axes, f"{rule.name}: {saturated:.0%} saturate", "block maximum")
    panels[0].set_ylabel("maximum / scale (codes end at 448)", fontsize=9)
    save(figure, folder, "rules")


DISTRIBUTIONS = {
    "normal": lambda g: torch.randn(256, 1024, generator=g),
    "heavy-tailed (Student t, 3)": lambda g: (
        torch.randn(256, 1024, generator=g)
        / (torch.randn(256, 1024, 3, generator=g).square().mean(-1).sqrt())
    ),
    "outlier channels (1 % × 100)": lambda g: (
        torch.randn(256, 1024, generator=g) * torch.where(torch.rand(1024, generator=g) < 0.01, 100.0, 1.0)
    ),
    "rows of many sizes (log-normal, 3)": lambda g: (
        torch.randn(256, 1024, generator=g) * torch.exp(3 * torch.randn(256, 1, generator=g))
    ),
}


def errors(folder: Path) -> None:
    """Relative error by size within the block, and the noise of whole tensors by format."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.9), layout="constrained")
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    restored = dequantize(quantize(x, MXFP8_E4M3))
    amax = x.view(1024, -1, BLOCK).abs().amax(-1).repeat_interleave(BLOCK, 1)
    octave = torch.log2(amax / x.abs()).floor().clamp(max=20).long()
    edges = range(21)
    relative = [((restored - x).abs() / x.abs())[octave == o].mean().item() for o in edges]
    share = [(octave == o).float().mean().item() for o in edges]
    left.bar(edges, relative, color=BLUE, width=0.8, label="mean relative error")
    left.plot(
        edges,
        share,
        "o-",
        color=ORANGE,
        markersize=4,
        linewidth=1,
        label="share of the elements (normal data)",
    )
    left.set(yscale="log", ylim=(1e-6, 30), xticks=range(0, 21, 2))
    left.legend(frameon=False, fontsize=8, loc="upper left")
    tidy(
        left,
        "E4M3: constant for 14 octaves under the block's maximum, then underflow",
        "octaves below the block's maximum",
    )

    def row_sqnr(x: Tensor, restored: Tensor) -> float:
        """Mean over rows of signal over noise, dB; a row that became zeros has 0."""
        return (10 * torch.log10(x.square().sum(1) / (x - restored).square().sum(1))).mean().item()

    contestants = {
        **{name: lambda x, f=f: dequantize(quantize(x, f)) for name, f in FORMATS.items()},
        "E4M3, one scale": with_tensor_scale,
    }
    width = 0.8 / len(contestants)
    colors = [*(plt.get_cmap("viridis")(j / len(FORMATS)) for j in range(len(FORMATS))), GREY]
    for i, make in enumerate(DISTRIBUTIONS.values()):
        x = make(torch.Generator().manual_seed(1))
        for j, (name, restore) in enumerate(contestants.items()):
            at = i + (j - len(FORMATS) / 2) * width
            right.bar(at, row_sqnr(x, restore(x)), width, color=colors[j], label=name if i == 0 else None)
    right.set_xticks(range(len(DISTRIBUTIONS)), [name.replace(" (", "\n(") for name in DISTRIBUTIONS])
    right.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    right.set_ylim(0, 50)
    tidy(right, "signal over noise of a row, dB, mean over the rows (RCEIL)")
    save(figure, folder, "error")


def orientations(folder: Path) -> None:
    """The two quantised copies of a matrix, and the order of the bytes in one tile of blocked scales."""
    figure, (row, column, tile) = plt.subplots(
        1, 3, figsize=(11, 3.7), layout="constrained", width_ratios=(1, 1, 1.1)
    )
    for axes, (width, height), title in (
        (row, (32, 1), "row copy: blocks along K"),
        (column, (1, 32), "column copy: blocks along M"),
    ):
        for i in range(64 // height):
            for j in range(64 // width):
                shade = (i + j) % 2 * 0.35 + 0.35
                axes.add_patch(Rectangle((j * width, i * height), width, height, facecolor=BLUE, alpha=shade))
        axes.set(xlim=(0, 64), ylim=(64, 0), aspect="equal", xticks=(0, 32, 64), yticks=(0, 32, 64))
        tidy(axes, title, "K", "M")
    offsets = torch.tensor([[blocked_offset(r, c, 4) for c in range(4)] for r in range(128)])
    picture = tile.imshow(offsets.numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
    for r in (0, 32, 64, 96):
        first, last = (f"{offsets[row, 0]} to {offsets[row, 3]}" for row in (r, r + 31))
        text = f"row {r}: bytes {first}, row {r + 31}: {last}"
        tile.text(1.5, r + 5, text, ha="center", va="center", fontsize=7, color="white")
    tile.set_xticks(range(4))
    tile.set_yticks(range(0, 129, 32))
    tidy(tile, "byte of scale (r, c) in its tile of 128 × 4", "c: block", "r: row")
    figure.colorbar(picture, ax=tile, ticks=(0, 128, 256, 384, 511))
    save(figure, folder, "layout")


def when_it_pays(folder: Path) -> None:
    """Projected speed-up of an MXFP8 grouped GEMM over BF16: by K, by rows per expert, with the operand's quantisation."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.1), sharey=True, layout="constrained")

    def seconds(rows_each: int, k: int, quantised: str) -> float:
        gemm = GroupedGemm("fprop", 64 * rows_each, 64, 2048, k, (rows_each,) * 64)
        product = gemm_estimate(gemm, B200, "bf16" if quantised == "no" else "mxfp8")[0]
        elements, weights = 64 * rows_each * k, 64 * 2048 * k
        passes = {"weights": 3 * weights, "one pass": 3 * elements, "three passes": 11 * elements}.get(
            quantised
        )
        return product + (pass_seconds("stream", passes, B200)[0] if passes else 0.0)

    styles = {
        "fused": ("operand arrives quantised (SwiGLU + quantise, gather + quantise)", BLUE),
        "weights": ("the same, and the weights quantised for this product alone", LIGHT),
        "one pass": ("one more pass over it: 2 bytes read, 1 written", ORANGE),
        "three passes": ("amax, cast and scale layout apart: 11 bytes", RED),
    }
    ks, rows = [64 * i for i in range(1, 65)], [64 * i for i in range(1, 65)]
    for quantised, (label, color) in styles.items():
        gains = [seconds(1024, k, "no") / seconds(1024, k, quantised) for k in ks]
        left.plot(ks, gains, color=color, label=label)
        gains = [seconds(m, 2048, "no") / seconds(m, 2048, quantised) for m in rows]
        right.plot(rows, gains, color=color)
    for axes in (left, right):
        axes.axhline(1, color="#444", linewidth=0.8, linestyle="--")
        axes.set_ylim(0.2, 2.1)
    tidy(left, "by K, 1024 rows for each of 64 experts, N 2048", "K", "MXFP8 over BF16, projected for B200")
    tidy(right, "by rows per expert, K 2048", "rows per expert")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    save(figure, folder, "when")


def main(folder: Path) -> None:
    """Draw everything."""
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (blocks, rules, errors, orientations, when_it_pays):
        draw(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="of the pictures; docs/images by default"
    )
    main(parser.parse_args().folder)
