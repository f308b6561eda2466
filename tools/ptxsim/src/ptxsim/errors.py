"""What the emulator reports: one exception class for each kind of finding."""


class PtxsimError(Exception):
    """Base of everything the emulator raises."""


class Unsupported(PtxsimError):
    """The PTX uses an instruction, modifier or operand that the emulator does not model."""


class Fault(PtxsimError):
    """The program did something the hardware forbids or leaves undefined (address, alignment, barrier misuse, …)."""


class Race(Fault):
    """Two accesses to the same shared memory or TMEM that nothing orders."""


class Uninitialized(Fault):
    """A read of shared memory or TMEM that nobody wrote."""


class Deadlock(PtxsimError):
    """No warp can make progress and no asynchronous operation is pending."""


class HostError(PtxsimError):
    """The host side asked for something outside the emulator (a missing compiler, an unknown runtime call, …)."""
