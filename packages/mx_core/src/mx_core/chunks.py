"""Long elementwise chains on a CPU, a cache-sized piece at a time.

Eager torch allocates every intermediate result whole. Above a few megabytes each comes from fresh pages,
and page faults then cost several times the arithmetic.
"""

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 17


def map_chunks(
    function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor, row_elements: int
) -> tuple[Tensor, ...]:
    """`function(*tensors)`, for a function that treats the indices of the first axis one by one.

    Args:
        function: takes these tensors and returns a tuple of tensors, all with the same first axis.
        tensors: what to cut along the first axis.
        row_elements: size of an intermediate result for one index of the first axis.
    """
    rows = max(1, CHUNK_ELEMENTS // max(row_elements, 1))
    first = tensors[0]
    if first.device.type != "cpu" or torch.compiler.is_compiling() or first.shape[0] <= rows:
        return function(*tensors)
    pieces = [function(*piece) for piece in zip(*(x.split(rows) for x in tensors), strict=True)]
    return tuple(torch.cat(results) for results in zip(*pieces, strict=True))
