"""The training loop: forward, backward, step, and what is written down on the way. Several processes run it in step.

A run's whole state is `Trainer.state_dict()`: model (FP32 weights, expert biases, counters), optimiser moments, step,
position in the data, random generators. Restoring it continues bit for bit.
"""

import math
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mx_trainer import run_state
from mx_trainer.checkpoint import State, load_checkpoint, read_values, save_checkpoint
from mx_trainer.config import Config
from mx_trainer.data import BlockSampler, Corpus, stack_blocks, val_starts
from mx_trainer.errors import CheckpointError, ConfigError
from mx_trainer.metrics import NoLog, RunLog, StepTimer, flops_per_token, parameter_counts
from mx_trainer.model import GPT
from mx_trainer.optim import lr_at, make_optimizer, set_lr
from mx_trainer.parallel import Parallel, init_parallel
from mx_trainer.precision import resolve_precision
from mx_trainer.progress import Progress
from mx_trainer.sharding import clip_gradients, distribute, dropped_rows, reduce_gradients

SCALARS = ("train_loss", "aux_loss", "z_loss", "grad_norm")
"""What `Trainer.train_step` returns, and metrics.jsonl holds as means since the last record."""


@dataclass(frozen=True)
class Evaluation:
    """Validation of one model state."""

    loss: float
    """Nats per token."""
    bpb: float | None
    """Bits per byte; None where the bytes behind the tokens are unknown."""
    tokens: int


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    run_dir: Path
    steps: int
    evaluation: Evaluation | None
    """Of the last step; None if the run was interrupted before one."""
    finished: bool


