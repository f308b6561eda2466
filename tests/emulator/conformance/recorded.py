"""What a GPU wrote, as small files: of every row of an output its first bytes, and the md5 of the whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from emulator.conformance.case import Case, TensorMap

DATA = Path(__file__).parent.parent / "data"
HEAD_BYTES = 2048  # stored of an output; of each row if the rows are labelled:
HEAD_BYTES_LABELLED = 384
HEAD_BYTES_APPROXIMATE = 8192


def _md5(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(hashlib.md5(np.ascontiguousarray(x).tobytes()).digest(), np.uint8)


def input_digest(case: Case) -> np.ndarray:
    """md5 over the inputs, to tell "the inputs changed" from "the result is wrong"."""
    arrays = [x for x in case.inputs().values() if not isinstance(x, TensorMap)]
    return _md5(np.concatenate([np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]))


def rows(case: Case, output: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """An output as its rows by name; unlabelled outputs are one row. Widths are in 32-bit words where they divide."""
    flat = np.ascontiguousarray(x).reshape(len(case.labels) if case.labels else 1, -1).view(np.uint8)
    if flat.shape[1] % 4 == 0:
        flat = flat.view(np.uint32)
    return dict(zip(case.labels or (output,), flat, strict=True))


def pack(case: Case, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays to store for one case."""
    stored = {f"{case.name}|inputs": input_digest(case)}
    for output, x in outputs.items():
        for label, row in rows(case, output, x).items():
            approximate = case.ulps is not None and label in case.ulps
            head = (
                HEAD_BYTES_APPROXIMATE if approximate else HEAD_BYTES_LABELLED if case.labels else HEAD_BYTES
            )
            stored[f"{case.name}|{label}|head"] = row[: head // row.itemsize]
            stored[f"{case.name}|{label}|md5"] = _md5(row)
    return stored


def pack_bytes(name: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays to store for a result that is plain bytes."""
    return {f"{name}|head": data[:HEAD_BYTES], f"{name}|md5": _md5(data)}


def same_bytes(name: str, data: np.ndarray, stored: dict[str, np.ndarray]) -> str | None:
    """None, or where the bytes leave the recording."""
    if np.array_equal(stored[f"{name}|md5"], _md5(data)):
        return None
    head = stored[f"{name}|head"]
    far = np.flatnonzero(head != data[: len(head)])
    return (
        f"differs from the recording from byte {far[0]} on"
        if len(far)
        else f"differs beyond the {len(head)} bytes stored"
    )


def load(name: str, folder: Path = DATA) -> dict[str, np.ndarray]:
    """The stored arrays of one class of instructions."""
    with np.load(folder / f"{name}.npz") as z:
        return {k.replace("\\", "/"): z[k] for k in z.files}


def save(name: str, arrays: dict[str, np.ndarray], folder: Path = DATA) -> Path:
    """Write one class; returns the file."""
    path = folder / f"{name}.npz"
    folder.mkdir(exist_ok=True, parents=True)
    np.savez_compressed(path, **{k.replace("/", "\\"): v for k, v in arrays.items()})
    return path


def compare(name: str, folder: Path) -> tuple[int, list[str]]:
    """How many arrays of a class are the same in `folder` as in the committed file, and a line for each that is not."""
    old, new = load(name), load(name, folder)
    lines = [f"only in the committed file: {k}" for k in sorted(old.keys() - new.keys())]
    lines += [f"new: {k}" for k in sorted(new.keys() - old.keys())]
    both = [k for k in old if k in new]
    lines += [f"differs: {k}" for k in both if not np.array_equal(old[k], new[k])]
    return sum(np.array_equal(old[k], new[k]) for k in both), lines


def differences(case: Case, outputs: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> list[str]:
    """One line for every row that is not what the GPU wrote (or too far from it, where only closeness is asked)."""
    if not np.array_equal(stored[f"{case.name}|inputs"], input_digest(case)):
        return ["the inputs are not those of the recording: record again"]
    found = []
    for output, x in outputs.items():
        for label, row in rows(case, output, x).items():
            head = stored[f"{case.name}|{label}|head"]
            mine = row[: len(head)]
            if case.ulps is not None and label in case.ulps:
                far = _ulps(mine, head) > case.ulps[label]
            elif np.array_equal(stored[f"{case.name}|{label}|md5"], _md5(row)):
                continue
            else:
                far = mine != head
                if not far.any():
                    found.append(
                        f"{label}: differs from the recording beyond the {len(head)} values stored of {len(row)}"
                    )
            if far.any():
                i = int(np.flatnonzero(far)[0])
                found.append(f"{label}: {np.count_nonzero(far)} of {len(head)} stored values differ; [{i}] GPU {head[i]:#x}, emulator {mine[i]:#x}")  # fmt: skip
    return found


def _ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distance of fp32 words in representable values; NaN is at distance 0 from NaN only."""

    def order(x: np.ndarray) -> np.ndarray:
        magnitude = (x & np.uint32(0x7FFFFFFF)).astype(np.int64)
        return np.where(x >> np.uint32(31), -magnitude, magnitude)

    nan_a, nan_b = (np.isnan(x.view(np.float32)) for x in (a, b))
    return np.where(nan_a | nan_b, np.where(nan_a & nan_b, 0, 1 << 40), np.abs(order(a) - order(b)))
