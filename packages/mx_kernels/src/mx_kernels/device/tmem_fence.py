"""Order work on tensor memory around mbarriers and named barriers (PTX `tcgen05.fence`).

tcgen05 instructions are asynchronous to the thread that issues them: a barrier alone does not order those of two threads.
"""

import cutlass.cute as cute
from cutlass.experimental.primitives.nvvm_wrapper import tcgen05_fence


@cute.jit
def after_wait():
    """Between a wait and tcgen05 work that what was waited for must precede."""
    tcgen05_fence("after_thread_sync")


@cute.jit
def before_arrive():
    """Between tcgen05 work and the arrival that tells of it."""
    tcgen05_fence("before_thread_sync")
