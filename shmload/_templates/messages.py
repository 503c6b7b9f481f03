"""What a caller and a copy of a template say to each other; the template tells of the end.

    caller ── connects ──▶ template ── forks ──▶ copy
    caller ◀──────────────────────────── Hello ─ copy       caller ◀── Refused ─ template or copy
    caller ── Call, descriptors ───────────────▶ copy
    caller ◀──────────────────────────── Ready ─ copy
    caller ── Go ──────────────────────────────▶ program
    caller ◀── Stopped, Ended ─ template

Each is a value with typed fields, and crosses as a list: version, name, fields. They are no
dataclasses, since that module takes longer to import than a program takes to start here.
"""

from shmload._templates import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any, TypeVar, dataclass_transform

    M = TypeVar("M", bound="Message")
else:

    def dataclass_transform(*, frozen_default: bool) -> "Any":
        """Do nothing: it is for type checkers, which then know what the fields are."""
        return lambda kind: kind


VERSION = 10
"""Changes with any message. A template of another version is not spoken with."""


@dataclass_transform(frozen_default=True)
class Message:
    """A value that is not changed; its fields are the annotations of its class, in their order.

    Fields are of the kinds int, str, bytes, a message, and lists of these.
    """

    def __init__(self, *values: "Any") -> None:
        vars(self).update(zip(type(self).__annotations__, values, strict=True))

    def __iter__(self) -> "Iterator[Any]":
        return (getattr(self, name) for name in type(self).__annotations__)


class Program(Message):
    """A program, as a command line names it.

    Fields:
        kind: `script`, `module`, `code` or `stdin`.
        value: the script, the module or the code.
        arguments: of the program.
        flags: options for Python, as they were given.
        redirect: `1` or `verbose` if `redirect` is to be on in it, see `variables`; else empty.
    """

    kind: str
    value: bytes
    arguments: list[bytes]
    flags: list[bytes]
    redirect: str


class Call(Message):
    """A program to run; with it come descriptors: the directory, then those of `fds`.

    Fields:
        program: see there.
        template: name of the template, as the user gave it.
        settings: the variables that the program is going to set, see `variables`.
        environ: the caller's first variables, as /proc/PID/environ has them.
        fds: the numbers of the descriptors that the program inherits.
        group: the caller's process group if it has a terminal, else 0.
        blocked: the signals that the caller blocks, a bit each.
        ignored: those that it ignores, a bit each.
        umask: the caller's.
        is_verbose: 1 if the caller's user is told why a program is not run here.
    """

    program: Program
    template: str
    settings: list[list[str]]
    environ: bytes
    fds: list[int]
    group: int
    blocked: int
    ignored: int
    umask: int
    is_verbose: int


class Hello(Message):
    """The copy is there, and takes the call.

    Only now does the caller send it: a stopped template would keep its descriptors open.
    """


class Ready(Message):
    """The program can run.

    Fields:
        pid: its process.
        group: the process group that its caller shall join.
    """

    pid: int
    group: int


class Go(Message):
    """The program shall run."""


class Refused(Message):
    """The program cannot run here.

    Fields:
        reason: why.
        is_replaceable: 1 if a template that this caller starts could run it.
    """

    reason: str
    is_replaceable: int


class Stopped(Message):
    """The program has stopped, by this signal."""

    signal: int


class Ended(Message):
    """The program has ended, with this status of `os.waitpid`."""

    status: int


def send(
    channel: "wire.Socket", message: Message, fds: "Sequence[int]" = (), *, waits: bool = True
) -> None:
    """Send a message and its descriptors; see `wire.send`.

    Raises:
        OSError: the other side is gone, or does not take it in the socket's timeout, or it is
            larger than the kernel takes.
    """
    raw = wire.pack([VERSION, type(message).__name__, message])
    wire.send(channel, raw, fds, waits=waits)


def receive(channel: "wire.Socket", *kinds: "type[M]") -> "tuple[M, list[int]] | None":
    """Return the next message and its descriptors, which are the caller's; None at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
        wire.NotUnderstood: it is no message of these kinds.
    """
    found = wire.receive(channel)
    if found is None:
        return None
    raw, fds = found
    try:
        return _message(raw, kinds), fds
    except ValueError as exc:
        wire.close(fds)
        raise wire.NotUnderstood(str(exc)) from exc


def _message(raw: bytes, kinds: "tuple[type[M], ...]") -> "M":
    version, *rest = wire.split(raw)
    if version != b"%d" % VERSION:
        raise wire.NotUnderstood(f"it speaks version {version!r} of the messages, not {VERSION}")
    name, fields = rest
    for kind in kinds:
        if kind.__name__.encode() == name:
            message: M = wire.unpack(fields, kind)
            return message
    raise wire.NotUnderstood("it is no message that is expected here")
