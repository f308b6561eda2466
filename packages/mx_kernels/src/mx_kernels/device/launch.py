"""What launches need. Stand-ins for the arguments of a kernel while it is compiled: pointers and sizes, not tensors.

An integer costs the call a tenth of what a tensor does, and the ops have checked dtypes, shapes and strides already.
"""

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr


def fake_pointer(dtype: type, align: int | None = None) -> cute.Pointer:
    """A pointer to global memory, `align` bytes aligned (an element's size if not given)."""
    return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)


def fake_stream():
    """The stream, last of all arguments."""
    return make_fake_stream()


SMEM_BYTES = 228 * 1024  # of a multiprocessor, sm_90 and sm_100; a CTA may use 1 KB less than it occupies


def carveout(smem_bytes: int, blocks: int) -> int:
    """Per cent of a multiprocessor's shared memory for `blocks` CTAs that allocate so much, at least 16; the rest is L1."""
    return min(100, max(16, -(-100 * blocks * (smem_bytes + 1024) // SMEM_BYTES)))
