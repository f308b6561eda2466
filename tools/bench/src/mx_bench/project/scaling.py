"""Many GPUs: bytes over link rate beside the projected compute of one layer. `python -m mx_bench.project.scaling docs` writes
the tables of docs/scaling.md between its markers, and the chart. Nothing here was measured on many GPUs.

Weak scaling: every GPU has its own T tokens. N GPUs, of which groups of `ep` neighbours share one copy of the experts; the rest
of the parameters, and each expert's copies, are sharded (FSDP). A layer takes

    max(compute, FSDP traffic) + all-to-all traffic + latencies

since FSDP gathers ahead of the computation and this project's all-to-alls do not overlap with it. Routing is even.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mx_trainer.exchange import row_bytes

from mx_bench.project.layer import Precision
from mx_bench.project.machines import B200, GB300, H200, Machine
from mx_bench.project.model import project_layer
from mx_bench.project.report import Table
from mx_bench.report import duration, markdown_table, pyplot
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, MoEShape

Dispatch = Literal["bf16", "mxfp8"]


@dataclass(frozen=True)
class Cluster:
    """GPUs and what joins them; bytes per second are one GPU's, in one direction."""

    name: str
    machine: Machine
    domain: int
    """GPUs that NVLink joins."""
    nvlink: float
    network: float


CLUSTERS = (
    Cluster("H200, 8 to a server", H200, 8, 450e9, 50e9),
    Cluster("B200, 8 to a server", B200, 8, 900e9, 50e9),
    Cluster("GB300, 64 of a rack's 72", GB300, 64, 900e9, 100e9),
)
NVLINK_SHARE = 0.80
NETWORK_SHARE = 0.90
LATENCY_S = 15e-6
NETWORK_LATENCY_S = 40e-6
DENSE_SHARE = 0.6
CONTEXT = 4096
FP32_BYTES = 4.0
COUNT_BYTES = 8.0

SOURCES = (
    ("NVLink, one GPU and direction", "450 GB/s (H200), 900 GB/s (B200, GB300)", "datasheet: NVLink 4 and 5"),
    ("GPUs joined by NVLink", "8; 64 (GB300)", "datasheet: HGX; NVL72, of whose 72 a power of two is used"),
    ("network, one GPU and direction", "50 GB/s; 100 GB/s (GB300)", "datasheet: one ConnectX-7 (400 Gb/s), ConnectX-8 (800 Gb/s) a GPU"),
    ("share of NVLink that rows reach", f"{NVLINK_SHARE}", "published: DeepEP's README, 726 of 900 GB/s on 8 GPUs of SM100; NCCL's all-to-all may reach less"),
    ("share of the network", f"{NETWORK_SHARE}", "published: the same, 61 GB/s of which 3/4 leave the server, of 50"),
    ("latency of a collective", f"{LATENCY_S * 1e6:.0f} us; {NETWORK_LATENCY_S * 1e6:.0f} us over the network", "inferred; the weakest"),
    ("attention and its projections", f"{DENSE_SHARE} of the sustained BF16 rate, {CONTEXT} tokens of context", "inferred"),
    ("compute of the MoE layer", "[projection.md](projection.md)", "fitted on an H200"),
)  # fmt: skip


# --- bytes ------------------------------------------------------------------------------------------------------------


def dispatch_bytes(shape: MoEShape, dispatch: Dispatch) -> dict[str, float]:
    """Bytes that one token of one layer hands to all-to-alls, by what mx_trainer's `Traffic` calls them.

    k rows of D forth and back, forward and backward; only those forth can be quantised. Of all, (ep - 1) / ep leave the GPU.
    """
    rows = row_bytes(shape.width, element_size=2, quantized=dispatch == "mxfp8")
    counts = COUNT_BYTES * shape.experts / shape.tokens
    return {"counts": counts} | {kind: shape.top_k * size for kind, size in rows.items()}


FORWARD = ("counts", "x", "y")


def parameters(shape: MoEShape) -> tuple[float, float]:
    """Of one layer: attention and router; experts."""
    dense = 4.0 * shape.width**2 + shape.experts * shape.width
    return dense, 3.0 * shape.experts * shape.width * shape.expert_width


# --- seconds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """One layer, forward and backward, on N GPUs: projected seconds."""

    gpus: int
    ep: int
    tokens: int
    """Of one GPU."""
    compute: float
    fsdp: float
    all_to_all: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.fsdp) + self.all_to_all

    @property
    def rate(self) -> float:
        """Tokens per second and GPU, through this one layer."""
        return self.tokens / self.seconds

    @property
    def efficiency(self) -> float:
        """Share of the time that is computation."""
        return self.compute / self.seconds


