"""Machine code of the Blackwell GEMM: what every tile's kernel compiles to, on a machine without a GPU.

    python tools/sass/machine_code.py [--target sm_103a] [--mode fprop] [--format mxfp8_e4m3] [--out bf16] [--csv FILE]

For every tile: registers, stack and spills, instructions in all and in one trip of the main loop (the loop around the
MMAs of the MMA warp), tensor-core, TMA and barrier instructions in that loop and in all, stages, shared memory, TMEM.
Needs nvdisasm and cuobjdump: on the PATH, from the packages nvidia-cuda-nvdisasm and nvidia-cuda-cuobjdump, or Triton's.
"""

import argparse
import csv
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mx_kernels.sm100.config import TMEM_COLUMNS, GemmKey, TileConfig

TILES = (
    TileConfig(128, 64, 1),
    TileConfig(128, 128, 1),
    TileConfig(128, 192, 1),
    TileConfig(128, 256, 1),
    TileConfig(256, 64),
    TileConfig(256, 128),
    TileConfig(256, 192),
    TileConfig(256, 256),
    TileConfig(256, 256, 2, 2),
    TileConfig(256, 256, slab_bytes=64),
)

#: What the columns of the table count: SASS mnemonics by their first part.
MMA = ("UTCQMMA", "UTCHMMA")  # block-scaled (kind::mxf8f6f4), kind::f16
SCALE_COPY = "UTCCP"
BARRIER = "SYNCS"


@dataclass(frozen=True)
class MachineCode:
    """One compiled kernel."""

    registers: int
    stack_bytes: int
    instructions: int
    local: int  # loads and stores of local memory: spills, or arrays that did not fit registers
    opcodes: Counter[str]  # all instructions, by the mnemonic's first part
    loop: Counter[str]  # those of one trip of the main loop

    @property
    def mma(self) -> int:
        """MMAs of one K tile."""
        return sum(self.loop[name] for name in MMA)


def compile_cubin(key: GemmKey, target: str) -> bytes:
    """The kernel of this key, cross-compiled."""
    import cutlass.cute as cute
    from mx_kernels.sm100.gemm import GroupedGemm

    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {target} --keep-cubin --dump-dir {folder}"
        return cute.compile(*GroupedGemm(key).build(), options=options).__cubin__


def find_tool(name: str) -> str | None:
    """Path of nvdisasm or cuobjdump."""
    if path := shutil.which(name):
        return path
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for base in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(base) / folder / name).exists():
                return str(path)
    return None


def run_tool(name: str, *arguments: str) -> str:
    tool = find_tool(name)
    if tool is None:
        raise FileNotFoundError(f"{name}: expected it on the PATH or in the package nvidia-cuda-{name}")
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


def machine_code(cubin: bytes) -> MachineCode:
    """Disassemble and count."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = run_tool("nvdisasm", "-c", file.name)
        usage = run_tool("cuobjdump", "-res-usage", file.name)
    code, labels = [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?(\S+)(.*)", line):
            code.append((instruction[1], instruction[2]))
    opcodes = Counter(name.split(".")[0] for name, _ in code)
    return MachineCode(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        stack_bytes=int(re.search(r"STACK:(\d+)", usage)[1]),
        instructions=len(code) - opcodes["NOP"],
        local=opcodes["LDL"] + opcodes["STL"],
        opcodes=opcodes,
        loop=Counter(name.split(".")[0] for name, _ in main_loop(code, labels)),
    )


def main_loop(code: list[tuple[str, str]], labels: dict[str, int]) -> list[tuple[str, str]]:
    """The smallest loop around all MMAs: from a label to the last branch back to it."""
    where = [i for i, (name, _) in enumerate(code) if name.split(".")[0] in MMA]
    loops = []
    for i, (name, operands) in enumerate(code):
        target = re.search(r"`\((\.L_x_\d+)\)", operands)
        if name.startswith("BRA") and target and labels.get(target[1], i + 1) <= where[0] and i > where[-1]:
            loops.append((labels[target[1]], i + 1))
    start, end = min(loops, key=lambda loop: loop[1] - loop[0])
    return code[start:end]


def row(key: GemmKey, code: MachineCode) -> dict[str, object]:
    """A line of the table."""
    memory = key.memory
    return {
        "tile": str(key.tile),
        "registers": code.registers,
        "stack and spills": code.stack_bytes + code.local,
        "instructions": code.instructions,
        "SYNCS": code.opcodes[BARRIER],
        "main loop": sum(code.loop.values()) - code.loop["NOP"],
        "MMA": code.mma,
        "UTCCP": code.loop[SCALE_COPY],
        "UTMALDG": code.opcodes["UTMALDG"],
        "stages": memory.stages,
        "smem, bytes": memory.smem_bytes,
        "accumulators": "2, sharing columns" if memory.acc_shared else "2",
        "TMEM columns": TMEM_COLUMNS if memory.acc_shared else 2 * key.tile.tile_n + memory.scale_columns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sm_100a", choices=("sm_100a", "sm_103a"))
    parser.add_argument("--mode", default="fprop", choices=("fprop", "dgrad", "wgrad"))
    parser.add_argument("--format", default="mxfp8_e4m3")
    parser.add_argument("--out", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--csv", type=Path, help="also write the table there")
    options = parser.parse_args()
    rows = []
    for tile in TILES:
        key = GemmKey(options.mode, options.format, options.format, options.out, True, True, False, tile)
        rows.append(row(key, machine_code(compile_cubin(key, options.target))))
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for line in rows:
        print("| " + " | ".join(map(str, line.values())) + " |")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
