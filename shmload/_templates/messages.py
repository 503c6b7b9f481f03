"""What a caller, a template and a program say to each other.

    caller ── Call ──▶ template ── Call ──▶ spare        Look, End ──▶ template
    caller ◀───────────────────── SendFds ─ spare        About, Refused ◀── template
    caller ── Fds ───────────────────────▶  spare
    caller ◀────────────────────── Ready ── spare
    caller ── Go ────────────────────────▶  program
    caller ◀─ Stopped, Ended ── template    program ── Sets, Leaves ──▶ caller

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


VERSION = 9
"""Changes with any message. A template of another version is not spoken with."""


@dataclass_transform(frozen_default=True)
class Message:
    """A value that is not changed; its fields are the annotations of its class, in their order.

    Fields are of the kinds int, str, bytes, a message, and lists of these.
    """

    def __init__(self, *values: "Any", **named: "Any") -> None:
        names = type(self).__annotations__
        vars(self).update(zip(names, values, strict=False), **named)
        if len(values) + len(named) != len(names) or vars(self).keys() != names.keys():
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(names)}")

    def __iter__(self) -> "Iterator[Any]":
        return (getattr(self, name) for name in type(self).__annotations__)

    def __repr__(self) -> str:
        fields = zip(type(self).__annotations__, self, strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


class Standing(Message):
    """How a caller stands with the kernel, as far as only it can say; `taking` reads the rest."""

    blocked: int
    ignored: int
    timer_slack: str
    umask: int
    is_subreaper: int


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
    """A program to run.

    Fields:
        program: see there.
        settings: the variables that the program is going to set, see `variables`.
        fds: the numbers of the descriptors that the program inherits.
        group: the caller's process group if it has a terminal, else 0.
        standing: see there.
        is_verbose: 1 if the caller's user is told why a program is not run here.
    """

    program: Program
    settings: list[list[str]]
    fds: list[int]
    group: int
    standing: Standing
    is_verbose: int


class SendFds(Message):
    """The spare is there, and takes the descriptors: the directory, then those of `Call.fds`."""


class Fds(Message):
    """Carries the descriptors, and what the template must not know.

    Fields:
        environ: the caller's first variables, as /proc/PID/environ has them.
    """

    environ: bytes


class Ready(Message):
    """The program can run.

    Fields:
        pid: its process.
        group: the process group that its caller shall join.
        template: the template's process.
    """

    pid: int
    group: int
    template: int


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


class Sets(Message):
    """The program has set variables before its first import, see `variables`."""

    settings: list[list[str]]


class Leaves(Message):
    """The program ends with this code, unless something happens to it meanwhile."""

    code: int


class Stopped(Message):
    """The program has stopped, by this signal."""

    signal: int


class Ended(Message):
    """The program has ended, with this status of `os.waitpid`."""

    status: int


class Look(Message):
    """Asks a template what it is.

    Fields:
        is_use: 1 if that counts as a use: the template is held ready.
    """

    is_use: int


class About(Message):
    """What a template is.

    Fields:
        template: as JSON, the fields of `look.ListedTemplate` that only it knows, and with
            `processes` those whose memory counts.
    """

    template: str


class End(Message):
    """Asks a template to take no more programs, and to end with its last one."""


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