def resolve_vocab(cfg: Config, corpus: Corpus) -> Config:
    """Fill in `model.vocab` from the data, or check that it is large enough."""
    if cfg.model.vocab == 0:
        return replace(cfg, model=replace(cfg.model, vocab=-(-corpus.info.vocab // 64) * 64))
    if cfg.model.vocab < corpus.info.vocab:
        raise ConfigError(f"--vocab must be at least the data's {corpus.info.vocab}, got {cfg.model.vocab}")
    return cfg


def check_data(cfg: Config, corpus: Corpus) -> None:
    """Refuse data that hold no whole block (ConfigError)."""
    BlockSampler(corpus.train, cfg.model.block, cfg.seed)
    val_starts(len(corpus.val), cfg.model.block, cfg.eval_tokens)


class Trainer:
    """One run, or one process's part of it. Building it writes nothing; `run()` does."""

    def __init__(self, cfg: Config, corpus: Corpus, parallel: Parallel | None = None):
        self.cfg, self.corpus = cfg, corpus
        check_data(cfg, corpus)
        self.parallel = init_parallel(cfg) if parallel is None else parallel
        self.device = self.parallel.device
        self.batch = cfg.optim.batch // self.parallel.world  # sequences of this process
        torch.manual_seed(cfg.seed)  # every device's generator: initial weights, then dropout
        precision = resolve_precision(cfg.precision, cfg.linear_precision, cfg.activations, self.device)
        self.model = GPT(cfg, precision).to(self.device)
        distribute(self.model, cfg.parallel, self.parallel)
        if cfg.compile:
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward)  # inside FSDP's hooks
        self.optimizer = make_optimizer(self.model, cfg.optim)
        self.model.prepare_weights(self.optimizer)
        if self.parallel.rank:  # ranks share the initial weights, not dropout's masks
            run_state.seed_anew(cfg.seed, 0, self.parallel)
        self.sampler = BlockSampler(
            corpus.train, cfg.model.block, cfg.seed, rank=self.parallel.rank, world=self.parallel.world
        )
        self.step = 0
        self.timer = StepTimer(self.device)

    # --- one step -----------------------------------------------------------------------------------------------------

    def train_step(self) -> tuple[Tensor, Tensor]:
        """One optimiser step over `accumulate` batches.

        Returns:
            scalars (4,) fp32 as `SCALARS` names them, the losses being those of this rank's tokens, and the tokens
            (layers, E) int64 of each expert, of all ranks. They stay on the device: nothing here waits for a GPU.
        """
        cfg, parts = self.cfg, []
        self.model.train()
        for _ in range(cfg.optim.accumulate):
            tokens, targets = self.sampler.next_batch(self.batch, self.device)
            out = self.model(tokens, targets)
            loss = out.loss + cfg.router.aux_loss * out.aux_loss + cfg.router.z_loss * out.z_loss
            share = loss / (
                cfg.optim.accumulate * self.parallel.world
            )  # gradients add up, over the ranks too
            share.backward()
            parts.append(torch.stack([out.loss, out.aux_loss, out.z_loss]).detach())
        reduce_gradients(self.model, self.parallel)
        grad_norm = clip_gradients(self.model, self.parallel, cfg.optim.clip or math.inf)
        set_lr(self.optimizer, lr_at(self.step, cfg.optim))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens_LE = torch.stack([router.update_bias() for router in self.model.routers()])
        self.step += 1
        return torch.cat([torch.stack(parts).mean(0), grad_norm.detach().view(1)]), tokens_LE

    @torch.no_grad()
    def evaluate(self, tokens: int) -> Evaluation:
        """Cross entropy over up to `tokens` validation tokens, the same ones each time."""
        block, batch, parallel = self.cfg.model.block, self.batch, self.parallel
        starts = val_starts(len(self.corpus.val), block, tokens)
        # A block for each rank and round. In the last, those that have none compute one that does not count, since a
        # forward pass may need all ranks, each with as many tokens.
        rounds = [starts[i : i + parallel.world] for i in range(0, len(starts), parallel.world)]
        self.model.eval()
        nats = torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(0, len(rounds), batch):
            mine = [r[parallel.rank] for r in rounds[i : i + batch] if parallel.rank < len(r)]
            idle = len(rounds[i : i + batch]) - len(mine)
            x, y = stack_blocks(self.corpus.val, mine + starts[:idle], block, self.device)
            out = self.model(x, y)
            if idle:
                logits, y = out.logits[: len(mine)], y[: len(mine)]
                nats += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").double()
            else:
                nats += out.loss.double() * y.numel()
        parallel.sum_(nats)
        self.model.train()
        size = self.corpus.bytes_of(np.concatenate([self.corpus.val[s + 1 : s + 1 + block] for s in starts]))
        count = len(starts) * block
        total = nats.item()
        return Evaluation(total / count, None if size is None else total / math.log(2) / size, count)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self, run_dir: Path, progress: Progress) -> Result:
        """Train from the current step to the last one; on Ctrl-C or SIGTERM save, and return unfinished."""
        cfg, last = self.cfg, self.cfg.optim.steps
        log = RunLog(run_dir, resume_step=self.step) if self.parallel.is_main else NoLog()
        window: list[tuple[Tensor, Tensor]] = []
        evaluation: Evaluation | None = None
        saved_step = self.step
        try:
            with _stop_on_signal() as stop, progress:
                while self.step < last and not self._asked_to_stop(stop):
                    with self.timer:
                        window.append(self.train_step())
                        self.timer.tokens += cfg.tokens_per_step
                    done = self.step == last
                    if self.step % cfg.log_every == 0 or done:
                        with self.timer:  # reading the losses waits for the GPU: part of the step
                            rows = self._scalars(window)
                        self._log(log, rows, window, progress)
                        self._refuse_nan(rows)
                        window.clear()
                    if self.step % cfg.eval_every == 0 or done:
                        evaluation = self.evaluate(cfg.final_eval_tokens if done else cfg.eval_tokens)
                        log.write(self.step, val_loss=evaluation.loss, val_bpb=evaluation.bpb)
                        progress.evaluated(self.step, evaluation.loss, evaluation.bpb)
                    if self.step % cfg.save_every == 0 or done:
                        self._refuse_nan(self._scalars(window))
                        self.save(run_dir)
                        saved_step = self.step
                if saved_step < self.step:
                    self._refuse_nan(self._scalars(window))
                    self.save(run_dir)
        finally:
            log.close()
        return Result(run_dir, self.step, evaluation if self.step == last else None, self.step == last)

    def _asked_to_stop(self, stop: threading.Event) -> bool:
        """Several processes agree on it where they wait for each other anyway: after a record is logged."""
        if not self.parallel.distributed:
            return stop.is_set()
        return self.step % self.cfg.log_every == 0 and self.parallel.any(stop.is_set())

    def _log(
        self, log: RunLog | NoLog, rows: Tensor, window: list[tuple[Tensor, Tensor]], progress: Progress
    ) -> None:
        values = dict(zip(SCALARS, rows.mean(0).tolist(), strict=True))
        rate = self.timer.take()
        lr = self.optimizer.param_groups[0]["lr"]
        log.write(
            self.step,
            **values,
            lr=float(lr),
            tokens=self.step * self.cfg.tokens_per_step,
            tokens_per_s=rate,
            expert_tokens=torch.stack([tokens_LE for _, tokens_LE in window]).sum(0).tolist(),
            **dropped_rows(self.model, self.parallel),
        )
        progress.stepped(self.step, values["train_loss"], rate)

    def _scalars(self, window: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(steps, 4) on the CPU: `SCALARS` of the steps in the window, of all ranks. Waits for them."""
        if not window:
            return torch.empty(0, len(SCALARS))
        return (
            self.parallel.sum_(torch.stack([scalars for scalars, _ in window])) / self.parallel.world
        ).cpu()

    def _refuse_nan(self, rows: Tensor) -> None:
        """Stop (FloatingPointError) when a loss or gradient norm, (steps, 4) as `SCALARS` names them, is not finite."""
        for row in rows.tolist():
            if not all(map(math.isfinite, row)):
                values = ", ".join(f"{name} {value:.4g}" for name, value in zip(SCALARS, row, strict=True))
                raise FloatingPointError(
                    f"not finite by step {self.step}: {values}; the last checkpoint is intact, a lower --lr may help"
                )

    def describe(self) -> str:
        """Size of the model in words."""
        total, active = parameter_counts(self.model, self.cfg.model)
        flops = flops_per_token(self.model, self.cfg.model)
        return (
            f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active, {flops / 1e6:.1f} MFLOP per token"
        )

    # --- state --------------------------------------------------------------------------------------------------------

    def save(self, run_dir: Path) -> Path:
        return save_checkpoint(run_dir / "checkpoints", self.step, self.state_dict(), self.cfg.keep)

    def state_dict(self) -> State:
        """Everything the rest of the run depends on: plain values, and this process's part of the tensors."""
        return {
            "step": self.step,
            "data_position": self.sampler.position,
            "data_sha256": self.corpus.info.sha256,
            "world": self.parallel.world,
            "device": self.device.type,
            "model": self.model.state_dict(),
            "optimizer": run_state.optimizer_state(self.model, self.optimizer),
            **run_state.random_state(self.parallel),
        }

    def load_state_dict(self, state: State) -> None:
        """Continue where `state` was taken; it is taken over, not copied.

        Raises:
            CheckpointError: if the data are others, or the model does not fit.
        """
        self._refuse_other_data(state)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise CheckpointError(
                f"the checkpoint is of another model: {str(error).splitlines()[1].strip()}"
            ) from error
        run_state.set_optimizer_state(self.model, self.optimizer, state["optimizer"])
        self.step, self.sampler.position = state["step"], state["data_position"]
        run_state.set_random_state(state, self.cfg.seed, self.parallel)

    def resume(self, checkpoint: Path) -> None:
        """Load a checkpoint folder, of any number of processes. A failure leaves the trainer as it was."""
        values = read_values(checkpoint)
        self._refuse_other_data(values)
        into = run_state.empty_state(self.model, self.parallel, values)
        self.load_state_dict(load_checkpoint(checkpoint, into))

    def _refuse_other_data(self, values: State) -> None:
        theirs, mine = values["data_sha256"], self.corpus.info.sha256
        if theirs != mine:
            raise CheckpointError(
                f"the checkpoint was trained on data with SHA-256 {theirs[:16]}..., "
                f"got {mine[:16]}...: {self.corpus.info.source} has changed"
            )


@contextmanager
def _stop_on_signal() -> Generator[threading.Event]:
    """Set the event on Ctrl-C or SIGTERM. A second Ctrl-C ends the process as usual; launchers may send SIGTERM twice."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may install handlers
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, _: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            restore()

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
