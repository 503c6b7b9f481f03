"""What the service and its clients say to each other.

    client                               service
       |  <- Welcome                        |     at once
       |  Lend + two descriptors ->         |     for each shard: what a decode will need
       |  Decode ->                         |
       |  <- BytesRead ...                   |     while its workers fill the parts
       |  <- Decoded | Refused              |     and forget what was lent
       |  any other request ->              |     one at a time
       |  <- its answer | Refused           |
       |  (end of file)                     |     whoever goes first: what was lent is closed

Framed by `_ipc.frames`; what is no message ends the connection.
"""

from typing import Annotated, Final

import msgspec

from shmload import errors
from shmload._ipc.frames import MessageReader
from shmload._segments.pieces import Run
from shmload._wording import printable
from shmload.errors import ShmloadError

VERSION: Final = 1

_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
"""A size that some file may have; many of them together stay within 64 bits."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The service has accepted."""

    version: int
    pid: int


class Stat(msgspec.Struct, frozen=True, array_like=True):
    """What fstat said of a shard when it was planned; see `os.stat_result`."""

    st_size: _Nbytes
    st_mtime_ns: int
    st_ctime_ns: int
    st_nlink: int


class Lend(msgspec.Struct, frozen=True, tag=True):
    """A shard to be decoded; the descriptors of the shard and of its part come with it."""

    path: str
    source: Stat
    nbytes: _Nbytes
    """Size of the segment, in bytes."""
    pieces: tuple[tuple[Run, ...], ...]


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Fill the parts that were lent."""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Make room in the budget, by evicting what was used least recently."""

    nbytes: _Nbytes


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Say which segments a load found, and which it has decoded, be they resident or not."""

    found: tuple[str, ...]
    made: tuple[str, ...]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Say how the service is."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the service; what it decodes is given up, and loads do without it. Segments stay."""


class BytesRead(msgspec.Struct, frozen=True, tag=True):
    """So many bytes are read, of so many."""

    done: int
    total: int


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """All parts are filled."""

    digests: tuple[str, ...]
    """Of each segment, in the order of the loans."""


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """There is room now."""

    evicted: tuple[str, ...]


class Lease(msgspec.Struct, frozen=True):
    """Which processes hold a segment."""

    segment: str
    pids: tuple[int, ...]
    """As far as the service can see them: those of another pid namespace have no number here."""


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """How the service is."""

    pid: int
    uptime_s: float
    budget_nbytes: int
    resident_nbytes: int
    segments: int
    pinned: int
    workers: int
    is_decoding: bool
    waiting: int
    """Decodes that wait for the workers."""
    clients: int
    """Connections, without the one that asks."""
    hits: int
    """Segments that loads found resident, or had from another process."""
    misses: int
    """Segments that loads had to decode, by the service or by themselves."""
    evictions: int
    read_nbytes: int
    """Bytes of weights read since the start."""
    decode_s: float
    """Time spent on that, in seconds."""
    leases: tuple[Lease, ...]


class Noted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Attached`: what was reserved counts as resident now."""


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Shutdown`."""


_Field = str | int | float | tuple[str, ...] | dict[str, str] | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request failed with an error of this package."""

    kind: str
    """Name of its class."""
    message: str
    fields: dict[str, _Field]
    """Its attributes."""
    notes: tuple[str, ...] = ()


Request = Lend | Decode | Reserve | Attached | GetStatus | Shutdown
Answer = Welcome | BytesRead | Decoded | Reserved | Noted | Status | Stopping | Refused

decode_request = MessageReader[Request](Request, "a client")
decode_answer = MessageReader[Answer](
    Answer, "the service", "restart it with `shmload shutdown` and `shmload serve`"
)


def refuse(error: ShmloadError) -> Refused:
    """Make the message that carries an error to the client."""
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    if isinstance(error, OSError):
        attributes["errno"] = error.errno  # a slot, which vars() leaves out
    fields = {name: _to_field(value) for name, value in attributes.items()}
    notes = tuple(map(printable, getattr(error, "__notes__", ())))
    return Refused(type(error).__name__, printable(str(error)), fields, notes)


def _to_field(value: object) -> _Field:
    match value:
        case None | int() | float():
            return value
        case tuple():
            return tuple(printable(str(item)) for item in value)
        case dict():
            return {printable(str(key)): printable(str(item)) for key, item in value.items()}
        case _:
            return printable(str(value))


def revive(refused: Refused) -> ShmloadError:
    """Make the error that a message carries; one of an unknown kind becomes the base class."""
    kind = vars(errors).get(refused.kind)
    if not (isinstance(kind, type) and issubclass(kind, ShmloadError)):
        kind = ShmloadError
    error: ShmloadError = kind.__new__(kind)
    error.args = (refused.message,)
    for name, value in refused.fields.items():
        # What every error has, such as its methods, is not to be replaced.
        if name == "errno" or not (name.startswith("_") or hasattr(kind, name)):
            setattr(error, name, value)
    for note in refused.notes:
        error.add_note(note)
    return error
