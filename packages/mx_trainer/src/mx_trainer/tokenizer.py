"""Bytes or BPE: text to token ids and back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import ByteLevelBPETokenizer, Tokenizer

SEPARATOR = 0
"""Token between two files, in both tokenizers. As a byte it is NUL, and files that hold one are left out."""


class TextTokenizer(Protocol):
    """What sampling needs from a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i != SEPARATOR).decode(errors="replace")


class BPETokenizer:
    """A byte-level BPE saved by the `tokenizers` library."""

    def __init__(self, path: Path):
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def bytes_per_id(self) -> np.ndarray:
        """Bytes (vocab,) int64 that each id stands for: the byte-level alphabet has one character per byte."""
        vocab = self._tokenizer.get_vocab()
        sizes = np.zeros(max(vocab.values()) + 1, dtype=np.int64)
        for token, i in vocab.items():
            sizes[i] = len(token)
        sizes[SEPARATOR] = 1
        return sizes


def _documents(text: bytes) -> Iterator[str]:
    yield from (t.decode() for t in text.split(bytes([SEPARATOR])) if t)


def train_bpe(text: bytes, vocab: int, path: Path) -> int:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        _documents(text), vocab_size=vocab, special_tokens=["<|separator|>"], show_progress=False
    )
    assert tokenizer.token_to_id("<|separator|>") == SEPARATOR
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def apply_bpe(text: bytes, path: Path) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(path))
    pieces = []
    for encoding in tokenizer.encode_batch(list(_documents(text))):
        pieces += [np.asarray(encoding.ids, np.uint32), np.asarray([SEPARATOR], np.uint32)]
    return np.concatenate(pieces)
