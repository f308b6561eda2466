"""Checkpoints of one process: whole or not there, refused when damaged. tests/distributed has those of several."""

import hashlib
import importlib
import os
import pickle
import signal
import subprocess

import pytest
import torch
from mx_trainer.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from mx_trainer.errors import CheckpointError
from support.checkpoints import whole_state


def save(root, step: int, keep: int = 2):
    return save_checkpoint(root, step, {"step": step, "model": {"x": torch.arange(1000)}}, keep)


def load(folder):
    return load_checkpoint(folder, {"model": {"x": torch.zeros(1000, dtype=torch.int64)}})


def test_round_trip(tmp_path):
    state = {
        "step": 3, "name": "x",
        "model": {"a.b": torch.randn(5, 3), "bias": torch.randn(2).bfloat16(), "n": torch.tensor(7)},
        "rng": {"cpu": torch.get_rng_state()},
    }  # fmt: skip
    folder = save_checkpoint(tmp_path, 3, state, 1)
    into = {part: {k: torch.zeros_like(v) for k, v in state[part].items()} for part in ("model", "rng")}
    loaded = load_checkpoint(folder, into)
    assert loaded.keys() == state.keys()
    assert (loaded["step"], loaded["name"]) == (3, "x")
    for part in ("model", "rng"):
        for name, tensor in state[part].items():
            assert torch.equal(loaded[part][name], tensor), name
            assert loaded[part][name].dtype == tensor.dtype
    only_model = load_checkpoint(folder, {"model": into["model"]})
    assert "rng" not in only_model


def test_standard_tools_read_it(tmp_path):
    folder = save(tmp_path, 3)
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True).returncode == 0
    assert torch.equal(whole_state(folder)["model.x"], torch.arange(1000))  # torch's own converter


def test_old_and_later_ones_go(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000030"]
    save(tmp_path, 25)  # a run continued from 20: what came after belongs to another history
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000020", "step-00000025"]
    save(tmp_path, 25, keep=1)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000025"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000025"]


def test_a_half_written_one_is_not_seen(tmp_path):
    good = save(tmp_path / "checkpoints", 10)
    for name in (".step-00000020.tmp", ".step-00000005.old"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    assert find_checkpoint(tmp_path) == good
    assert save(tmp_path / "checkpoints", 20).name == "step-00000020"
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")]


def test_killed_at_any_moment(tmp_path):
    """SIGKILL before the first, the second, ... change of the file system: what is listed can always be loaded."""
    changes = {"os": ("mkdir", "rename", "rmdir", "unlink", "fsync"), "builtins": ("open",), "io": ("open",)}
    left = []
    for moment in range(200):
        root = tmp_path / str(moment)
        for step in (10, 20):
            save(root, step)
        pid = os.fork()
        if pid == 0:
            _die_before(changes, moment)
            save(root, 30)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        for folder in list_checkpoints(root):
            assert torch.equal(load(folder)["model"]["x"], torch.arange(1000))
        left.append([p.name[-2:] for p in list_checkpoints(root)])
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert status == 0, "the save has more than 200 changes?"
    assert moment > 15
    assert left[0] == ["10", "20"]
    assert ["10", "20", "30"] in left
    assert left[-1] == ["20", "30"]


def _die_before(changes: dict[str, tuple[str, ...]], moment: int) -> None:
    count = [0]
    for module_name, names in changes.items():
        module = importlib.import_module(module_name)
        for name in names:
            original = getattr(module, name)

            def counted(*args, original=original, **kwargs):
                if count[0] == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
                return original(*args, **kwargs)

            setattr(module, name, counted)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "values.json", "SHA256SUMS"])
@pytest.mark.parametrize("position", [0, 70, -40, -2])
def test_a_flipped_bit_is_refused(tmp_path, name, position):
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    data = bytearray((folder / name).read_bytes())
    data[max(position, -len(data)) if position < 0 else min(position, len(data) - 1)] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged.*an older one: .*step-00000010"):
        load(folder)


def test_truncated_and_missing(tmp_path):
    folder = save(tmp_path, 10)
    data = (folder / "__0_0.distcp").read_bytes()
    (folder / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"damaged.*__0_0.distcp does not match its SHA-256"):
        load(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
    (folder / "SHA256SUMS").write_text("")
    with pytest.raises(CheckpointError, match=r"damaged.*SHA256SUMS is not whole"):
        load(folder)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no such"):
        find_checkpoint(tmp_path / "step-00000099")


def test_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 10)
    for into, complaint in (
        ({"x": torch.zeros(999)}, r"model.x: expected \(999,\), got \(1000,\)"),
        ({"x": torch.zeros(1000), "y": torch.zeros(1)}, r"model.y: expected \(1,\), got none"),
        ({"y": torch.zeros(1)}, "model.y: expected"),
    ):
        with pytest.raises(CheckpointError, match=f"another model: {complaint}"):
            load_checkpoint(folder, {"model": into})


def test_the_older_format_is_refused_by_name(tmp_path):
    folder = tmp_path / "step-00000010"
    folder.mkdir()
    torch.save({}, folder / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt is the format of an older version"):
        load(folder)


def test_no_code_is_run_on_loading(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "run"),))

    folder = save(tmp_path, 10)
    sums = (folder / "SHA256SUMS").read_text()
    evil, metadata = pickle.dumps(Evil()), folder / ".metadata"
    before = hashlib.sha256(metadata.read_bytes()).hexdigest()
    metadata.write_bytes(evil)
    (folder / "SHA256SUMS").write_text(sums.replace(before, hashlib.sha256(evil).hexdigest()))
    with pytest.raises(CheckpointError, match=r"expected descriptions of tensors, got posix\.mkdir"):
        load(folder)
    assert not (tmp_path / "run").exists()
