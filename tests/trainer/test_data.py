"""The corpus: what is read, how it is split, and that batches neither repeat nor drop."""

import os
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_trainer.config import DataConfig
from mx_trainer.data import BlockSampler, load_corpus, load_tokenizer, stack_blocks, val_starts
from mx_trainer.errors import ConfigError
from mx_trainer.tokenizer import SEPARATOR, ByteTokenizer

CPU = torch.device("cpu")


def folder_config(folder: Path, **kw) -> DataConfig:
    return DataConfig(data=str(folder), val_fraction=0.1, **kw)


# --- where text comes from --------------------------------------------------------------------------------------------


def test_the_default_corpus():
    corpus = load_corpus(DataConfig())
    info = corpus.info
    assert info.tokenizer == "bytes"
    assert info.train_bytes + info.val_bytes > 5_000_000
    assert 0.005 < info.val_bytes / info.train_bytes < 0.2
    text = bytes(corpus.train) + bytes(corpus.val)
    argparse_source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    assert text.count(argparse_source) == 1
    assert text.count(b"\0") == info.files
    assert b"class GrammarTests(unittest.TestCase)" not in text  # of Lib/test
    assert load_corpus(DataConfig()).info == info


def test_folder(text_folder, corpus):
    text = bytes(corpus.train) + bytes(corpus.val)
    assert corpus.info.files == 40
    for file in text_folder.rglob("*.txt"):
        if file.name != "with_nul.txt":
            inside = [file.read_bytes() + b"\0" in bytes(part) for part in (corpus.train, corpus.val)]
            assert sorted(inside) == [False, True], file  # whole, in one split
    assert b"text\0text" not in text
    assert b"\xff\xfe" not in text


def test_split_does_not_depend_on_place_or_neighbours(text_folder, corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(text_folder, copy)
    again = load_corpus(folder_config(copy))
    assert again.info.sha256 == corpus.info.sha256
    assert again.folder != corpus.folder
    (copy / "new.txt").write_text("one more file\n")
    more = load_corpus(folder_config(copy))
    old = [set(bytes(part).split(b"\0")) for part in (corpus.train, corpus.val)]
    new = [set(bytes(part).split(b"\0")) for part in (more.train, more.val)]
    assert old[0] <= new[0]
    assert old[1] <= new[1]


def test_a_changed_file_is_seen(text_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(text_folder, copy)
    before = load_corpus(folder_config(copy)).info.sha256
    file = copy / "00.txt"
    stat = file.stat()
    file.write_bytes(b"X" + file.read_bytes()[1:])  # the same size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))
    assert load_corpus(folder_config(copy)).info.sha256 != before


def test_a_single_file_is_split_at_its_tail(tmp_path):
    file = tmp_path / "text.txt"
    text = "aé" * 1000  # the cut must not go through a character
    file.write_text(text)
    corpus = load_corpus(DataConfig(data=str(file), val_fraction=0.2))
    assert bytes(corpus.train).decode() + bytes(corpus.val).decode() == text
    assert 550 < corpus.info.val_bytes < 650


def test_nothing_to_read(tmp_path):
    with pytest.raises(ConfigError, match="existing path, got 'nowhere'"):
        load_corpus(DataConfig(data="nowhere"))
    with pytest.raises(ConfigError, match="no readable text"):
        load_corpus(DataConfig(data=str(tmp_path)))
    (tmp_path / "binary").write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="nothing falls into"):
        load_corpus(DataConfig(data=str(tmp_path)))


def test_an_unwritable_cache_is_named(text_folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="MX_CACHE_DIR"):
        load_corpus(folder_config(text_folder))


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("dé €")) == "dé €"
    assert tokenizer.decode([104, SEPARATOR, 105, 0xFF]) == "hi\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def bpe(text_folder):
    return load_corpus(folder_config(text_folder, tokenizer="bpe", bpe_vocab=600))


def test_bpe(bpe, corpus, text_folder):
    assert bpe.info.vocab == 600
    assert bpe.train.dtype == np.uint16
    assert len(bpe.train) < 0.6 * len(corpus.train)
    tokenizer = load_tokenizer(bpe.folder)
    ids = bpe.val[: int(np.argmax(bpe.val == SEPARATOR))].tolist()
    assert (
        tokenizer.decode(ids).encode() + b"\0" == bytes(corpus.val)[: len(tokenizer.decode(ids).encode()) + 1]
    )
    text = "def f(é):\n\treturn '€'"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bpe_counts_bytes(bpe, corpus):
    assert bpe.bytes_of(bpe.val) == len(corpus.val) == bpe.info.val_bytes
    assert corpus.bytes_of(corpus.val) == len(corpus.val)


