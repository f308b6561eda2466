"""Runs one check of the self-test in the emulator; with PLANTED set, a check that fails in that way instead."""

import os
import signal
import sys
import time

import ptxsim
import torch
from mx_kernels.sm100 import selftest


def plant(kind: str) -> None:
    def one_mma(device):
        if kind == "wrong value":
            selftest.expect_equal("y", torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]))
        if kind == "hang":
            time.sleep(600)
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "exit":
            os._exit(7)
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    selftest.CHECKS["one mma"] = one_mma


if __name__ == "__main__":
    torch.set_num_threads(1)
    if kind := os.environ.get("PLANTED"):
        plant(kind)
        sys.exit(selftest.main())
    with ptxsim.gpu("sm_100a", sms=6):
        sys.exit(selftest.main())
