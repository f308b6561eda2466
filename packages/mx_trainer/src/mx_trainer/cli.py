"""`mx-train` (also with `compare`, `speed` or `scaling`) and `mx-sample`: arguments in, one line per mistake, a run folder out."""

import contextlib
import difflib
import io
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import tyro
from mx_kernels import NoBackendError
from rich.console import Console

from mx_trainer.checkpoint import find_checkpoint, run_dir_of
from mx_trainer.config import CORPORA, Config, validate
from mx_trainer.configs import load_preset
from mx_trainer.errors import CheckpointError, ConfigError, RankError
from mx_trainer.parallel import launched_world

T = TypeVar("T")

_CHANGEABLE = {  # on resume; everything else would make it another run
    "ep", "fsdp", "reshard", "padded_dispatch", "heartbeat_timeout", "stall_timeout",
    "steps", "device", "compile", "checkpoint_activations", "log_every", "eval_every", "eval_tokens",
    "final_eval_tokens", "save_every", "keep", "sample_tokens", "profile_steps",
}  # fmt: skip


@dataclass(frozen=True)
class TrainArgs(Config):
    """Train a mixture-of-experts GPT. Without arguments: a small one with MXFP8 experts, three minutes on two cores.

    Ctrl-C saves; `mx-train --resume runs/NAME` goes on. `mx-train compare` trains BF16 and MXFP8 side by side.
    """

    resume: str = ""
    """A run folder (its newest checkpoint) or one checkpoint folder to go on from."""


@dataclass(frozen=True)
class CompareArgs(Config):
    """Train the same model on the same data in two precisions and a control that must look worse."""

    seeds: int = 3
    """Seeds per precision: --seed, --seed + 1, ..."""
    baseline: str = "bf16"
    """The precision that the others are measured against."""
    candidate: str = "mxfp8"
    """The precision that must be at parity."""
    control: str = "mxfp8_wrong_scales"
    """The precision that must not be; empty for none."""
    runs: tuple[str, ...] = ()
    """Run folders to compare instead of training: finished, and unlike in --precision and --seed only."""


@dataclass(frozen=True)
class ScalingArgs(Config):
    """Under torchrun: the same steps in one process, with FSDP, expert parallelism and both; losses, tokens/s, traffic."""

    precisions: tuple[str, ...] = ("bf16", "mxfp8")
    """Precisions to go through."""


@dataclass(frozen=True)
class SpeedArgs(Config):
    """Train a few steps in each precision, and with torch's own grouped GEMM: tokens/s, memory, time by part."""

    variants: tuple[str, ...] = ("torch", "bf16", "mxfp8")
    """Precisions, and `torch`: BF16 experts from torch's grouped_mm between unfused ops. The first is the yardstick."""
    timed_steps: int = 20
    """Steps that are timed, after a few that are not."""


@dataclass(frozen=True)
class SampleArgs:
    """Print text from a trained run."""

    run: tyro.conf.Positional[str]
    """A run folder or one of its checkpoints."""
    prompt: str = ""
    """Text to continue; empty starts a new document."""
    tokens: int = 300
    """Tokens to draw."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    """Draw among the likeliest k; 0 among all."""
    seed: int = 0
    """The same seed gives the same text."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, ..."""


def train(argv: Sequence[str] | None = None) -> int:
    """Entry point of `mx-train`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["compare"]:
        return _guarded("mx-train compare", lambda: _compare(args[1:]))
    if args[:1] == ["scaling"]:
        return _guarded("mx-train scaling", lambda: _scaling(args[1:]))
    if args[:1] == ["speed"]:
        return _guarded("mx-train speed", lambda: _speed(args[1:]))
    return _guarded("mx-train", lambda: _train(args))


def sample(argv: Sequence[str] | None = None) -> int:
    """Entry point of `mx-sample`."""
    return _guarded("mx-sample", lambda: _sample(list(sys.argv[1:] if argv is None else argv)))


def _guarded(prog: str, main: Callable[[], int]) -> int:
    try:
        return main()
    except (ConfigError, CheckpointError, FloatingPointError, NoBackendError, RankError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


# --- arguments --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _help_may_be_cut() -> Generator[None]:
    """`mx-train --help | head` closes the pipe when it has read enough: that is no error."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes nowhere
        raise SystemExit(0) from None


def _parse(cls: type[T], args: list[str], prog: str, default: T | None = None) -> T:
    """Parse flags over `default`; an unknown one is refused with the nearest that exists."""
    complaint = io.StringIO()
    try:
        with _help_may_be_cut(), contextlib.redirect_stderr(complaint):
            parsed, unknown = tyro.cli(
                cls,
                args=args,
                prog=prog,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as error:
        if not error.code:
            raise  # --help
        raise ConfigError(f"{_first_paragraph(complaint.getvalue())} ({prog} --help lists all)") from None
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], _flags(cls), n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ConfigError(f"unknown argument {unknown[0]!r}{hint} ({prog} --help lists all)")
    return parsed


def _first_paragraph(box: str) -> str:
    """The message in the frame that tyro draws (in ASCII where need be), as one line: it ends at a rule inside."""
    words: list[str] = []
    for line in box.splitlines()[1:]:
        text = line.strip().strip("│|+╰╯").strip()
        if not text.strip("─-"):
            if words:
                break
            continue
        words.append(text)
    return " ".join(words).rstrip(".")


def _flags(cls: type) -> list[str]:
    names = []
    for f in fields(cls):
        nested = f.default_factory if isinstance(f.default_factory, type) else None
        names += _flags(nested) if nested else ["--" + f.name.replace("_", "-")]
    return names


