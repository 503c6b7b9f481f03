"""The messages between the service and its clients.

    client                               service
       |  <- Welcome                        |     on connect
       |  Reserve ->                        |
       |  <- Waiting ...                    |     while other loads may give room back
       |  <- Reserved | Refused             |
       |  any other request ->              |     one at a time
       |  <- its answer | Refused           |
       |  (end of file)                     |     from either side

Framed by `_ipc.frames`; a frame that is no message ends the connection.
"""

from typing import Annotated, Final

import msgspec

from shmload import errors
from shmload._checkpoints.identity import Nbytes
from shmload._ipc.frames import MessageReader
from shmload._segments.roots import Root
from shmload._wording import encodable
from shmload.errors import ShmloadError

VERSION: Final = 8
"""To be increased with every change of a message."""

_Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""A duration, in seconds."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The service has accepted the connection."""

    version: int
    pid: int


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserve room in the budget; the service evicts the least recently used segments for it."""

    nbytes: Nbytes
    timeout_s: _Seconds
    """How long to wait for room that other loads may give back, in seconds."""
    model: Root | None = None
    """The model that it is for, which the log names."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """End the reservation: segments fill the room now. The load may wait for other loads next."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Report the segments that a load found and those it decoded, resident or not.

    It has all of them now: its reservation ends, and the load ends soon.
    """

    model: Root
    """The model that they are of."""
    found: tuple[str, ...]
    made: tuple[str, ...]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    """Ask for the service's status."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the service. Loads go on without it. Segments stay."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """There is no room yet, but loads that run may give some back."""


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """The room is reserved."""

    evicted: tuple[str, ...]
    """Names of the segments that were evicted for it."""


class Holders(msgspec.Struct, frozen=True):
    """The processes that hold a lease of a segment."""

    segment: str
    pids: tuple[int, ...]
    """Process ids, without processes of other pid namespaces, which the service cannot see."""


class ModelUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a service has counted for a model since it started."""

    model: str
    """The model's name, as `ls` has it."""
    source: str
    """Path of the directory or file that it is loaded from."""
    variant: str
    """The variant of its files; empty for plain files."""
    hits: int
    """Segments that loads found resident or got from another process."""
    misses: int
    """Segments that were decoded for loads."""


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The service's status: the answer to `GetStatus`."""

    pid: int
    uptime_s: float
    budget_nbytes: int
    resident_nbytes: int
    segments: int
    pinned: int
    waiting_for_room: int
    """Loads that wait for room in the budget."""
    reserved_nbytes: int
    """Room in the budget that loads have reserved for what they decode, in bytes."""
    clients: int
    """Connections, not counting the one that asks."""
    hits: int
    """Segments that loads found resident or got from another process."""
    misses: int
    """Segments that were decoded for loads."""
    evictions: int
    refusals: int
    """Loads that were refused for lack of room."""
    leases: tuple[Holders, ...]
    models: tuple[ModelUse, ...]
    """The counters of each model, the most recently used first; at most some hundred models."""
    room_nbytes: int
    """Memory that is free for segments without evicting any, in bytes."""


class Noted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Settle` and `Attached`."""


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Shutdown`."""


_Field = str | int | float | tuple[str, ...] | dict[str, str] | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request failed with an error of this package."""

    kind: str
    """Name of the error's class."""
    message: str
    fields: dict[str, _Field]
    """The error's attributes."""
    notes: tuple[str, ...] = ()


Request = Reserve | Settle | Attached | GetStatus | Shutdown
Answer = Welcome | Waiting | Reserved | Noted | Status | Stopping | Refused

decode_request = MessageReader[Request](Request, "a client")
decode_answer = MessageReader[Answer](
    Answer, "the service", "restart it with `shmload shutdown` and `shmload serve`"
)


def refuse(error: ShmloadError) -> Refused:
    """Turn an error into the message that carries it to the client."""
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    if isinstance(error, OSError):
        attributes["errno"] = error.errno  # a slot, which vars() leaves out
    fields = {name: _to_field(value) for name, value in attributes.items()}
    notes = tuple(map(encodable, getattr(error, "__notes__", ())))
    return Refused(type(error).__name__, encodable(str(error)), fields, notes)


def _to_field(value: object) -> _Field:
    match value:
        case None | int() | float():
            return value
        case tuple():
            return tuple(encodable(str(item)) for item in value)
        case dict():
            return {encodable(str(key)): encodable(str(item)) for key, item in value.items()}
        case _:
            return encodable(str(value))


def revive(refused: Refused) -> ShmloadError:
    """Turn the message back into its error; an unknown kind becomes a plain `ShmloadError`."""
    kind = vars(errors).get(refused.kind)
    if not (isinstance(kind, type) and issubclass(kind, ShmloadError)):
        kind = ShmloadError
    error: ShmloadError = kind.__new__(kind)
    error.args = (refused.message,)
    for name, value in refused.fields.items():
        # A message must not replace methods or other attributes of the class.
        if name == "errno" or not (name.startswith("_") or hasattr(kind, name)):
            setattr(error, name, value)
    for note in refused.notes:
        error.add_note(note)
    return error
