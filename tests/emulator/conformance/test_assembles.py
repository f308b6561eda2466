"""Every hand-written PTX kernel is accepted by ptxas (which comes with triton, or a CUDA toolkit)."""

import shutil
import subprocess
from pathlib import Path

import pytest
from emulator.conformance import sm100, tcgen05
from emulator.conformance.case import Case
from emulator.conformance.classes import CLASSES


def _ptxas() -> str | None:
    try:
        import triton
    except ImportError:
        return shutil.which("ptxas")
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
    return str(found) if found.exists() else shutil.which("ptxas")


PTXAS = _ptxas()
GROUPS: dict[str, list[Case]] = {name: cases() for name, cases in CLASSES.items()} | {
    "sm100": [c.case for c in sm100.cases()] + [c for c, _ in sm100.wide_cases()],
    "tcgen05": [e.case for e in tcgen05.cases()],
}


@pytest.mark.slow
@pytest.mark.skipif(PTXAS is None, reason="no ptxas here")
@pytest.mark.parametrize("name", GROUPS)
def test_ptxas_accepts(name: str, tmp_path: Path) -> None:
    assert PTXAS is not None
    for case in GROUPS[name]:
        source = tmp_path / "case.ptx"
        source.write_text(case.ptx())
        done = subprocess.run(
            [PTXAS, f"-arch={case.target}", source, "-o", tmp_path / "case.cubin"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, f"{case.name}: {done.stderr}"
