"""The descriptors and standard streams of a program: those of its caller."""

import fcntl
import os
import sys
from typing import Any

from shmload._templates import wire


class DescriptorTaken(Exception):
    """A library has opened a descriptor that the program would have; str says which."""


def take_descriptors(
    wanted: list[int], fds: list[int], channel: wire.Socket, keep: set[int]
) -> wire.Socket:
    """Give each descriptor the number that it has in the caller, and close all others.

    Args:
        wanted: the numbers.
        fds: the caller's directory, which becomes this process's, and a descriptor for each number.
        channel: stays open, at a number of its own.
        keep: stay open: libraries have opened them.

    Returns:
        The channel.

    Raises:
        DescriptorTaken: a number of `keep` is wanted.
        OSError: there are no descriptors left.
    """
    directory, *fds = fds
    os.fchdir(directory)
    os.close(directory)
    if keep & set(wanted):
        raise DescriptorTaken(f"libraries have opened descriptors {sorted(keep & set(wanted))}")
    above = max([*wanted, *keep, *fds, 63]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    own = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
    timeout = channel.gettimeout()
    channel.detach()
    staying = sorted({*moved, own, *keep})
    for low, high in zip([-1, *staying], [*staying, 1 << 20], strict=True):
        os.closerange(low + 1, high)
    for fd, number in zip(moved, wanted, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    moved_channel = wire.take(own)
    moved_channel.settimeout(timeout)
    return moved_channel


def renew_streams() -> None:
    """Open the standard streams anew, as Python does when it starts.

    They keep their objects, which libraries may hold from their imports on.
    """
    for fd, name in enumerate(("stdin", "stdout")):
        _open_again(fd, name, getattr(sys, name))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _open_again(fd: int, name: str, stream: Any) -> None:
    """Open a standard stream; see create_stdio in CPython's pylifecycle.c.

    Args:
        fd: its descriptor.
        name: stdin or stdout.
        stream: the template's, whose encoding is that of the locale, which both share.
    """
    mode = "r" if name == "stdin" else "w"
    is_unbuffered = stream.write_through and mode == "w"
    buffering = 0 if is_unbuffered else -1
    buffer: Any = open(fd, mode + "b", buffering, closefd=False)  # noqa: SIM115 for the whole process
    (buffer if is_unbuffered else buffer.raw).name = f"<{name}>"
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=os.isatty(fd) and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = mode
