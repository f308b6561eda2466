"""Training spread over processes, against one process with the same global batches: losses, gradients, validation."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mx_trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig

from .ranks import make_trainer, run_ranks

STEPS = 3


@pytest.fixture(scope="module")
def base(text: Path) -> Config:
    return Config(
        model=ModelConfig(layers=2, width=32, heads=2, block=16, experts=12, top_k=2, expert_width=32),
        data=DataConfig(data=str(text), val_fraction=0.1),
        optim=OptimConfig(steps=20, batch=12, warmup=2, lr=1e-3, clip=0.5),
        device="cpu",
        precision="fp32",
    )


Trace = tuple[list[list[float]], list[int], float]
"""By step: loss, aux loss, z-loss, gradient norm; the experts' tokens of all steps; the validation loss."""


def train(cfg: Config) -> Trace:
    trainer = make_trainer(cfg)
    steps, tokens = [], []
    for _ in range(STEPS):
        scalars, tokens_LE = trainer.train_step()
        steps.append((trainer.parallel.sum_(scalars.clone()) / trainer.parallel.world).tolist())
        tokens += tokens_LE.flatten().tolist()
    return steps, tokens, trainer.evaluate(700).loss


def train_all(cfgs: list[Config]) -> list[Trace]:
    return [train(cfg) for cfg in cfgs]


def spread(cfg: Config, world: int) -> list[Config]:
    """Every way to spread a model over `world` ranks, in the precisions where they differ."""
    eps = [ep for ep in range(2, world + 1) if world % ep == 0]
    ways = [ParallelConfig(), ParallelConfig(fsdp=False)]
    ways += [ParallelConfig(ep=ep, fsdp=fsdp) for ep in eps for fsdp in (True, False)]
    ways += [ParallelConfig(ep=world, padded_dispatch=True)]
    cfgs = [replace(cfg, parallel=way) for way in ways]
    return (
        cfgs
        + [replace(c, precision=p) for c in (cfgs[2], *cfgs[-2:]) for p in ("bf16", "mxfp8")]
        + [
            replace(cfg, precision="mxfp8", parallel=ways[0]),
            replace(cfg, precision="bf16", parallel=ways[0], checkpoint_activations=True),
            replace(cfg, parallel=ways[2], optim=replace(cfg.optim, accumulate=2, batch=12)),
        ]
    )


@pytest.fixture(scope="module")
def alone(base: Config):
    """Traces of one process, by configuration."""
    cache: dict[Config, Trace] = {}

    def get(cfgs: list[Config]) -> list[Trace]:
        singles = [replace(cfg, parallel=ParallelConfig()) for cfg in cfgs]
        missing = [cfg for cfg in dict.fromkeys(singles) if cfg not in cache]
        cache.update(zip(missing, run_ranks(1, train_all, missing)[0], strict=True))
        return [cache[cfg] for cfg in singles]

    return get


def assert_same(trace: Trace, want: Trace, cfg: Config, losses: float, norms: float) -> None:
    """Relative differences of losses, and of what comes after a step: gradient norms and, of few tokens, validation."""
    words = f"{cfg.precision} {cfg.parallel}"
    got_S4, want_S4 = torch.tensor(trace[0]), torch.tensor(want[0])
    off_S4 = (got_S4 / want_S4 - 1).abs()
    assert off_S4[:, :3].max() <= losses, f"{words}: losses {got_S4[:, :3]}, expected {want_S4[:, :3]}"
    assert off_S4[0, 3] <= 1e-5, f"{words}: gradient norm {got_S4[0, 3]}, expected {want_S4[0, 3]}"
    assert off_S4[1:, 3].max() <= norms, f"{words}: gradient norms {got_S4[:, 3]}, expected {want_S4[:, 3]}"
    assert trace[2] == pytest.approx(want[2], rel=norms), words


@pytest.mark.parametrize("world", [2, 3, 4])
def test_losses_are_those_of_one_process(base, alone, world):
    """Only the order of the sums over tokens differs: by 1e-5 at most; in BF16 and MXFP8 a weight's last bit may round some
    activation the other way."""
    cfgs = spread(base, world)
    wants = alone(cfgs)
    for traces in run_ranks(world, train_all, cfgs):
        for cfg, trace, want in zip(cfgs, traces, wants, strict=True):
            assert trace[1] == want[1], cfg.parallel
            assert_same(trace, want, cfg, losses=1e-5, norms=1e-5 if cfg.precision == "fp32" else 1e-3)


def test_rows_sent_in_mxfp8_cost_little(base, alone):
    """The first loss is the same (the bytes sent are those that fprop would have made); wgrad's x and dout are rounded twice."""
    cfg = replace(base, precision="mxfp8", parallel=ParallelConfig(ep=2, dispatch="mxfp8"))
    (want,) = alone([cfg])
    for (trace,) in run_ranks(2, train_all, [cfg]):
        assert trace[0][0][0] == pytest.approx(want[0][0][0], rel=3e-7)
        assert_same_but_later(trace, want)


def assert_same_but_later(trace: Trace, want: Trace) -> None:
    got, expected = (torch.tensor(t[0])[:, 0] for t in (trace, want))
    assert (got / expected - 1).abs().max() < 1e-3
    assert not torch.equal(got[1:], expected[1:]), "nothing was rounded: was anything sent quantised?"


