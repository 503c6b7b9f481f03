"""What a caller, a template and a program say to each other.

    caller ── Call ──▶ template ── Call ──▶ (branch ──▶) spare        Look, End ──▶ template
    caller ◀───────────────────── SendFds ─ spare        About, Refused ◀── template
    caller ── Fds ───────────────────────▶  spare
    caller ◀────────────────────── Ready ── spare
    caller ── Go ────────────────────────▶  program
    caller ◀─ Stopped, Ended ── template    program ── Sets, Leaves ──▶ caller

Each is a frozen value with typed fields, and crosses as a list: version, name, fields. They are no
dataclasses, since that module takes longer to import than a program takes to start here.
"""

from shmload._templates import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, ClassVar, TypeVar, dataclass_transform

    M = TypeVar("M", bound="Message")
else:

    def dataclass_transform(*, frozen_default: bool) -> "Any":
        """Do nothing: it is for type checkers, which then know what the fields are."""
        return lambda kind: kind


VERSION = 6
"""Changes with any message. A template of another version is not spoken with."""


@dataclass_transform(frozen_default=True)
class Message:
    """A frozen value; its fields are the annotations of its class, in their order.

    Fields are of the kinds int, str, bytes, a message, and lists of these.
    """

    __slots__ = ()
    _names: "ClassVar[tuple[str, ...]]" = ()

    def __init__(self, *values: "Any", **named: "Any") -> None:
        names = self._names
        given = dict(zip(names, values, strict=False)) | named
        if len(values) + len(named) != len(names) or given.keys() != set(names):
            raise TypeError(f"{type(self).__name__} has the fields {', '.join(names)}")
        for name in names:
            object.__setattr__(self, name, given[name])

    def __init_subclass__(cls) -> None:
        cls._names = tuple(cls.__annotations__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.values() == other.values()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        fields = zip(self._names, self.values(), strict=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields)})"

    def values(self) -> "list[Any]":
        """Return the fields' values, in their order."""
        return [getattr(self, name) for name in self._names]


