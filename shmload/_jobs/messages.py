"""What a job, its fork server and its runners say to each other.

    job                      fork server                      runner
     |  Setup ->                  |                              |
     |  <- Prepared | LoadFailed  |   once it has the pipeline   |
     |  Fork + a socket ->        |  forks --------------------> |
     |  <- Forked + a pidfd       |                              |
     |  <- Started | LoadFailed  --------------------------------   once it is on its device
     |  Begin ->  Work -> ...  --------------------------------->
     |  <- Answer  ----------------------------------------------   in the order of the Works
     |  <- Ended                  |   when a runner has ended    |
     |  (end of file)             |   kills its runners, ends    |

Framed by `_ipc.frames`.
"""

import msgspec

from shmload._ipc.frames import MessageReader
from shmload._jobs.payload import Payload

# For one item or one result; the length of a frame has four bytes.
MAX_FRAME_NBYTES = (1 << 32) - 1


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What to load, and where to find modules."""

    handle: str
    """Handle of the pipeline, as text."""
    path: tuple[bytes, ...]
    """`sys.path` of the job's process, as the file system encodes it."""
    environment: dict[str, str | None]
    """Values, in the job's process, of variables that the fork server was started with other values
    for; None for one that is not set."""
    threads: int
    """Number of torch's threads in each runner."""
    preload: tuple[str, ...]
    """Modules to import beside the libraries."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a runner; its socket comes with this."""

    place: int
    """In the crew, from 0."""
    device: str
    """Where its models go; `round-robin` for the GPU that its place decides."""


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The fork server has the pipeline."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The runner that was asked for first exists; its pidfd comes with this."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A runner has ended."""

    pid: int
    how: str
    """Its exit code or a signal, such as `exit code 0` or `SIGKILL`."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Call this function on the items that follow."""

    function: Payload
    seed: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """Work on one item."""

    index: int
    item: Payload


class Started(msgspec.Struct, frozen=True, tag=True):
    """The runner's models are on its device."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What became of one item."""

    index: int
    value: Payload
    """What the function returned, or the error that it raised."""
    traceback: str | None = None
    """Of the error."""


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The pipeline cannot be loaded, or not brought to its device."""

    error: Payload
    traceback: str


ToServer = Setup | Fork
FromServer = Prepared | Forked | Ended | LoadFailed
ToRunner = Begin | Work
FromRunner = Started | Answer | LoadFailed

decode_to_server = MessageReader[ToServer](ToServer, "a job")
decode_from_server = MessageReader[FromServer](FromServer, "a fork server")
decode_to_runner = MessageReader[ToRunner](ToRunner, "a job")
decode_from_runner = MessageReader[FromRunner](FromRunner, "a runner")
