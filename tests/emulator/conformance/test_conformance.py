"""The emulator against an H200: same PTX, same inputs, same bits (data/*.npz, written by record.py)."""

import functools

import numpy as np
import ptxsim
import pytest
from emulator.conformance import recorded, tma
from emulator.conformance.case import Case
from emulator.conformance.classes import CLASSES
from emulator.conformance.emulate import emulate, tensor_map_bytes

CASES = [case for cases in CLASSES.values() for case in cases()]
TIMED = (
    "memory/cp.async",
    "tma/",
    "barriers/",
    "clusters/",
    "wgmma/descriptor",
)  # what a schedule can change

REFUSED = {
    "tma/store.1d.u8": "no multiple of 16",
    **dict.fromkeys(
        (
            "tma/store.ragged.1d.f32",
            "tma/store.ragged.2d.u8",
            "tma/store.ragged.2d.bf16",
            "tma/store.ragged.2d.f32",
            "tma/store.ragged.3d.u8",
            "tma/reduce.add.ragged.2d.f32",
        ),
        "no multiple of 16",
    ),
    **{f"tma/unelected.{copy}.{n}lanes": "un-elected" for copy in ("bulk", "tensor") for n in (2, 32)},
}
"""Case → the words of the report: what the emulator takes for the bug that it is. With checks off it does as an H200."""


@functools.cache
def _stored(name: str) -> dict[str, np.ndarray]:
    return recorded.load(name)


def _check(case: Case, **options: object) -> None:
    outputs = emulate(case, **options)
    differences = recorded.differences(case, outputs, _stored(case.name.split("/")[0]))
    assert not differences, "\n" + "\n".join(differences)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_same_bits_as_an_h200(case: Case) -> None:
    if case.name in REFUSED:
        with pytest.raises(ptxsim.PtxsimError, match=REFUSED[case.name]):
            emulate(case)
        _check(case, checks=False)
        return
    _check(case, schedule="random" if case.name.startswith(TIMED) else "early", seed=1)


def test_tensor_maps_are_encoded_as_the_driver_does() -> None:
    want = recorded.load("tensor_maps")["bytes"]
    for i, (spec, address) in enumerate(tma.descriptor_specs()):
        if want[i].any():  # the driver refused a few
            np.testing.assert_array_equal(
                tensor_map_bytes(spec, address), want[i], err_msg=f"{spec} at {address:#x}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["early", "late", "random"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in CASES if c.name.startswith(TIMED) and c.name not in REFUSED]
)
def test_same_bits_under_every_schedule(case: Case, schedule: str) -> None:
    for seed in range(3 if schedule == "random" else 1):
        _check(case, schedule=schedule, seed=seed)
