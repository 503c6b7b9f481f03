"""What a caller and a copy of a template say to each other; the template tells of the end.

    caller ── connects ──▶ template ── forks ──▶ copy
    caller ◀──────────────────────────────── hello ─ copy
    caller ── the call, with descriptors ──────────▶ copy
    caller ◀───────────────────── ready PID GROUP ─ copy
    caller ── go ──────────────────────────────────▶ program
    caller ◀── stopped, ended STATUS ─ template
    caller ◀── refused WHY ─ template or copy, in place of hello or ready

Each is a packet of words, but for the call, which is a literal of Python. Only after `hello` does
the caller send that: a stopped template would keep its descriptors open. It has a second after
which it runs the program itself, so the copy waits for `go`.

GROUP is the process group that the caller shall join; STATUS is that of `os.waitpid`.

Guarantee: nothing is unpickled, a packet has a limit, and it arrives whole or not at all.

Everything that starts a program imports this first, so it imports little: not `socket`, which takes
longer than all that a caller does.
"""

import _socket
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Socket = _socket.socket

MAX_FDS = 250
"""Descriptors that one packet can carry; the kernel's limit is 253."""
MAX_NBYTES = 1 << 20

_FD_NBYTES = 4
_PEER_NBYTES = 12

VERSION = 12
"""Changes with any message. A template of another version is not met: its key is another."""

HELLO, GO, STOPPED = b"hello", b"go", b"stopped"


class Program:
    """A program, as a command line names it.

    Args:
        kind: `script`, `module`, `code` or `stdin`.
        value: the script, the module or the code.
        arguments: of the program.
    """

    def __init__(self, kind: str, value: str, arguments: list[str]) -> None:
        self.kind, self.value, self.arguments = kind, value, arguments


class Call:
    """A program to run; with it come descriptors: the directory, then those of `fds`.

    Args:
        program: see there.
        settings: the variables that the program is going to set, see `variables`.
        environment: the caller's first variables.
        fds: the numbers of the descriptors that the program inherits.
        group: the caller's process group if it has a terminal, else 0.
        blocked: the signals that the caller blocks, a bit each.
        ignored: those that it ignores, a bit each.
        umask: the caller's.
        is_verbose: the caller's user is told why a program is not run here.
    """

    def __init__(
        self,
        program: Program,
        settings: list[list[str]],
        environment: dict[str, str],
        fds: list[int],
        group: int,
        blocked: int,
        ignored: int,
        umask: int,
        is_verbose: bool,
    ) -> None:
        self.program, self.settings, self.environment = program, settings, environment
        self.fds, self.group, self.umask = fds, group, umask
        self.blocked, self.ignored, self.is_verbose = blocked, ignored, is_verbose

    def packed(self) -> bytes:
        """Return the bytes of this call, for `call_of`."""
        return ascii(vars(self) | {"program": vars(self.program)}).encode()


def call_of(raw: bytes) -> Call:
    """Return the call that these bytes are; other bytes raise whatever Python raises."""
    # Not at the top: a caller would wait for it.
    import ast

    fields = ast.literal_eval(raw.decode("ascii"))
    return Call(**fields | {"program": Program(**fields["program"])})


# Packets ------------------------------------------------------------------------------------------


def connect(path: str, timeout_s: float) -> "Socket":
    """Return a socket that is connected to a template.

    Args:
        path: of the template's socket.
        timeout_s: how long this, and each step of what comes, may take.

    Raises:
        OSError: there is none, or it does not answer.
    """
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    channel.settimeout(timeout_s)
    try:
        channel.connect(path)
    except BaseException:
        channel.close()
        raise
    return channel


def send(channel: "Socket", raw: bytes, fds: "Sequence[int]" = (), *, waits: bool = True) -> None:
    """Send bytes and descriptors, as one packet.

    Args:
        channel: where to.
        raw: the bytes; none are the end.
        fds: the descriptors; they stay this process's too.
        waits: until there is room for it, within the socket's timeout.

    Raises:
        OSError: the other side is gone, or the packet is larger than the kernel takes.
    """
    rights = b"".join(fd.to_bytes(_FD_NBYTES, "little") for fd in fds)
    control = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if fds else []
    channel.sendmsg([raw], control, 0 if waits else _socket.MSG_DONTWAIT)


def receive(channel: "Socket") -> bytes:
    """Return the next packet, without descriptors; none at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
    """
    try:
        return channel.recv(MAX_NBYTES)
    except ConnectionResetError:
        # The other end was closed with something unread. What it sent before still comes.
        return receive(channel)


def close_others(kept: "Collection[int]", first: int = 0) -> None:
    """Close the descriptors from the first one on, but for these, which are not below it."""
    for low, high in zip([first - 1, *sorted(kept)], [*sorted(kept), 1 << 20], strict=True):
        os.closerange(low + 1, high)


def peer_of(channel: "Socket") -> tuple[int, int]:
    """Return process and user of the other side, as when it connected or began to listen."""
    raw = channel.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, _PEER_NBYTES)
    process, user = (int.from_bytes(raw[at : at + 4], "little", signed=True) for at in (0, 4))
    return process, user
