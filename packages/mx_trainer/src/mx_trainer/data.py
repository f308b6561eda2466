"""Text to tokens to batches.

A `Corpus` is two memory-mapped token arrays, split by file, with a hash of the bytes that went in. It is built once and
cached. A `BlockSampler` deals its training blocks: every block once per epoch, in an order that depends on seed and
position only, so a resumed run sees exactly what a straight one would, and no two ranks see the same block.
"""

import hashlib
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from mx_kernels.paths import cache_dir
from torch import Tensor

from mx_trainer.config import CORPORA, DataConfig
from mx_trainer.errors import ConfigError
from mx_trainer.tokenizer import SEPARATOR, BPETokenizer, ByteTokenizer, TextTokenizer, apply_bpe, train_bpe

_CACHE_VERSION = 1
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_LLM_C_MAGIC, _LLM_C_HEADER = (
    20240520,
    256,
)  # llm.c's .bin files begin with 256 int32: magic, version, tokens, ...


def load_corpus_info(folder: Path) -> "CorpusInfo":
    """The description in a corpus or run folder."""
    return CorpusInfo(**json.loads((folder / "corpus.json").read_text()))


def load_tokenizer(folder: Path) -> TextTokenizer | None:
    """The tokenizer of a corpus or run folder; None where the data came as tokens (`.bin`)."""
    kind = load_corpus_info(folder).tokenizer
    if kind == "bpe":
        return BPETokenizer(folder / "tokenizer.json")
    return ByteTokenizer() if kind == "bytes" else None


@dataclass(frozen=True)
class CorpusInfo:
    """What is printed, saved with the run, and compared on resume."""

    source: str
    tokenizer: str
    """`bytes`, `bpe`, or `unknown` for `.bin` data."""
    vocab: int
    """Ids are below it."""
    files: int
    train_tokens: int
    val_tokens: int
    train_bytes: int
    val_bytes: int
    """0 where unknown."""
    sha256: str
    """Of the training and validation text (or tokens), separators included."""


@dataclass(frozen=True)
class Corpus:
    """Token arrays (1-D, uint8, uint16 or uint32) and their description."""

    train: np.ndarray
    val: np.ndarray
    info: CorpusInfo
    folder: Path
    bytes_per_id: np.ndarray | None = None
    """(vocab,) for a BPE."""

    def bytes_of(self, targets: np.ndarray) -> float | None:
        """Bytes that these validation targets stand for; None where unknown."""
        if self.bytes_per_id is not None:
            return float(self.bytes_per_id[targets].sum())
        if self.info.val_bytes == 0:
            return None
        return len(targets) * self.info.val_bytes / self.info.val_tokens

    def copy_description(self, run_dir: Path) -> None:
        """Put what sampling needs into a run folder."""
        for name in ("corpus.json", "tokenizer.json"):
            if (self.folder / name).exists():
                shutil.copyfile(self.folder / name, run_dir / name)


def load_corpus(cfg: DataConfig) -> Corpus:
    """Find, tokenise and cache the corpus that `cfg.data` names.

    Raises:
        ConfigError: where there is nothing to read or it cannot be split.
    """
    if cfg.data not in CORPORA:
        path = Path(cfg.data).expanduser()
        if not path.exists():
            raise ConfigError(f"--data must be {', '.join(CORPORA)} or an existing path, got {cfg.data!r}")
        if path.suffix == ".bin" or (path.is_dir() and (path / "train.bin").exists()):
            return _load_bins(path, cfg)
    files = _list_files(cfg)
    if not files:
        raise ConfigError(f"--data {cfg.data}: no readable text files found")
    key = _cache_key(files, cfg)
    folder = cache_dir("corpora") / key
    if not (folder / "corpus.json").exists():
        _build(folder, files, cfg)
    return _open(folder)


def _open(folder: Path) -> Corpus:
    info = load_corpus_info(folder)
    dtype = _token_dtype(info.vocab)
    arrays = (np.memmap(folder / f"{part}.bin", dtype=dtype, mode="r") for part in ("train", "val"))
    train, val = arrays
    sizes = BPETokenizer(folder / "tokenizer.json").bytes_per_id() if info.tokenizer == "bpe" else None
    return Corpus(train, val, info, folder, sizes)


def _token_dtype(vocab: int) -> type:
    return np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32


# --- finding the text -------------------------------------------------------------------------------------------------