def _value_of(args: list[str], flag: str) -> str | None:
    """The value of `flag` in raw arguments: presets and resumed runs are the defaults that the rest is parsed over."""
    value = None  # of several, the last, as the parser takes it
    for arg, following in itertools.zip_longest(args, args[1:]):
        if arg == flag and following is not None:
            value = following
        if arg.startswith(flag + "="):
            value = arg.partition("=")[2]
    return value


def _over(cls: type[T], cfg: Config) -> T:
    return cls(**{f.name: getattr(cfg, f.name) for f in fields(Config)})


def _parse_over_preset(cls: type[T], args: list[str], prog: str, preset: str = "tiny") -> T:
    """Parse flags over the preset that they name, or over this one."""
    return _parse(cls, args, prog, _over(cls, load_preset(_value_of(args, "--preset") or preset)))


def _config_of(args: Config) -> Config:
    """Only the fields of a run; a data path becomes absolute, for a resume from another folder."""
    cfg = Config(**{f.name: getattr(args, f.name) for f in fields(Config)})
    path = Path(cfg.data.data).expanduser()
    if cfg.data.data in CORPORA or not path.exists():
        return cfg
    return replace(cfg, data=replace(cfg.data, data=str(path.resolve())))


# --- mx-train ---------------------------------------------------------------------------------------------------------


def _train(argv: list[str]) -> int:
    resume = _value_of(argv, "--resume")
    checkpoint = find_checkpoint(Path(resume)) if resume else None
    if checkpoint is None:
        cfg = _config_of(_parse_over_preset(TrainArgs, argv, "mx-train"))
        validate(cfg)
    else:
        before = Config.load(run_dir_of(checkpoint) / "config.json")
        cfg = _config_of(_parse(TrainArgs, argv, "mx-train", _over(TrainArgs, before)))
        validate(cfg)
        _refuse_changes(before, cfg)

    from mx_trainer.launch import run_training

    result = run_training(cfg, Console(), checkpoint)
    return 0 if result.finished else 130


def _refuse_changes(before: Config, after: Config) -> None:
    old, new = _flat(before), _flat(after)
    changed = [name for name in old if old[name] != new[name] and name not in _CHANGEABLE]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"--{name.replace('_', '-')} is fixed by the resumed run ({old[name]!r}), got {new[name]!r}; "
            "start a new run to change it"
        )


def _flat(cfg: Config) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in cfg.to_dict().items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _refuse_several(what: str) -> None:
    if (world := launched_world()) > 1:
        raise ConfigError(f"{what} runs in one process, got {world}: start it without torchrun")


def _compare(argv: list[str]) -> int:
    _refuse_several("mx-train compare")
    args = _parse_over_preset(CompareArgs, argv, "mx-train compare", "tiny_compare")
    if "--runs" in argv and not args.runs:
        raise ConfigError("--runs needs run folders, got none")
    if args.seeds < 2 and not args.runs:
        raise ConfigError(f"--seeds must be at least 2, to have a spread, got {args.seeds}")
    for precision in filter(None, (args.baseline, args.candidate, args.control)):
        validate(replace(_config_of(args), precision=precision))

    from mx_trainer.compare import Roles, compare_runs, run_comparison
    from mx_trainer.launch import create_run_dir

    roles, cfg = Roles(args.baseline, args.candidate, args.control), _config_of(args)
    if args.runs:
        missing = [run for run in args.runs if not (Path(run) / "config.json").exists()]
        if missing:
            raise ConfigError(f"--runs: {missing[0]} is not a run folder (it has no config.json)")
        comparison = compare_runs(
            [Path(run) for run in args.runs],
            roles,
            lambda: create_run_dir(cfg, "compare"),
            Console(),
        )
    else:
        comparison = run_comparison(cfg, roles, args.seeds, Console())
    return 0 if comparison.as_expected else 1


def _scaling(argv: list[str]) -> int:
    args = _parse_over_preset(ScalingArgs, argv, "mx-train scaling")

    from mx_trainer.scaling import run_scaling

    run_scaling(_config_of(args), list(args.precisions), Console())
    return 0


def _speed(argv: list[str]) -> int:
    _refuse_several("mx-train speed")
    args = _parse_over_preset(SpeedArgs, argv, "mx-train speed")
    if args.timed_steps < 1 or not args.variants:
        raise ConfigError(
            f"--timed-steps must be at least 1 and --variants not empty, got {args.timed_steps} and {args.variants}"
        )

    from mx_trainer.speed import run_speed

    run_speed(_config_of(args), list(args.variants), args.timed_steps, Console())
    return 0


# --- mx-sample --------------------------------------------------------------------------------------------------------


def _sample(argv: list[str]) -> int:
    args = _parse(SampleArgs, argv, "mx-sample")
    if args.tokens < 1 or not 0 <= args.temperature < math.inf or args.top_k < 0:
        raise ConfigError(
            "--tokens must be at least 1, --temperature and --top-k not negative, "
            f"got {args.tokens}, {args.temperature} and {args.top_k}"
        )
    checkpoint = find_checkpoint(Path(args.run))

    from mx_trainer.launch import load_for_sampling, sample_text

    start = time.perf_counter()
    model, tokenizer, info = load_for_sampling(checkpoint, args.device)
    text = sample_text(
        model, tokenizer, info, args.prompt, args.tokens,
        temperature=args.temperature, top_k=args.top_k, seed=args.seed,
    )  # fmt: skip
    print(args.prompt + text)
    print(f"[{checkpoint}, {args.tokens} tokens, {time.perf_counter() - start:.1f} s]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(train())
