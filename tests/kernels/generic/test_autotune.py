"""Choosing by measurement, with timers of the tests': what is measured, what is remembered and where."""

import contextlib
import logging

import pytest
import torch
from mx_kernels import arch
from mx_kernels.generic import autotune
from mx_kernels.problem import GemmProblem
from mx_kernels.sm100.config import TILES, TileConfig
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
A, B, C = TILES[:3]


class Stopwatch:
    """A timer that runs the candidate and then says what it was told about it."""

    def __init__(self, seconds):
        self.seconds, self.ran = seconds, []

    def run(self, tile):
        self.ran.append(tile)
        if self.seconds[tile] is None:
            raise RuntimeError("CUDA out of memory")

    def __call__(self, run, device):
        run()
        return self.seconds[self.ran[-1]]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty memory and disk, and no switch in the environment."""
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MX_AUTOTUNE", raising=False)
    monkeypatch.delenv("MX_DISK_CACHE", raising=False)
    autotune._in_environment.cache_clear()
    monkeypatch.setattr(autotune, "_chosen", {})
    yield
    autotune._in_environment.cache_clear()


def best(watch, problem_class="class", candidates=(A, B, C), target="sm_100a", sms=148):
    with arch.emulated(target, sms), autotune.enabled(watch):
        return autotune.best(problem_class, CPU, lambda: candidates, watch.run, A)


def new_process():
    autotune._chosen.clear()


def test_the_fastest_is_taken_and_remembered(tmp_path):
    watch = Stopwatch({A: 3e-3, B: 1e-3, C: 2e-3})
    assert best(watch) == B
    assert watch.ran == [A, B, C]
    assert best(watch) == B
    new_process()
    assert best(watch) == B
    assert watch.ran == [A, B, C], "measured again"
    (file,) = (f for f in tmp_path.rglob("*") if f.is_file())
    assert file.parent.name.count("sm_100a") == 1
    assert file.suffix == ".json"


def test_another_class_gpu_or_target_is_measured_anew():
    watch = Stopwatch({A: 3e-3, B: 1e-3, C: 2e-3})
    best(watch)
    for change in ({"problem_class": "other"}, {"target": "sm_103a"}, {"sms": 160}):
        watch.ran.clear()
        best(watch, **change)
        assert watch.ran == [A, B, C], change


def test_candidates_that_fail_are_left_out(caplog):
    assert best(Stopwatch({A: 3e-3, B: None, C: 2e-3})) == C
    assert "out of memory" in caplog.text
    assert best(Stopwatch(dict.fromkeys((A, B, C))), "all fail") == A  # the default


def test_a_broken_or_outdated_record_is_measured_anew(tmp_path):
    watch = Stopwatch({A: 3e-3, B: 1e-3, C: 2e-3})
    best(watch)
    (file,) = (f for f in tmp_path.rglob("*") if f.is_file())
    for text in ("{", "[]", '{"chosen": "TileConfig(tile_m=512)"}'):
        file.write_text(text)
        new_process()
        watch.ran.clear()
        assert best(watch) == B
        assert watch.ran == [A, B, C]


def test_without_a_disk(monkeypatch, tmp_path):
    watch = Stopwatch({A: 3e-3, B: 1e-3, C: 2e-3})
    monkeypatch.setenv("MX_DISK_CACHE", "0")
    assert best(watch) == best(watch) == B
    assert watch.ran == [A, B, C]
    assert not any(tmp_path.iterdir())
    monkeypatch.delenv("MX_DISK_CACHE")
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("MX_CACHE_DIR", str(blocked))
    new_process()
    assert best(watch) == B


def test_switch(monkeypatch):
    assert not autotune.active()
    with autotune.enabled():
        assert autotune.active()
    assert not autotune.active()
    monkeypatch.setenv("MX_AUTOTUNE", "1")
    autotune._in_environment.cache_clear()
    assert autotune.active()


def test_device_time_is_not_measured_where_there_is_no_device(caplog):
    """The environment's switch inside an emulated GPU: the estimate's tile, and nothing recorded."""
    caplog.set_level(logging.INFO)
    with arch.emulated("sm_100a", 148), autotune.enabled():
        assert autotune.best("class", CPU, lambda: (A, B), pytest.fail, B) == B
    assert not autotune._chosen


@pytest.mark.parametrize(("rows", "upper"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_rows_class(rows, upper):
    assert autotune.rows_class(rows) == upper


def test_estimate_orders_what_is_measured():
    from mx_kernels.sm100 import config

    arguments = ("fprop", "mxfp8_e4m3", 131_072, 8, 7168, 2048, 148)
    tiles = config.candidates(*arguments)
    assert config.choose_tile(*arguments) in tiles
    assert TileConfig(256, 256, 2, 2) in tiles
    assert TileConfig(128, 64, 1) not in tiles
    assert 2 <= len(tiles) <= len(config.TILES) + len(config.VARIANTS)
    clocks = [config.estimated_clocks(tile, *arguments) for tile in tiles]
    assert clocks == sorted(clocks)
    assert config.candidates("fprop", "mxfp8_e4m3", 128, 1, 64, 64, 1)[0].cluster_size == 1


def test_hopper_measures_what_has_a_kernel(monkeypatch):
    """The planted timer's choice is what runs, and the result is right."""
    import ptxsim
    from mx_kernels.sm90 import config, gemm_backend

    from kernels.gemm_cases import Gemm

    mx = GemmProblem("dgrad", "mxfp8_e4m3", "mxfp8_e4m3", torch.float32)
    assert {(tile.tile_m, tile.tile_n) for tile in gemm_backend._candidates(mx)} == {(256, 128), (128, 128)}
    plain = GemmProblem("fprop", "bf16", "bf16", torch.bfloat16)
    assert gemm_backend._candidates(plain) == config.TILES

    tiles = [config.TileConfig(256, 128), config.TileConfig(128, 128, cluster_m=2)]
    monkeypatch.setattr(gemm_backend, "_candidates", lambda problem: tiles)
    seconds = iter([2.0, 1.0])

    def timer(run, device):
        run()
        return next(seconds)

    case = Gemm("fprop", (40, 0, 30), 136, 72)
    a, b = case.operands()
    with ptxsim.gpu("sm_90a", sms=2) as gpu, autotune.enabled(timer):
        got = case.run(a, b)
    assert torch.equal(got, case.expected(a, b).to(case.out_dtype))
    assert [launch.config.cluster[0] for launch in gpu.launches] == [1, 2, 2]


def test_time_is_taken_on_the_stream_of_the_tensors_device(monkeypatch):
    current, recorded_on = [0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            recorded_on.append(current[0])

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 2.0

    @contextlib.contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode():
        assert autotune.device_seconds(lambda: None, torch.device("cuda", 1)) == 2e-3
    assert set(recorded_on) == {1}
    assert current == [0]
