"""Run every case on the GPU of this machine and store what it writes: `PYTHONPATH=tests python -m emulator.conformance.record`.

Needs a GPU of capability 9.0, torch, ptxas or the driver's compiler, and the CuTe DSL for the class `dsl`. Each class runs in a process of its own, since
a case that traps takes its context with it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from emulator.conformance import recorded, tma
from emulator.conformance.classes import CLASSES


def record_dsl() -> None:
    """Record the DSL's own kernels."""
    from emulator.conformance import dsl

    start = time.time()
    stored = {}
    for name in dsl.RUNS:
        stored |= recorded.pack_bytes(name, dsl.run(name, "cuda").numpy())
    path = recorded.save("dsl", stored)
    print(f"dsl: {len(dsl.RUNS)} runs, {path.stat().st_size} bytes, {time.time() - start:.1f} s", flush=True)


def record_tensor_maps() -> None:
    """Record the bytes that the driver makes of random tensor maps."""
    from emulator.conformance.cuda_driver import Driver

    driver = Driver()
    raw = [driver.encode_tensor_map(spec, address) for spec, address in tma.descriptor_specs()]
    path = recorded.save("tensor_maps", {"bytes": np.stack(raw)})
    print(f"tensor_maps: {len(raw)} maps, {path.stat().st_size} bytes", flush=True)


def record(name: str) -> None:
    """Record one class."""
    if name in OTHERS:
        OTHERS[name]()
        return
    from emulator.conformance.cuda_driver import Driver, assemble  # imports torch, touches the GPU

    start, cases, driver = time.time(), CLASSES[name](), Driver()
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(assemble, cases))
    stored = {}
    for case, image in zip(cases, images, strict=True):
        try:
            stored |= recorded.pack(case, driver.run(case, image))
        except RuntimeError as error:
            sys.exit(f"{case.name}: {error}")
    path = recorded.save(name, stored)
    print(f"{name}: {len(cases)} cases, {path.stat().st_size} bytes, {time.time() - start:.1f} s", flush=True)


OTHERS = {"tensor_maps": record_tensor_maps, "dsl": record_dsl}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CLASSES, *OTHERS], help="classes; all by default")
    args = parser.parse_args()
    if len(args.names) == 1:
        record(args.names[0])
    else:
        failed = [
            n
            for n in args.names or CLASSES
            if subprocess.run([sys.executable, "-m", __spec__.name, n]).returncode
        ]
        sys.exit(f"failed: {failed}" if failed else 0)
