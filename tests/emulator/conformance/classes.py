"""The classes of instructions compared, by name of their data file."""

from __future__ import annotations

from collections.abc import Callable

from emulator.conformance import (
    arithmetic,
    barriers,
    clusters,
    conversions,
    integer,
    memory,
    tma,
    warp,
    wgmma,
)
from emulator.conformance.case import Case

CLASSES: dict[str, Callable[[], list[Case]]] = {
    m.__name__.rsplit(".", 1)[-1]: m.cases
    for m in (conversions, arithmetic, integer, warp, memory, tma, barriers, clusters, wgmma)
}
