"""From a checked configuration to a run folder: what `mx-train` and `mx-sample` do once the arguments are right."""

import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mx_trainer import report
from mx_trainer.checkpoint import load_checkpoint, run_dir_of
from mx_trainer.config import Config
from mx_trainer.data import Corpus, CorpusInfo, TextTokenizer, load_corpus, load_corpus_info, load_tokenizer
from mx_trainer.errors import ConfigError
from mx_trainer.failure import Watch
from mx_trainer.faults import fault_of
from mx_trainer.metrics import PeakMemory
from mx_trainer.model import GPT
from mx_trainer.parallel import Parallel, init_parallel
from mx_trainer.precision import resolve_device, resolve_precision
from mx_trainer.profiling import profile_training, write_profile
from mx_trainer.progress import Progress
from mx_trainer.restart import checkpoint_to_continue, started_again
from mx_trainer.sample import generate
from mx_trainer.summary import speed_in_words, summarise
from mx_trainer.trainer import Result, Trainer, resolve_vocab


def run_training(cfg: Config, console: Console, checkpoint: Path | None = None) -> Result:
    """Train, draw, sample, and say where everything is. Nothing is written before model and data are known to fit.

    Of several processes, the main one writes and speaks.
    """
    parallel = init_parallel(cfg)
    with Watch(parallel, cfg.parallel):
        again = started_again(parallel)
        checkpoint = parallel.on_main(lambda: checkpoint_to_continue(cfg, checkpoint, again))
        return _train(cfg, parallel, console, checkpoint, again)


def _train(cfg: Config, parallel: Parallel, console: Console, checkpoint: Path | None, again: bool) -> Result:
    console = console if parallel.is_main else Console(quiet=True)
    corpus = load_corpus_once(cfg, parallel)
    trainer = Trainer(resolve_vocab(cfg, corpus), corpus, parallel)
    if checkpoint is not None:
        trainer.resume(checkpoint)
        if trainer.step >= cfg.optim.steps and not again:
            raise ConfigError(
                f"the run is already at step {trainer.step} of {cfg.optim.steps}; --steps N goes on"
            )
        run_dir = run_dir_of(checkpoint)
    else:
        run_dir = parallel.on_main(lambda: create_run_dir(cfg, exists=again))
    peak = PeakMemory(trainer.device)
    result = train_into(run_dir, trainer, console)
    if result.finished and result.evaluation is None:  # started again after its last step
        result = replace(result, evaluation=trainer.evaluate(cfg.final_eval_tokens))
    if not result.finished:
        console.print(
            f"stopped at step {result.steps}; go on with: mx-train --resume {run_dir}", highlight=False
        )
        return result
    text = _sample(trainer)
    if parallel.is_main:
        _finish(result, trainer, peak.read(), text, console)
    if cfg.profile_steps:
        profiled = profile_training(trainer, cfg.profile_steps)
        if parallel.is_main:
            write_profile(run_dir, profiled, console)
    return result


def load_corpus_once(cfg: Config, parallel: Parallel) -> Corpus:
    """The corpus on every rank: the main one builds it, the others find it in the cache."""
    if parallel.distributed:
        parallel.on_main(lambda: load_corpus(cfg.data).info)
    return load_corpus(cfg.data)


