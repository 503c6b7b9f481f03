"""The signals that a caller passes on to its program."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # the module signal imports enum, which takes a millisecond or two

__all__ = ["FORWARDED", "signal"]

FORWARDED = sorted(
    signal.valid_signals()
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ,
       signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS,
       signal.SIGTRAP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH}
)  # fmt: skip
"""All but those that the kernel sends for a fault, and those that a terminal sends to a group."""