def _list_files(cfg: DataConfig) -> list[tuple[str, Path]]:
    """(name, path) of the corpus files, sorted by name; names do not depend on where Python is installed."""
    if cfg.data in CORPORA:
        paths = sysconfig.get_paths()
        files = list(_python_files(Path(paths["stdlib"]), "stdlib"))
        if cfg.data == "site-packages":
            for root in sorted({paths["purelib"], paths["platlib"]}):
                files += _python_files(Path(root), "site-packages")
        return sorted(files)
    path = Path(cfg.data).expanduser()
    if path.is_file():
        return [(path.name, path)]
    return sorted(
        (p.relative_to(path).as_posix(), p)
        for p in path.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )


def _python_files(root: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not _EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            yield f"{prefix}/{relative.as_posix()}", path


def _read_text(path: Path) -> bytes | None:
    """The file's bytes if it is UTF-8 text without NUL, else None."""
    try:
        data = path.read_bytes()
        data.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if SEPARATOR in data or not data else data


def _is_validation(name: str, fraction: float) -> bool:
    """By a hash of the name: adding a file to a folder moves no other file across the split."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < fraction * 2**64


# --- building and caching ---------------------------------------------------------------------------------------------


def _cache_key(files: list[tuple[str, Path]], cfg: DataConfig) -> str:
    """Changes whenever a file is added, removed, resized or rewritten, or the tokens would come out differently."""
    digest = hashlib.sha256()
    tokenizer = (cfg.tokenizer, cfg.bpe_vocab if cfg.tokenizer == "bpe" else 256)
    digest.update(
        json.dumps([_CACHE_VERSION, cfg.data, tokenizer, cfg.val_fraction, cfg.bytes_per_token]).encode()
    )
    for name, path in files:
        stat = path.stat()
        digest.update(f"{name}\0{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _build(folder: Path, files: list[tuple[str, Path]], cfg: DataConfig) -> None:
    """Split, tokenise, and put the result into the cache as `folder`."""
    parts, count = _split(files, cfg.val_fraction)
    for part, text in parts.items():
        if not text:
            raise ConfigError(
                f"--data {cfg.data}: nothing falls into the {part} split; change --val-fraction"
            )

    def write(scratch: Path) -> None:
        vocab = 256
        if cfg.tokenizer == "bpe":
            vocab = train_bpe(parts["train"], cfg.bpe_vocab, scratch / "tokenizer.json")
        tokens = {}
        for part, text in parts.items():
            if cfg.tokenizer == "bpe":
                ids = apply_bpe(text, scratch / "tokenizer.json")
            else:
                ids = np.frombuffer(text, np.uint8)
            tokens[part] = len(ids)
            ids.astype(_token_dtype(vocab)).tofile(scratch / f"{part}.bin")
        info = CorpusInfo(
            source=cfg.data,
            tokenizer=cfg.tokenizer,
            vocab=vocab,
            files=count,
            train_tokens=tokens["train"],
            val_tokens=tokens["val"],
            train_bytes=len(parts["train"]),
            val_bytes=len(parts["val"]),
            sha256=hashlib.sha256(parts["train"] + parts["val"]).hexdigest(),
        )
        _write_info(scratch, info)

    _publish(folder, write)


def _write_info(folder: Path, info: CorpusInfo) -> None:
    (folder / "corpus.json").write_text(json.dumps(asdict(info), indent=2) + "\n")


def _publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside `folder` and rename it into place: no reader ever sees half of one."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    except OSError as error:
        raise ConfigError(f"cannot write the corpus cache ({error}); set MX_CACHE_DIR") from error
    try:
        write(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not (folder / "corpus.json").exists():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _split(files: list[tuple[str, Path]], fraction: float) -> tuple[dict[str, bytes], int]:
    """Training and validation text: by file, or a single file's tail; and how many files were readable."""
    separator = bytes([SEPARATOR])
    texts = [(name, text) for name, path in files if (text := _read_text(path)) is not None]
    if len(texts) == 1:
        text = texts[0][1]
        cut = int(len(text) * (1 - fraction))
        while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:  # not inside a UTF-8 character
            cut -= 1
        return {"train": text[:cut], "val": text[cut:]}, 1
    train = b"".join(text + separator for name, text in texts if not _is_validation(name, fraction))
    val = b"".join(text + separator for name, text in texts if _is_validation(name, fraction))
    return {"train": train, "val": val}, len(texts)


# --- token files ------------------------------------------------------------------------------------------------------


def _load_bins(path: Path, cfg: DataConfig) -> Corpus:
    """NanoGPT's (raw uint16) and llm.c's (with a header) token files; a single file is split at its tail."""
    if path.is_dir():
        files = [("train", path / "train.bin"), ("val", path / "val.bin")]
        if not files[1][1].exists():
            raise ConfigError(f"--data {path}: train.bin is there, val.bin is missing")
        train, val = (_open_bin(file) for _, file in files)
    else:
        files = [("all", path)]
        tokens = _open_bin(path)
        cut = int(len(tokens) * (1 - cfg.val_fraction))
        train, val = tokens[:cut], tokens[cut:]
    folder = cache_dir("corpora") / _cache_key(files, cfg)
    if not (folder / "corpus.json").exists():  # reading all of it takes minutes for a large one
        digest = hashlib.sha256(train.data)
        digest.update(val.data)
        info = CorpusInfo(
            source=str(path),
            tokenizer="unknown",
            vocab=1 + max(int(t.max(initial=0)) for t in (train, val)),
            files=len(files),
            train_tokens=len(train),
            val_tokens=len(val),
            train_bytes=round(len(train) * cfg.bytes_per_token),
            val_bytes=round(len(val) * cfg.bytes_per_token),
            sha256=digest.hexdigest(),
        )
        _publish(folder, lambda scratch: _write_info(scratch, info))
    return Corpus(train, val, load_corpus_info(folder), folder)


def _open_bin(path: Path) -> np.ndarray:
    if path.stat().st_size < 2:
        raise ConfigError(f"--data: {path} holds no tokens")
    head = np.fromfile(path, dtype=np.int32, count=3)
    if len(head) == 3 and head[0] == _LLM_C_MAGIC:
        return np.memmap(path, dtype=np.uint16, mode="r", offset=4 * _LLM_C_HEADER, shape=(int(head[2]),))
    return np.memmap(path, dtype=np.uint16, mode="r", shape=(path.stat().st_size // 2,))


# --- batches ----------------------------------------------------------------------------------------------------------


class BlockSampler:
    """Deals blocks of `block` tokens and their targets.

    Sample i belongs to epoch i // n; each epoch shifts the block boundaries and permutes the n blocks by (seed, epoch).
    Of each batch of `batch` samples per rank, rank r takes the r-th run, so ranks together deal what one would.
    """

    def __init__(self, tokens: np.ndarray, block: int, seed: int, *, rank: int = 0, world: int = 1):
        assert 0 <= rank < world, (rank, world)
        self.blocks = (
            len(tokens) - block
        ) // block  # of any shift below `block`, one target past the end included
        if self.blocks < 1:
            raise ConfigError(
                f"the training data must hold at least {2 * block} tokens (two blocks), got {len(tokens)}"
            )
        self._tokens, self._block, self._seed = tokens, block, seed
        self._rank, self._world = rank, world
        self.position = 0
        """Samples dealt so far to all ranks: the whole state."""
        self._epoch = -1
        self._order = np.empty(0, np.int64)
        self._shift = 0

    def starts(self, batch: int) -> list[int]:
        """Token offsets of this rank's next `batch` samples; moves the position past all ranks' samples."""
        first = self.position + self._rank * batch
        self.position += self._world * batch
        return [self._start(i) for i in range(first, first + batch)]

    def _start(self, sample: int) -> int:
        epoch, index = divmod(sample, self.blocks)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._order, self._shift, self._epoch = (
                rng.permutation(self.blocks),
                int(rng.integers(self._block)),
                epoch,
            )
        return self._shift + int(self._order[index]) * self._block

    def next_batch(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (batch, block) int64 on `device`."""
        return stack_blocks(self._tokens, self.starts(batch), self._block, device)


def stack_blocks(
    tokens: np.ndarray, starts: list[int], block: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets (len(starts), block) int64 of the blocks that begin at `starts`."""
    rows = torch.from_numpy(np.stack([tokens[s : s + block + 1] for s in starts]).astype(np.int64))
    if device.type == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


def val_starts(tokens: int, block: int, budget: int) -> list[int]:
    """Starts of disjoint validation blocks, evenly spread, of at most `budget` tokens together (one block at least)."""
    available = (tokens - 1) // block
    if available < 1:
        raise ConfigError(
            f"the validation data must hold at least {block + 1} tokens (one block), got {tokens}"
        )
    count = max(1, min(available, budget // block))
    return [int(i) * block for i in np.linspace(0, available - 1, count).round()]