def scaled(
    shape: MoEShape, cluster: Cluster, precision: Precision, dispatch: Dispatch, gpus: int, ep: int
) -> Scaled:
    """Project one layer; `ep` divides E and N."""
    assert shape.experts % ep == 0, (shape.experts, ep)
    assert gpus % ep == 0, (gpus, ep)
    local = replace(shape, experts=shape.experts // ep)
    sharded = gpus > ep
    layer = project_layer(local, cluster.machine, precision, weights_in_call=sharded)
    attention = 3.0 * shape.tokens * (8.0 * shape.width**2 + 2.0 * CONTEXT * shape.width)
    dense = attention / (DENSE_SHARE * cluster.machine.sustained_flops_bf16)
    sent = sum(dispatch_bytes(shape, dispatch).values()) * shape.tokens
    collectives = 7 + 2 * (dispatch == "mxfp8")  # of dispatch_bytes' entries; elements and scales go apart
    return Scaled(
        gpus,
        ep,
        shape.tokens,
        compute=layer.seconds(once_a_step=not sharded) + dense,
        fsdp=_fsdp_seconds(shape, cluster, gpus, ep),
        all_to_all=_all_to_all_seconds(sent, cluster, ep)
        + (collectives * _latency(cluster, ep) if ep > 1 else 0.0),
    )


def _all_to_all_seconds(sent: float, cluster: Cluster, ep: int) -> float:
    """`sent` bytes of one GPU, spread evenly over the ep ranks of its group: NVLink and network work at the same time."""
    near = min(ep, cluster.domain)
    over_nvlink = sent * (near - 1) / ep / (cluster.nvlink * NVLINK_SHARE)
    over_network = sent * (ep - near) / ep / (cluster.network * NETWORK_SHARE)
    return max(over_nvlink, over_network)


def _fsdp_seconds(shape: MoEShape, cluster: Cluster, gpus: int, ep: int) -> float:
    """FP32 parameters gathered forward and backward, gradients reduced: attention over all GPUs, experts over their copies."""
    dense, experts = parameters(shape)
    nvlink = network = 0.0
    for numbers, ranks, near in (
        (dense, gpus, cluster.domain),
        (experts / ep, gpus // ep, cluster.domain // ep),
    ):
        moved = _ring(3 * FP32_BYTES * numbers, ranks, near)
        nvlink, network = nvlink + moved[0], network + moved[1]
    return max(nvlink / (cluster.nvlink * NVLINK_SHARE), network / (cluster.network * NETWORK_SHARE))


def _ring(size: float, ranks: int, near: int) -> tuple[float, float]:
    """Bytes over one GPU's NVLink and network card when `ranks` gather `size` bytes, `near` of them in each server.

    Everything from other servers enters a server once, by the cards of all its ranks together.
    """
    near = max(1, min(near, ranks))
    servers = ranks / near
    return (size * (ranks - 1) / ranks if near > 1 else 0.0), size / near * (servers - 1) / servers


def _latency(cluster: Cluster, ranks: int) -> float:
    return LATENCY_S if ranks <= cluster.domain else NETWORK_LATENCY_S


def best(shape: MoEShape, cluster: Cluster, precision: Precision, dispatch: Dispatch, gpus: int) -> Scaled:
    """The fastest layout."""
    sizes = [ep for ep in range(1, gpus + 1) if gpus % ep == 0 and shape.experts % ep == 0]
    return max((scaled(shape, cluster, precision, dispatch, gpus, ep) for ep in sizes), key=lambda s: s.rate)


# --- the page ---------------------------------------------------------------------------------------------------------

BIG = next(shape for shape in MODEL_SHAPES if shape.name == "DeepSeek-V3")
SHAPES = (*DESIGN_SHAPES, BIG)
GPUS = (8, 16, 32, 64, 128, 256, 512)
KINDS: dict[str, tuple[Precision, Dispatch]] = {
    "BF16, rows in BF16": ("bf16", "bf16"),
    "MXFP8, rows in BF16": ("mxfp8", "bf16"),
    "MXFP8, rows in MXFP8": ("mxfp8", "mxfp8"),
}


def traffic_table() -> list[str]:
    """KiB that a token hands to all-to-alls in one layer. These follow from the shapes, and are counted in a test."""
    rows: list[tuple[str, ...]] = []
    for shape in SHAPES:
        for name, dispatch in (("BF16", "bf16"), ("MXFP8", "mxfp8")):
            parts = dispatch_bytes(shape, dispatch)
            forward = sum(v for kind, v in parts.items() if kind in FORWARD)
            backward = sum(parts.values()) - forward
            plain = sum(dispatch_bytes(shape, "bf16").values())
            total = forward + backward
            cells = (forward, backward, total)
            rows.append(
                (
                    f"{shape.name} (D {shape.width}, k {shape.top_k})",
                    name,
                    *(f"{v / 1024:.1f}" for v in cells),
                    f"{total / plain:.2f}",
                )
            )
    header = ("layer", "rows forth as", "forward, KiB", "backward, KiB", "both, KiB", "of BF16")
    return markdown_table(header, rows)


def scaling_table(cluster: Cluster, shape: MoEShape) -> list[str]:
    """Projected layers on more and more GPUs, with the best layout of each."""
    rows = []
    for gpus in GPUS:
        cells = [str(gpus)]
        for precision, dispatch in KINDS.values():
            s = best(shape, cluster, precision, dispatch, gpus)
            cells.append(f"{s.rate / 1e6:.2f} M ({s.ep}; {s.efficiency:.0%})")
        rows.append(tuple(cells))
    title = f"projected: {shape.name}, {cluster.name}: tokens/s and GPU through one layer (ep; computing)"
    return Table(title, ("GPUs", *KINDS), tuple(rows)).markdown()


def parts_table(cluster: Cluster, shape: MoEShape, gpus: int) -> list[str]:
    """What the time of one layer goes into."""
    rows = []
    for name, (precision, dispatch) in KINDS.items():
        for ep in (1, 8, 64):
            s = scaled(shape, cluster, precision, dispatch, gpus, ep)
            rows.append(
                (
                    name,
                    str(ep),
                    duration(s.compute),
                    duration(s.fsdp),
                    duration(s.all_to_all),
                    duration(s.seconds),
                )
            )
    header = ("experts", "ep", "compute", "FSDP (hidden up to compute)", "all-to-alls", "together")
    return Table(
        f"projected: {shape.name}, {gpus} GPUs, {cluster.name}, one layer forward and backward",
        header,
        tuple(rows),
    ).markdown()


def chart(path: Path) -> None:
    """Projected tokens per second and GPU of the big layer over the number of GPUs, a panel for each cluster."""
    plt = pyplot()
    clusters = CLUSTERS[1:]
    figure, panels = plt.subplots(1, len(clusters), figsize=(10, 3.6), sharey=True, layout="constrained")
    for axes, cluster in zip(panels, clusters, strict=True):
        for (name, (precision, dispatch)), color in zip(
            KINDS.items(), ("#b9bec6", "#7fb0e6", "#1f5fa8"), strict=True
        ):
            rates = [best(BIG, cluster, precision, dispatch, gpus).rate / 1e6 for gpus in GPUS]
            axes.plot(GPUS, rates, "o-", color=color, label=name, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axes.set_xlabel("GPUs")
        axes.set_title(f"projected: {BIG.name} layer, {cluster.name}", loc="left", fontsize=9)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("projected M tokens/s and GPU")
    panels[0].set_ylim(bottom=0)  # shared
    panels[1].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def sections() -> dict[str, list[str]]:
    """The generated parts of docs/scaling.md by the name of their marker."""
    big = [line for cluster in CLUSTERS for line in (*scaling_table(cluster, BIG), "")]
    fine = scaling_table(CLUSTERS[1], DESIGN_SHAPES[0])
    return {
        "traffic": traffic_table(),
        "scaling": [*big, *fine, "", *parts_table(CLUSTERS[1], BIG, 256)],
        "constants": markdown_table(("constant", "value", "source"), list(SOURCES)),
    }


def filled(page: str, parts: dict[str, list[str]]) -> str:
    """The page with each part between `<!-- name -->` and `<!-- end -->`."""
    for name, lines in parts.items():
        before, marker, rest = page.partition(f"<!-- {name} -->\n")
        assert marker, name
        page = (
            before
            + marker
            + "\n"
            + "\n".join(lines).rstrip()
            + "\n\n<!-- end -->"
            + rest.partition("<!-- end -->")[2]
        )
    return page


def main(argv: list[str] | None = None) -> None:
    """Write the generated parts and the chart."""
    parser = argparse.ArgumentParser(prog="python -m mx_bench.project.scaling", description=__doc__)
    parser.add_argument("docs", type=Path, help="folder of scaling.md, which has the markers, and of images/")
    docs = parser.parse_args(argv).docs
    if not (docs / "scaling.md").is_file():
        parser.error(f"{docs / 'scaling.md'}: no such page")
    page = docs / "scaling.md"
    page.write_text(filled(page.read_text(), sections()))
    chart(docs / "images" / "scaling_projected.png")


if __name__ == "__main__":
    main()
