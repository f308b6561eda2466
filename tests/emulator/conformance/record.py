"""Run every case on the GPU of this machine and store what it writes: `PYTHONPATH=tests python -m emulator.conformance.record`.

With `--compare FOLDER` the files go there, and what differs from the committed ones is printed. Needs a GPU of capability 9.0, torch, ptxas or the driver's compiler, and the CuTe DSL for the class `dsl`. Each class runs
in a process of its own: a case that traps takes its context with it, and the class is run again without that case.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from emulator.conformance import recorded, tma
from emulator.conformance.classes import CLASSES


def record_dsl(folder: Path) -> None:
    """Record the DSL kernels, one after another in one process."""
    from emulator.conformance import dsl

    start = time.time()
    stored = {}
    for name in dsl.RUNS:
        print(f"case {name}", file=sys.stderr, flush=True)
        stored |= recorded.pack_bytes(name, dsl.run(name, "cuda").numpy())
    path = recorded.save("dsl", stored, folder)
    print(f"dsl: {len(dsl.RUNS)} runs, {path.stat().st_size} bytes, {time.time() - start:.1f} s", flush=True)


def record_tensor_maps(folder: Path) -> None:
    """Record the bytes that the driver makes of random tensor maps."""
    from emulator.conformance.cuda_driver import Driver

    driver = Driver()
    raw = []
    for spec, address in tma.descriptor_specs():
        try:
            raw.append(driver.encode_tensor_map(spec, address))
        except RuntimeError as refused:  # kept as zeros: the emulator's encoder is not asked about it
            print(f"{spec}: {refused}")
            raw.append(np.zeros(128, np.uint8))
    path = recorded.save("tensor_maps", {"bytes": np.stack(raw)}, folder)
    print(f"tensor_maps: {len(raw)} maps, {path.stat().st_size} bytes", flush=True)


def record(name: str, skip: list[str], folder: Path) -> None:
    """Record one class; the name of each case is printed before it runs."""
    if name in OTHERS:
        OTHERS[name](folder)
        return
    from emulator.conformance.cuda_driver import Driver, assemble  # imports torch, touches the GPU

    start, driver = time.time(), Driver()
    cases = [c for c in CLASSES[name]() if c.name not in skip]
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(assemble, cases))
    stored = {}
    for case, image in zip(cases, images, strict=True):
        print(f"case {case.name}", file=sys.stderr, flush=True)
        stored |= recorded.pack(case, driver.run(case, image))
    path = recorded.save(name, stored, folder)
    print(f"{name}: {len(cases)} cases, {path.stat().st_size} bytes, {time.time() - start:.1f} s", flush=True)


def record_apart(name: str, folder: Path) -> list[str]:
    """Record one class in a process of its own; returns the cases that failed there."""
    failed: list[str] = []
    while True:
        command = [
            sys.executable,
            "-m",
            "emulator.conformance.record",
            "--in-process",
            str(folder),
            name,
            *failed,
        ]
        try:
            done = subprocess.run(
                command, stderr=subprocess.PIPE, text=True, timeout=CLASS_SECONDS, check=False
            )
            errors, code = done.stderr, done.returncode
        except subprocess.TimeoutExpired as hang:
            errors, code = (hang.stderr or b"").decode(), -1
        if code == 0:
            return failed
        started = [line[5:] for line in errors.splitlines() if line.startswith("case ")]
        print(f"{name}: {started[-1] if started else 'start'} failed: {errors[-300:]}", flush=True)
        if not started or started[-1] in failed or len(failed) >= 6:
            return [*failed, name]
        failed.append(started[-1])


CLASS_SECONDS = 120
OTHERS = {"tensor_maps": record_tensor_maps, "dsl": record_dsl}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--in-process",
        type=Path,
        metavar="FOLDER",
        help="one class here; further names are cases to leave out",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FOLDER", help="write here, not over the committed files"
    )
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time")
    parser.add_argument("names", nargs="*", help=f"of {[*CLASSES, *OTHERS]}; all by default")
    args = parser.parse_args()
    if args.in_process:
        record(args.names[0], args.names[1:], args.in_process)
        sys.exit()
    names, folder = args.names or [*CLASSES, *OTHERS], args.compare or recorded.DATA
    with ThreadPoolExecutor(args.jobs) as pool:
        failures = [case for cases in pool.map(lambda n: record_apart(n, folder), names) for case in cases]
    for name in names if args.compare else ():
        if (folder / f"{name}.npz").exists():
            same, lines = recorded.compare(name, folder)
            print("\n".join([f"{name}: {same} arrays as committed, {len(lines)} not", *lines]))
    sys.exit(f"failed: {failures}" if failures else 0)
