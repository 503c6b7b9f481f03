"""What a job, its fork server and its runners say to each other.

    job                    fork server                        runner
     |  Setup ->                |                                |
     |  <- Prepared | Refused   |    once it has the pipeline    |
     |  Fork + a socket ->      |  forks ----------------------> |
     |  <- Forked + a pidfd     |                                |
     |  <- Started | Refused  ------------------------------------    once it is on its device
     |  Begin ->  Work -> ...  ---------------------------------->
     |  <- Returned | Raised  ------------------------------------    in the order of the Works
     |  <- Ended                |    when a runner has ended     |
     |  (end of file)           |  kills its runners and ends    |

Framed by `_ipc.frames`.
"""

import msgspec

from shmload._ipc.frames import MessageReader
from shmload.integrations._jobs.payload import Payload

# What items and results may take each; a frame's length has four bytes.
MAX_FRAME_NBYTES = (1 << 32) - 1


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What to load, and the surroundings that the job's own process has."""

    handle: str
    """As text."""
    path: tuple[bytes, ...]
    """`sys.path`, as the file system has it."""
    environment: dict[str, str | None]
    """Variables that the fork server was started with otherwise; None for one that is not set."""
    threads: int
    """Of each runner, for torch."""
    preload: tuple[str, ...]
    """Modules to import beside the libraries."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Make a runner; its socket comes with this."""

    number: int
    """Which of the job's places it takes."""
    device: str
    """Where its models go; `round-robin` for the accelerator that is next by its number."""


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The fork server has the pipeline."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """A runner exists; its pidfd comes with this."""

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A runner has ended."""

    pid: int
    how: str
    """`exit code 0` or the name of a signal."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """From now on work with this function."""

    function: Payload
    seed: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """Work on one item."""

    index: int
    item: Payload


class Started(msgspec.Struct, frozen=True, tag=True):
    """The runner's models are on its device."""


class Returned(msgspec.Struct, frozen=True, tag=True):
    """What the function returned."""

    index: int
    value: Payload


class Raised(msgspec.Struct, frozen=True, tag=True):
    """What the function raised."""

    index: int
    error: Payload
    traceback: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The pipeline cannot be had, or not on this device."""

    error: Payload
    traceback: str


ToServer = Setup | Fork
FromServer = Prepared | Forked | Ended | Refused
ToRunner = Begin | Work
FromRunner = Started | Returned | Raised | Refused

decode_to_server = MessageReader[ToServer](ToServer, "a job")
decode_from_server = MessageReader[FromServer](FromServer, "a fork server")
decode_to_runner = MessageReader[ToRunner](ToRunner, "a job")
decode_from_runner = MessageReader[FromRunner](FromRunner, "a runner")