def create_run_dir(cfg: Config, kind: str = "", *, exists: bool = False) -> Path:
    """A new folder for a run, or one that may exist: that of a run that was started again.

    Args:
        cfg: its `name` is the folder's; without one it is made of what the run is, and the time.
        kind: of what is no training run: "compare", "scaling", "speed".
        exists: whether the folder may be there.

    Raises:
        ConfigError: if a run of that name is there already.
    """
    what = f"{kind}-{cfg.preset}" if kind else f"{cfg.preset}-{cfg.precision}"
    name = cfg.name or f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(cfg.out) / name
    try:
        run_dir.mkdir(parents=True, exist_ok=exists)
    except FileExistsError:
        raise ConfigError(
            f"{run_dir} exists: take another --name, or go on with --resume {run_dir}"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write the run folder {run_dir} ({error})") from error
    return run_dir


def train_into(run_dir: Path, trainer: Trainer, console: Console) -> Result:
    """Write the configuration and the corpus's description into `run_dir`, then train."""
    cfg, info = trainer.cfg, trainer.corpus.info
    if trainer.parallel.is_main:
        cfg.save(run_dir / "config.json")
        trainer.corpus.copy_description(run_dir)
    console.print(
        f"{trainer.describe()}; experts {cfg.precision} on {trainer.parallel.describe()}\n"
        f"data {info.source}: {info.train_tokens:,} + {info.val_tokens:,} tokens of {info.files} files, "
        f"sha256 {info.sha256[:16]}",
        highlight=False,
    )
    with fault_of(cfg.precision):
        return trainer.run(run_dir, Progress(console, cfg.optim.steps, cfg.precision, trainer.step))


def _sample(trainer: Trainer) -> str:
    """Text from the trained model: every process draws the same, since a forward pass may need them all."""
    if not trainer.cfg.sample_tokens:
        return ""
    corpus = trainer.corpus
    tokenizer = load_tokenizer(corpus.folder)
    return sample_text(trainer.model, tokenizer, corpus.info, "", trainer.cfg.sample_tokens)


def _finish(result: Result, trainer: Trainer, peak_memory: int, sample: str, console: Console) -> None:
    run_dir, cfg = result.run_dir, trainer.cfg
    title = f"{run_dir.name}: {trainer.describe()}, experts {cfg.precision}"
    report.plot_loss(run_dir, title)
    report.plot_expert_load(run_dir, f"tokens of each expert, {run_dir.name}")
    if sample:
        console.rule("sample")
        console.print(sample, highlight=False, markup=False)
        console.rule()
    evaluation = result.evaluation
    assert evaluation is not None
    summary = summarise(run_dir, trainer, evaluation, peak_memory)
    bpb = "unknown" if evaluation.bpb is None else f"{evaluation.bpb:.4f}"
    lines = {
        "validation": f"{evaluation.loss:.4f} nats per token, {bpb} bits per byte",
        "speed": speed_in_words(summary),
        "expert load": f"the least used expert got {summary.min_expert_share:.2f} of its fair share",
        "run folder": str(run_dir),
        "pictures": f"{run_dir / 'loss.png'}, {run_dir / 'expert_load.png'}",
        "metrics": f"{run_dir / 'metrics.jsonl'}; tensorboard --logdir {run_dir / 'tensorboard'}",
        "checkpoints": str(run_dir / "checkpoints"),
        "more text": f"mx-sample {run_dir} --prompt 'def '",
    }
    for name, text in lines.items():
        console.print(f"[bold]{name:>12}[/bold]  {text}", highlight=False, soft_wrap=True)


def load_for_sampling(checkpoint: Path, device: str) -> tuple[GPT, TextTokenizer | None, CorpusInfo]:
    """The model of a checkpoint, its tokenizer (None for `.bin` data), and the corpus's description."""
    run_dir = run_dir_of(checkpoint)
    cfg = Config.load(run_dir / "config.json")
    where = resolve_device(device)
    model = GPT(cfg, resolve_precision(cfg.precision, cfg.linear_precision, cfg.activations, where))
    load_checkpoint(checkpoint, {"model": model.state_dict()})
    model.to(where).prepare_weights()
    return model, load_tokenizer(run_dir), load_corpus_info(run_dir)


def sample_text(
    model: GPT,
    tokenizer: TextTokenizer | None,
    info: CorpusInfo,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Continue `prompt`. Without a tokenizer the prompt and the result are token ids separated by blanks."""
    try:
        ids = tokenizer.encode(prompt) if tokenizer else [int(i) for i in prompt.split()]
    except ValueError:
        raise ConfigError(f"this run has no tokenizer: --prompt must be token ids, got {prompt!r}") from None
    if any(not 0 <= i < info.vocab for i in ids):
        raise ConfigError(f"--prompt: token ids must be below {info.vocab}")
    out = generate(model, ids, tokens, vocab=info.vocab, temperature=temperature, top_k=top_k, seed=seed)
    return tokenizer.decode(out) if tokenizer else " ".join(map(str, out))
