"""python -m ptxsim run SCRIPT … | trace SCRIPT …"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from . import api
from .core.engine import SCHEDULES
from .host import fake_cuda


def _options(parser: argparse.ArgumentParser, schedule: str) -> None:
    parser.add_argument("--arch", default="sm_100a", choices=sorted(api.ARCHITECTURES))
    parser.add_argument("--sms", type=int, default=148)
    parser.add_argument("--schedule", default=schedule, choices=SCHEDULES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-checks", action="store_true", help="no race detection")
    parser.add_argument(
        "--global-races", action="store_true", help="also races in global memory between clusters"
    )
    parser.add_argument(
        "--allow-uninitialized", action="store_true", help="reads of memory nobody wrote are no error"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ptxsim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run an unmodified script that thinks it has a GPU")
    _options(run, "early")
    trace = commands.add_parser("trace", help="run a script, write a Perfetto timeline and print a summary")
    _options(trace, "timed")
    trace.add_argument(
        "--out", default="ptxsim_trace.json", help="timeline file, for https://ui.perfetto.dev"
    )
    trace.add_argument("--picture", help="also draw the timeline to this image file (needs matplotlib)")
    trace.add_argument("--launch", type=int, default=-1, help="which launch to draw; the last by default")
    for p in (run, trace):
        p.add_argument("script")
        p.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    recorder = None
    if args.command == "trace":
        from .trace import Trace

        recorder = Trace()
    gpu = api.gpu(
        args.arch,
        sms=args.sms,
        schedule=args.schedule,
        seed=args.seed,
        checks=not args.no_checks,
        uninitialized=not args.allow_uninitialized,
        trace=recorder,
        global_races=args.global_races,
    )
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    code = 0
    with gpu, fake_cuda.pretending(gpu):
        try:
            runpy.run_path(args.script, run_name="__main__")
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    for record in gpu.launches:
        config, n = record.config, record.instructions
        speed = n / max(record.seconds, 1e-9) / 1e6
        print(f"launch {record.name[:70]}: grid {config.grid} cluster {config.cluster}")
        print(
            f"  {n} warp instructions in {record.seconds:.3f} s of processor time, {speed:.2f} million a second"
        )
    if recorder is not None:
        recorder.write(args.out)
        print(recorder.summary(args.launch))
        print(f"timeline: {args.out} (open it at https://ui.perfetto.dev)")
        if args.picture:
            recorder.draw(args.picture, args.launch)
            print(f"picture: {args.picture}")
    return code


if __name__ == "__main__":
    sys.exit(main())