class Standing(Message):
    """How a caller stands with the kernel, as far as only it can say; `taking` reads the rest."""

    __slots__ = ("blocked", "ignored", "is_subreaper", "timer_slack", "umask")
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
        redirect: `1` or `verbose` if `redirect` is to be on in it, see `redirecting`; else empty.
        prepares: 1 if pipelines may be loaded ahead for it, see `pipelines`.
    """

    __slots__ = ("arguments", "flags", "kind", "prepares", "redirect", "value")
    kind: str
    value: bytes
    arguments: list[bytes]
    flags: list[bytes]
    redirect: str
    prepares: int


class Call(Message):
    """A program to run.

    Fields:
        program: see there.
        facts: what the template must have in common with the caller, see `kind`.
        settings: the variables that the program is going to set, see `settings`.
        fds: the numbers of the descriptors that the program inherits.
        group: the caller's process group if it has a terminal, else 0.
        standing: see there.
        is_verbose: 1 if the caller's user is told why a program is not run here.
    """

    __slots__ = ("facts", "fds", "group", "is_verbose", "program", "settings", "standing")
    program: Program
    facts: str
    settings: list[list[str]]
    fds: list[int]
    group: int
    standing: Standing
    is_verbose: int


class SendFds(Message):
    """The spare is there, and takes the descriptors: the directory, then those of `Call.fds`."""

    __slots__ = ()


class Fds(Message):
    """Carries the descriptors, and what the template must not know.

    Fields:
        environ: the caller's first variables, as /proc/PID/environ has them.
    """

    __slots__ = ("environ",)
    environ: bytes


class Ready(Message):
    """The program can run.

    Fields:
        pid: its process.
        group: the process group that its caller shall join.
        template: the process that tells of its end: the template, or a branch.
    """

    __slots__ = ("group", "pid", "template")
    pid: int
    group: int
    template: int


class Go(Message):
    """The program shall run."""

    __slots__ = ()


class Refused(Message):
    """The program cannot run here.

    Fields:
        reason: why.
        is_replaceable: 1 if a template that this caller starts could run it.
    """

    __slots__ = ("is_replaceable", "reason")
    reason: str
    is_replaceable: int


class Sets(Message):
    """The program has set variables before its first import, see `settings`."""

    __slots__ = ("settings",)
    settings: list[list[str]]


class Leaves(Message):
    """The program ends with this code, unless something happens to it meanwhile."""

    __slots__ = ("code",)
    code: int


class Stopped(Message):
    """The program has stopped, by this signal."""

    __slots__ = ("signal",)
    signal: int


class Ended(Message):
    """The program has ended, with this status of `os.waitpid`."""

    __slots__ = ("status",)
    status: int


class Look(Message):
    """Asks a template what it is."""

    __slots__ = ()


class Keep(Message):
    """Asks a template what it is, and to count that as a use: it is held ready."""

    __slots__ = ()


class Noted(Message):
    """A program has loaded a pipeline, or `shmload warm` has.

    Fields:
        program: its name; empty for `warm`, which has left a note.
        requests: the texts of all pipelines that it has loaded so far.
        modules: what it has imported for the last one.
        parent: process id of the template or branch that the program is a copy of.
        is_stale: 1 if that had the last one, but not as it is now.
    """

    __slots__ = ("is_stale", "modules", "parent", "program", "requests")
    program: str
    requests: list[str]
    modules: list[str]
    parent: int
    is_stale: int


class State(Message):
    """What a branch says of itself.

    Fields:
        is_ready: 1 if it serves.
        loaded: how many of its pipelines it has loaded; of the others, only the modules.
        nbytes: the memory that it had for itself alone when it had loaded, in bytes.
        programs: how many run in copies of it.
        spare: process id of the copy that waits; 0 if there is none.
        reason: why it cannot load its pipelines: it ends, or has imported their modules only; else
            empty.
    """

    __slots__ = ("is_ready", "loaded", "nbytes", "programs", "reason", "spare")
    is_ready: int
    loaded: int
    nbytes: int
    programs: int
    spare: int
    reason: str


class AboutBranch(Message):
    """What a branch is, or why there is none.

    Fields:
        pid: its process id, or 0.
        state: `loading`, `ready`, `imported` if it has only the modules of a pipeline, or `none`.
        nbytes: the memory that it has for itself alone.
        spare: process id of the copy that waits; 0 if there is none.
        requests: its pipelines.
        reason: why there is none; else empty.
    """

    __slots__ = ("nbytes", "pid", "reason", "requests", "spare", "state")
    pid: int
    state: str
    nbytes: int
    spare: int
    requests: list[str]
    reason: str


class About(Message):
    """What a template is.

    Fields:
        pid: its process id.
        name: as it was given.
        programs: how many run.
        idle_ms: how long none came or went, in milliseconds.
        is_draining: 1 if it takes no more programs.
        spare: process id of the copy that waits for the next program; 0 if there is none.
        branches: see there.
        left_out: the modules that it was to import and has not, each with the reason.
    """

    __slots__ = (
        *("branches", "idle_ms", "is_draining", "left_out", "name", "pid", "programs", "spare"),
    )
    pid: int
    name: str
    programs: int
    idle_ms: int
    is_draining: int
    spare: int
    branches: list[AboutBranch]
    left_out: list[str]


class End(Message):
    """Asks a template to take no more programs, and to end with its last one."""

    __slots__ = ()


def send(
    channel: "wire.Socket", message: Message, fds: "Sequence[int]" = (), *, waits: bool = True
) -> None:
    """Send a message and its descriptors; see `wire.send`.

    Raises:
        OSError: the other side is gone, or does not take it in the socket's timeout, or it is
            larger than the kernel takes.
    """
    wire.send(channel, [VERSION, type(message).__name__, _plain(message)], fds, waits=waits)


def receive(channel: "wire.Socket", *kinds: "type[M]") -> "tuple[M, list[int]] | None":
    """Return the next message and its descriptors, which are the caller's; None at the end.

    Raises:
        OSError: nothing came in the socket's timeout.
        wire.NotUnderstood: it is no message of these kinds.
    """
    found = wire.receive(channel)
    if found is None:
        return None
    value, fds = found
    try:
        return _message(value, kinds), fds
    except wire.NotUnderstood:
        wire.close(fds)
        raise


def _plain(value: "Any") -> "Any":
    if isinstance(value, Message):
        value = value.values()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _message(value: "Any", kinds: "tuple[type[M], ...]") -> "M":
    match value:
        case [int(version), str(), list()] if version != VERSION:
            raise wire.NotUnderstood(f"it speaks version {version} of the messages, not {VERSION}")
        case [_, str(name), list(fields)]:
            for kind in kinds:
                if kind.__name__ == name:
                    return _build(kind, fields)
    raise wire.NotUnderstood("it is no message that is expected here")


def _build(kind: "type[M]", fields: "list[Any]") -> "M":
    wanted = [kind.__annotations__[name] for name in kind._names]
    if len(fields) != len(wanted):
        raise wire.NotUnderstood(f"{kind.__name__} has {len(wanted)} fields, not {len(fields)}")
    return kind(*map(_typed, fields, wanted))


def _typed(value: "Any", wanted: "Any") -> "Any":
    """Return a field's value if it is of its kind."""
    if wanted in (int, str, bytes):
        if type(value) is wanted:
            return value
    elif isinstance(value, list):
        if hasattr(wanted, "__args__"):  # list[...]
            (inner,) = wanted.__args__
            return [_typed(item, inner) for item in value]
        return _build(wanted, value)
    raise wire.NotUnderstood(f"{value!r:.80} is not of the kind of its field")
