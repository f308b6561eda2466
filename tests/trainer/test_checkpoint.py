import json

import pytest
import torch
from mx_trainer.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from mx_trainer.errors import CheckpointError


def save(root, step: int, keep: int = 2):
    return save_checkpoint(root, step, {"step": step, "x": torch.arange(1000)}, keep)


def test_round_trip(tmp_path):
    state = {"a": torch.randn(5), "b": {"c": [1, 2.5, None]}, "rng": torch.get_rng_state()}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 3, state, 1))
    assert torch.equal(loaded["a"], state["a"])
    assert loaded["b"] == state["b"]
    assert torch.equal(loaded["rng"], state["rng"])


def test_old_and_later_ones_go(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]
    save(tmp_path, 25)  # a run continued from 20: what came after belongs to another history
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    save(tmp_path, 25, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000025"]


def test_a_half_written_one_is_not_seen(tmp_path):
    good = save(tmp_path / "checkpoints", 10)
    half = tmp_path / "checkpoints" / ".step-00000020.tmp"
    half.mkdir()
    (half / "state.pt").write_bytes(b"half")
    assert find_checkpoint(tmp_path) == good
    assert save(tmp_path / "checkpoints", 20).name == "step-00000020"
    assert not half.exists()


@pytest.mark.parametrize("position", [0, 200, -300, -1])
def test_a_flipped_bit_is_refused(tmp_path, position):
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    data = bytearray((folder / "state.pt").read_bytes())
    data[position] ^= 1
    (folder / "state.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged.*SHA-256.*older one: .*step-00000010"):
        load_checkpoint(folder)


def test_truncated_and_missing(tmp_path):
    folder = save(tmp_path, 10)
    data = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
    (folder / "manifest.json").write_text(json.dumps({"step": 10}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such"):
        find_checkpoint(tmp_path / "step-00000099")


def test_no_code_is_run_on_loading(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    folder = save_checkpoint(tmp_path, 1, {"x": Evil()}, 1)
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load_checkpoint(folder)
