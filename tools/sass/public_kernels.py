"""Machine code of a public block-scaled GEMM in the same DSL, compiled the same way: a yardstick for machine_code.py.

    uv run --with quack-kernels==0.6.5 python tools/sass/public_kernels.py

QuACK (Dao-AILab) for sm_100a: E4M3 operands, bf16 result, dense and with groups along M. Needs what machine_code.py needs,
and a C compiler (the kernels are compiled inside the emulator, so that the package sees a Blackwell GPU).
"""

import importlib
import os
import tempfile

import ptxsim
import torch
from machine_code import BARRIER, SCALE_COPY, machine_code

TILES = ((128, 128, 1, 1), (128, 256, 1, 1), (256, 128, 2, 1), (256, 256, 2, 1))  # and CTAs of the cluster
ROWS, COLUMNS, DEPTH = 512, 256, 512
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


class Compiled(Exception):
    """Thrown once a kernel is there: nothing is run."""

    def __init__(self, kernel, cubin: bytes):
        super().__init__("compiled")
        self.kernel, self.cubin = kernel, cubin


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(dtype)


def public_kernel(gemm, tile: tuple[int, int, int, int], groups: int):
    """QuACK's kernel for this tile (its object and machine code); `groups` 0: dense."""
    batch = () if groups else (1,)
    a = zeros(*batch, ROWS, DEPTH, dtype=E4M3)
    b = zeros(groups or 1, COLUMNS, DEPTH, dtype=E4M3)
    d = torch.empty(*batch, ROWS, COLUMNS, dtype=torch.bfloat16)
    arguments = {
        "SFA": zeros(1, ROWS // 128 + groups, DEPTH // 128, 32, 4, 4, dtype=E8M0),
        "SFB": zeros(groups or 1, COLUMNS // 128, DEPTH // 128, 32, 4, 4, dtype=E8M0),
        "bs_format_a": "mxfp8_e4m3",
        "bs_format_b": "mxfp8_e4m3",
    }
    if groups:
        arguments["cu_seqlens_m"] = torch.arange(groups + 1, dtype=torch.int32) * (ROWS // groups)
    try:
        with ptxsim.gpu("sm_100a"):
            gemm(a, b, d, None, None, *tile, **arguments)
    except Compiled as compiled:
        return compiled.kernel, machine_code(compiled.cubin)
    raise RuntimeError("the package did not compile its kernel")


def main() -> None:
    """Print the table."""
    os.environ |= {"QUACK_ARCH": "sm_100", "QUACK_CACHE_ENABLED": "0"}
    gemm = importlib.import_module("quack.gemm").gemm
    from cutlass import cute

    compile_ = cute.compile
    with tempfile.TemporaryDirectory() as folder:

        def keep(*args, options: str = "", **kwargs):
            done = compile_(*args, options=f"{options} --keep-cubin --dump-dir {folder}", **kwargs)
            raise Compiled(args[0], done.__cubin__)

        cute.compile = keep
        names = (
            "tile",
            "groups",
            "registers",
            "stack and spills",
            "instructions",
            BARRIER,
            "main loop",
            "MMA",
            SCALE_COPY,
        )
        names += ("UTMALDG", "stages", "smem, bytes", "accumulators", "TMEM columns allocated")
        print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
        for groups in (0, 2):
            for tile in TILES:
                kernel, code = public_kernel(gemm, tile, groups)
                row = (
                    f"{tile[0]}x{tile[1]} cluster {tile[2]}x{tile[3]}",
                    "along M" if groups else "dense",
                    code.registers,
                    code.stack_bytes + code.local,
                    code.instructions,
                    code.opcodes[BARRIER],
                    sum(code.loop.values()) - code.loop["NOP"],
                    code.mma,
                    code.loop[SCALE_COPY],
                    code.opcodes["UTMALDG"],
                    kernel.ab_stage,
                    kernel.shared_storage.size_in_bytes(),
                    "2, sharing columns" if kernel.overlap_accum_sf else kernel.num_acc_stage,
                    kernel.num_tmem_alloc_cols,
                )
                print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
