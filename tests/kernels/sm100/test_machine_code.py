"""Machine code of the kernels, cross-compiled: registers, no spills, the tensor instructions of a main-loop trip."""

import importlib.util
import sys
from pathlib import Path

import pytest
from mx_kernels.sm100.config import GemmKey, TileConfig

from kernels.sm100.cases import MODES, TILES

SOURCE = Path(__file__).parents[3] / "tools" / "sass" / "machine_code.py"
spec = importlib.util.spec_from_file_location("machine_code", SOURCE)
machine_code = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = machine_code
spec.loader.exec_module(machine_code)

pytestmark = pytest.mark.skipif(
    not (machine_code.find_tool("nvdisasm") and machine_code.find_tool("cuobjdump")),
    reason="needs nvdisasm and cuobjdump (packages nvidia-cuda-nvdisasm, nvidia-cuda-cuobjdump)",
)

LAUNCH_THREADS = 7 * 32
REGISTER_FILE = 65_536
E4M3 = "mxfp8_e4m3"


def check(key: GemmKey, target: str) -> None:
    code = machine_code.machine_code(machine_code.compile_cubin(key, target))
    assert code.registers * LAUNCH_THREADS <= REGISTER_FILE
    assert code.registers <= 128, "more than the epilogue's subtile explains"
    assert code.stack_bytes == 0
    assert code.local == 0
    mma = "UTCQMMA" if key.scaled else "UTCHMMA"
    assert code.loop[mma] == code.opcodes[mma] == 4  # K tile of 128 bytes, 32 bytes to an MMA
    assert code.loop["UTCCP"] == (1 + key.memory.sfb_tiles if key.scaled else 0)
    loads = code.opcodes["UTMALDG"]
    assert loads >= (4 if key.scaled else 2)
    assert code.opcodes["LDTM"] == key.tile.tile_n // key.store_n
    assert sum(code.loop.values()) <= 64, "instructions of the MMA warp for one K tile"


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    ("mode", "format", "out", "tile"),
    [
        ("fprop", E4M3, "bf16", TileConfig(256, 256)),
        ("dgrad", E4M3, "bf16", TileConfig(128, 192, 1)),
        ("wgrad", E4M3, "fp32", TileConfig(256, 256, 2, 2)),
        ("wgrad", "bf16", "bf16", TileConfig(256, 128)),
    ],
    ids=str,
)
def test_no_spills_and_the_expected_instructions(mode, format, out, tile, target):
    check(GemmKey(mode, format, format, out, True, True, False, tile), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kernel(mode, tile, target):
    for format in (E4M3, "bf16"):
        for out in ("bf16", "fp32"):
            for aligned in (True, False) if mode != "wgrad" or format == "bf16" else (True,):
                check(GemmKey(mode, format, format, out, aligned, True, False, tile), target)
