"""`mx-doctor`: what this machine can run, on which backend, and why not the others.

`mx-doctor --selftest` is first contact with a new Blackwell GPU: it runs mx_kernels.sm100.selftest on every device of that
kind and keeps the outcome, which decides whether `backend="auto"` takes sm100 here (see selftest_record).
"""

import argparse
import importlib
import json
import os
import platform
import sys
from typing import Any

import torch

from mx_kernels import arch, registry, selftest_record
from mx_kernels.paths import cache_dir
from mx_kernels.problem import (
    CombineProblem,
    DSwigluProblem,
    GatherProblem,
    GatherQuantizeProblem,
    GemmProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
    SlotWeightsProblem,
    SwigluProblem,
)

BF16, E4M3 = torch.bfloat16, "mxfp8_e4m3"

#: (family, backend method, a typical problem): everything that a layer with the recipe in front uses.
FAMILIES: tuple[tuple[str, str, Problem], ...] = (
    ("mxfp8: quantize", "quantize", QuantizeProblem(BF16, E4M3)),
    ("mxfp8: quantize, both ways", "quantize", QuantizeProblem(BF16, E4M3, orientation="dual", ndim=3)),
    ("mxfp8: quantize, groups", "quantize", QuantizeProblem(BF16, E4M3, orientation="col", grouped=True)),
    ("mxfp8: gather_quantize", "gather_quantize", GatherQuantizeProblem(BF16, E4M3)),
    ("mxfp8: gather_quantize, both ways", "gather_quantize", GatherQuantizeProblem(BF16, E4M3, orientation="dual", weighted=True)),
    ("mxfp8: swiglu_quantize", "swiglu", SwigluProblem(BF16, E4M3)),
    ("mxfp8: dswiglu_quantize", "dswiglu", DSwigluProblem(BF16, E4M3)),
    ("mxfp8: grouped GEMM fprop", "grouped_gemm", GemmProblem("fprop", E4M3, E4M3, BF16)),
    ("mxfp8: grouped GEMM dgrad", "grouped_gemm", GemmProblem("dgrad", E4M3, E4M3, BF16)),
    ("mxfp8: grouped GEMM wgrad", "grouped_gemm", GemmProblem("wgrad", E4M3, E4M3, BF16)),
    ("both: route", "route", RouteProblem(torch.int64, 2, 8)),
    ("both: slot_weights", "slot_weights", SlotWeightsProblem(2)),
    ("both: combine", "combine", CombineProblem(BF16, 2)),
    ("bf16: gather", "gather", GatherProblem(BF16)),
    ("bf16: swiglu", "swiglu", SwigluProblem(BF16)),
    ("bf16: dswiglu", "dswiglu", DSwigluProblem(BF16)),
    ("bf16: grouped GEMM fprop", "grouped_gemm", GemmProblem("fprop", "bf16", "bf16", BF16)),
    ("bf16: grouped GEMM dgrad", "grouped_gemm", GemmProblem("dgrad", "bf16", "bf16", BF16)),
    ("bf16: grouped GEMM wgrad", "grouped_gemm", GemmProblem("wgrad", "bf16", "bf16", BF16)),
)  # fmt: skip

LIBRARIES = ("mx-core", "mx-kernels", "nvidia-cutlass-dsl", "cuda-python", "apache-tvm-ffi")


def devices() -> list[torch.device]:
    """The CPU, then every CUDA device."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(gpus))]


def machine() -> dict[str, Any]:
    """What the report says about the machine."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "cuda build": torch.version.cuda or "none",
        "cuda available": torch.cuda.is_available(),
        "driver": selftest_record.driver_version(),
        "libraries": {name: selftest_record.installed_version(name) for name in LIBRARIES},
        "cache": str(cache_dir()),
        "MX_BACKEND": os.environ.get("MX_BACKEND") or "not set",
    }


def device_report(device: torch.device) -> dict[str, Any]:
    """For every op family, each backend's reason not to run it on this device (None: it can)."""
    backends = list(registry.BACKENDS)
    reasons = {
        family: {name: registry.why_not(name, op, problem, device, auto=True) for name in backends}
        for family, op, problem in FAMILIES
    }
    return {
        "device": arch.describe(device),
        "target": arch.target_of(device),
        "families": reasons,
        "complete": all(None in by_backend.values() for by_backend in reasons.values()),
    }