def collectives(cfgs: list[Config], unit: int) -> list[dict[str, int]]:
    """Of one training step each, by torch's names; FSDP gathers `unit` parameters at a time."""
    from mx_trainer import sharding
    from torch.profiler import ProfilerActivity, profile

    sharding.UNIT = unit
    counts = []
    for cfg in cfgs:
        trainer = make_trainer(cfg)
        trainer.train_step()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            trainer.train_step()
        names = (event.name for event in recorded.events() if event.name.startswith("c10d::"))
        counts.append(dict(Counter(name.removeprefix("c10d::") for name in names)))
    return counts


def test_collectives_of_a_step(base):
    """The table of docs/scaling.md: none for each router or for each gradient."""
    ways = [
        ParallelConfig(),
        ParallelConfig(reshard=False),
        ParallelConfig(fsdp=False),
        ParallelConfig(ep=2, fsdp=False),
    ]
    layers = base.model.layers
    cfgs = [replace(base, parallel=way) for way in ways]
    for fsdp, kept, copies, experts in run_ranks(2, collectives, cfgs, 1):
        assert fsdp == {
            "_allgather_base_": 1 + 2 * layers,  # embedding and head once, a block twice
            "_reduce_scatter_base_": 1 + layers,
            "allreduce_": 2,  # the routers' counts; the gradients' norm
        }
        assert kept == fsdp | {"_allgather_base_": 1 + layers}
        assert copies == {"allreduce_": 2}  # counts; gradients
        assert experts == {"allreduce_": 3, "alltoall_base_": 7 * layers}


def test_small_blocks_are_gathered_together(base):
    for ((fsdp,),) in zip(run_ranks(2, collectives, [base], 1 << 25), strict=True):
        assert (fsdp["_allgather_base_"], fsdp["_reduce_scatter_base_"]) == (3, 2)


def sharded_in_units(cfgs: list[Config], unit: int) -> list[Trace]:
    from mx_trainer import sharding

    sharding.UNIT = unit
    return train_all(cfgs)


def test_units_and_resharding_change_no_bit(base):
    base = replace(base, model=replace(base.model, layers=3), precision="mxfp8")
    cfgs = [replace(base, checkpoint_activations=recomputed) for recomputed in (False, True)]
    cfgs += [replace(base, parallel=ParallelConfig(reshard=False))]
    traces = [run_ranks(2, sharded_in_units, cfgs, unit) for unit in (1, 50_000, 1 << 25)]
    assert traces[0] == traces[1] == traces[2]
    for rank in traces[0]:
        assert rank[0] == rank[1] == rank[2]


def summed_in_buckets(cfg: Config, bucket: int) -> list[list[float]]:
    from mx_trainer import sharding

    sharding.BUCKET = bucket
    return train(cfg)[0]


def test_gradients_are_the_same_in_any_buckets(base):
    cfg = replace(base, parallel=ParallelConfig(fsdp=False))
    one, many = (run_ranks(2, summed_in_buckets, cfg, bucket) for bucket in (1 << 26, 1000))
    assert one == many


@pytest.mark.parametrize("precision", ["fp32", "bf16", "mxfp8"])
def test_two_ranks_are_two_passes_of_one_process_bitwise(base, precision):
    """Half the batch in each rank, against half the batch in each of two accumulated passes: the same sums in the same order."""
    quiet = replace(base, precision=precision, router=replace(base.router, aux_loss=0.0))
    both = replace(quiet, optim=replace(quiet.optim, clip=0.0))
    passes = replace(both, optim=replace(both.optim, batch=6, accumulate=2))
    ((want,),) = run_ranks(1, train_all, [passes])
    ways = [replace(both, parallel=ParallelConfig(fsdp=fsdp)) for fsdp in (True, False)]
    for traces in run_ranks(2, train_all, ways):
        for steps, tokens, _ in traces:
            assert [step[0] for step in steps] == [step[0] for step in want[0]]
            assert tokens == want[1]


def train_compiled(cfgs: list[Config]) -> tuple[list[Trace], int]:
    """Traces, and how many graphs were compiled; without generated code, which would take a minute."""
    compiler, graphs = torch.compile, 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compile = lambda function: compiler(function, backend=backend)
    return train_all(cfgs), graphs


def test_the_dense_part_stays_compiled(base, alone):
    base = replace(base, model=replace(base.model, layers=1))
    cfgs = [replace(base, parallel=way) for way in (ParallelConfig(), ParallelConfig(ep=2))]
    wants = alone(cfgs)
    for traces, graphs in run_ranks(2, train_compiled, [replace(cfg, compile=True) for cfg in cfgs]):
        assert graphs >= 2
        for cfg, trace, want in zip(cfgs, traces, wants, strict=True):
            assert_same(trace, want, cfg, losses=1e-5, norms=1e-5)


@pytest.mark.parametrize(
    ("world", "flags", "message"),
    [
        (2, ["--ep=4", "--experts=4"], "--ep must divide the number of processes, got 4 and 2"),
        (1, ["--ep=2"], "--ep must divide the number of processes, got 2 and 1"),
        (3, ["--batch=8"], "must be a multiple of their number 3, got 8"),
        (2, ["--ep=2", "--experts=3"], "--ep must divide --experts, got 2 and 3"),
        (2, ["--dispatch=mxfp8", "--precision=bf16"], "--dispatch mxfp8 needs --precision mxfp8, mxfp8_floor; got"),
        (2, ["--device=cuda:1"], "--device"),
        (2, ["compare"], "mx-train compare runs in one process, got 2"),
        (2, ["speed"], "mx-train speed runs in one process, got 2"),
        (None, ["scaling"], "start it with torchrun"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_before_anything_starts(
    world, flags, message, monkeypatch, capsys, tmp_path
):
    from mx_trainer.cli import train

    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("RANK", "0")
    assert train([*flags, "--preset=smoke", f"--out={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
