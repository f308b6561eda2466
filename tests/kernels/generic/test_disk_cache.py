"""The compile cache (C15): found again by a second process, safe under two at once, proof against a broken file."""

import os
import subprocess
import sys

CODE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from mx_core import RowMap
from mx_kernels import jit
from mx_kernels.generic.groups import GroupTable
for target in ("sm_90a", "sm_100a"):
    for row_map in RowMap:
        kernel = GroupTable(row_map)
        assert callable(jit.compiled(kernel, target, kernel.build))
"""


def start(folder):
    env = os.environ | {"MX_CACHE_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, text=True)


def compiled(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    return out.count("compiling for")


def test_disk_cache(tmp_path):
    assert all(compiled(p) <= 4 for p in [start(tmp_path), start(tmp_path)])
    files = sorted(tmp_path.rglob("*"))
    objects = [f for f in files if f.is_file()]
    assert len(objects) == 4, files  # and nothing half-written beside them
    assert len({f.parent for f in objects}) == 2  # a folder a target
    assert compiled(start(tmp_path)) == 0
    objects[0].write_bytes(objects[0].read_bytes()[:100])
    assert compiled(start(tmp_path)) == 1
    assert compiled(start(tmp_path)) == 0