def report() -> dict[str, Any]:
    """The whole report, as --json prints it."""
    return {"machine": machine(), "devices": [device_report(d) for d in devices()]}


def as_text(found: dict[str, Any]) -> str:
    """The report for people."""
    info = found["machine"]
    lines = [
        f"{info['platform']}, {info['cpus']} CPUs, Python {info['python']}",
        f"torch {info['torch']}, CUDA build {info['cuda build']}, "
        f"{'GPUs found' if info['cuda available'] else 'no usable GPU'}, NVIDIA driver {info['driver']}",
        ", ".join(f"{name} {version}" for name, version in info["libraries"].items()),
        f"cache {info['cache']}, MX_BACKEND {info['MX_BACKEND']}",
    ]
    for device in found["devices"]:
        lines += ["", *_device_lines(device)]
    return "\n".join(lines)


def _device_lines(device: dict[str, Any]) -> list[str]:
    families = device["families"]
    backends = list(next(iter(families.values())))
    width = max(map(len, families))
    lines = [device["device"], f"  {'':{width}}  " + "  ".join(f"{name:>5}" for name in backends)]
    reasons: dict[str, dict[str, list[str]]] = {name: {} for name in backends}
    for family, by_backend in families.items():
        cells = ["yes" if by_backend[name] is None else "–" for name in backends]
        lines.append(f"  {family:{width}}  " + "  ".join(f"{cell:>5}" for cell in cells))
        for name, reason in by_backend.items():
            if reason is not None:
                reasons[name].setdefault(reason, []).append(family)
    for name, by_reason in reasons.items():
        for reason, where in by_reason.items():
            scope = (
                ""
                if len(where) == len(families)
                else f" ({len(where)} of {len(families)}, first: {where[0]})"
            )
            lines.append(f"  {name}: {reason}{scope}")
    lines.append(f"  → {'every op has a backend' if device['complete'] else 'some ops have no backend here'}")
    return lines


def run_selftest(as_json: bool) -> int:
    """Run sm100's self-test on each device it is for; keep and print the outcomes. 0: all passed."""
    targets = [d for d in devices() if arch.target_of(d) in ("sm_100a", "sm_103a")]
    if not targets:
        print(
            "no GPU of capability 10.0 or 10.3 here: there is nothing for the self-test to run on",
            file=sys.stderr,
        )
        return 2
    try:
        selftest = importlib.import_module("mx_kernels.sm100.selftest")
    except Exception as error:  # whatever is wrong with that install, this command must report it
        print(
            f"mx_kernels.sm100.selftest cannot be imported: {type(error).__name__}: {error}", file=sys.stderr
        )
        return 2
    passed = True
    for device in targets:
        outcome = selftest.run(device)
        path = selftest_record.write(selftest_record.machine_key(device), outcome["passed"], outcome)
        passed = passed and outcome["passed"]
        if as_json:
            print(json.dumps(outcome, indent=2, default=str))
            continue
        print(arch.describe(device))
        for check in outcome["checks"]:
            verdict = "ok  " if check["passed"] else "FAIL"
            print(
                f"  {verdict} {check['name']} ({check['seconds']:.1f} s){': ' if check['detail'] else ''}{check['detail']}"
            )
        print(f"  {'passed' if outcome['passed'] else 'FAILED'}; the full report, to share: {path}")
    registry.forget()
    return 0 if passed else 1


def main(argv: list[str] | None = None) -> int:
    """Command line. Exit code 0: every op has a backend on every device (or the self-test passed); 1: not; 2: usage."""
    parser = argparse.ArgumentParser(prog="mx-doctor", description="What this machine can run, and why not.")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--selftest", action="store_true", help="test the Blackwell kernels on this machine's GPUs"
    )
    arguments = parser.parse_args(argv)
    if arguments.selftest:
        return run_selftest(arguments.json)
    found = report()
    print(json.dumps(found, indent=2) if arguments.json else as_text(found))
    return 0 if all(device["complete"] for device in found["devices"]) else 1


if __name__ == "__main__":
    sys.exit(main())