def test_bpe_is_deterministic(bpe, text_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    again = load_corpus(folder_config(text_folder, tokenizer="bpe", bpe_vocab=600))
    assert again.folder != bpe.folder
    assert np.array_equal(again.train, bpe.train)


def test_nanogpt_bins(tmp_path):
    rng = np.random.default_rng(0)
    train, val = rng.integers(0, 50257, 5000, np.uint16), rng.integers(0, 50257, 500, np.uint16)
    train.tofile(tmp_path / "train.bin")
    val.tofile(tmp_path / "val.bin")
    corpus = load_corpus(DataConfig(data=str(tmp_path)))
    assert np.array_equal(corpus.train, train)
    assert np.array_equal(corpus.val, val)
    assert corpus.info.vocab == 1 + max(train.max(), val.max())
    assert corpus.bytes_of(val) is None
    assert load_tokenizer(corpus.folder) is None
    known = load_corpus(DataConfig(data=str(tmp_path), bytes_per_token=4.0))
    assert known.bytes_of(val[:100]) == 400
    (tmp_path / "val.bin").unlink()
    with pytest.raises(ConfigError, match=r"val\.bin is missing"):
        load_corpus(DataConfig(data=str(tmp_path)))


def test_one_bin_and_llm_c_header(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    plain, headed = tmp_path / "plain.bin", tmp_path / "headed.bin"
    tokens.tofile(plain)
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, 1000
    headed.write_bytes(header.tobytes() + tokens.tobytes())
    for path in (plain, headed):
        corpus = load_corpus(DataConfig(data=str(path), val_fraction=0.1))
        assert np.array_equal(corpus.train, tokens[:900])
        assert np.array_equal(corpus.val, tokens[900:])


# --- batches ----------------------------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens():
    x, y = stack_blocks(np.arange(100, dtype=np.uint8), [0, 50], 8, CPU)
    assert x.tolist() == [list(range(8)), list(range(50, 58))]
    assert y.tolist() == [list(range(1, 9)), list(range(51, 59))]


@given(st.integers(2, 40), st.integers(0, 500), st.integers(0, 5))
def test_an_epoch_deals_every_block_once(block, extra, seed):
    tokens = np.zeros(2 * block + extra, np.uint8)
    sampler = BlockSampler(tokens, block, seed)
    for _ in range(2):
        starts = sorted(sampler.starts(sampler.blocks))
        assert np.array_equal(np.diff(starts), np.full(sampler.blocks - 1, block))
        assert starts[0] >= 0
        assert starts[-1] + block < len(tokens)  # the last target is inside


def test_epochs_differ_and_seeds_differ():
    tokens = np.zeros(10_000, np.uint8)
    sampler = BlockSampler(tokens, 16, 0)
    first, second = sampler.starts(sampler.blocks), sampler.starts(sampler.blocks)
    assert first != second
    assert first != BlockSampler(tokens, 16, 1).starts(sampler.blocks)
    assert first == BlockSampler(tokens, 16, 0).starts(sampler.blocks)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 30))
def test_ranks_together_deal_what_one_would(world, batch, steps):
    tokens = np.zeros(700, np.uint8)
    ranks = [BlockSampler(tokens, 16, 7, rank=r, world=world) for r in range(world)]
    alone = BlockSampler(tokens, 16, 7)
    for _ in range(steps):
        together = [start for sampler in ranks for start in sampler.starts(batch)]
        assert together == alone.starts(world * batch)


def test_position_is_the_whole_state():
    tokens = np.zeros(700, np.uint8)
    straight = BlockSampler(tokens, 16, 7)
    want = [straight.starts(5) for _ in range(40)]
    for cut in (0, 1, 8, 25):
        resumed = BlockSampler(tokens, 16, 7)
        resumed.position = 5 * cut
        assert [resumed.starts(5) for _ in range(40 - cut)] == want[cut:]


def test_too_short():
    with pytest.raises(ConfigError, match="at least 32 tokens"):
        BlockSampler(np.zeros(31, np.uint8), 16, 0)
    with pytest.raises(ConfigError, match="at least 17 tokens"):
        val_starts(16, 16, 100)


def test_val_starts():
    assert val_starts(17, 16, 1) == [0]
    starts = val_starts(10_001, 16, 1600)
    assert len(set(starts)) == 100
    assert starts[0] == 0
    assert starts[-1] == 9984
    assert val_starts(10_001, 16, 10**9) == list(range(0, 10_000, 16))


def test_config_field_reaches_the_cache_key(text_folder, corpus):
    other = load_corpus(replace(folder_config(text_folder), val_fraction=0.3))
    assert other.info.val_bytes > corpus.info.val_bytes
