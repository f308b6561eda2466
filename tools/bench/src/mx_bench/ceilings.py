"""Section "ceilings": the copy rate and the dense BF16 rate of this machine, which all else is measured against."""

from collections.abc import Iterator

import torch

from mx_bench.cases import Case

SECTION = "ceilings"


def ceiling_cases(device: str, *, smoke: bool) -> Iterator[Case]:
    """A device-to-device copy of random bytes, and a square BF16 product of random data."""
    size = 1 << (24 if smoke else 30)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Case("copy", {"torch copy_": lambda _: target.copy_(source)}, bytes=2.0 * size)

    n = 512 if smoke else 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    yield Case("dense BF16", {f"torch.matmul {n}^3": lambda _: a @ b}, flop=2.0 * n**3)
