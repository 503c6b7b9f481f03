"""Every error that shmload raises on purpose; import them from here.

Guarantee: an error says what happened, to which file or segment, and what to do; it can be pickled
with its facts, which are attributes. What a file, a tensor or a process is called cannot steer a
terminal, nor add a line to a log, by way of its text. May import `_wording` only.
"""

import contextlib
from collections.abc import Iterator, Mapping
from os import PathLike

from shmload._wording import printing


class ShmloadError(Exception):
    """The base of every error in this package.

    Args:
        text: what happened, to which file or segment, and what to do.
        facts: become attributes of these names.
    """

    errno: int | None = None

    def __init__(self, text: str = "", **facts: object) -> None:
        super().__init__(text)
        vars(self).update(facts)

    def __str__(self) -> str:
        # OSError would put the errno in front, and KeyError would quote the text.
        return printing(str(self.args[0])) if self.args else ""


# Arguments, files and libraries -------------------------------------------------------------------


class ArgumentError(ShmloadError, ValueError):
    """An argument has a value that cannot work."""


class UnknownDtype(ArgumentError):
    """A dtype name is not one that torch and safetensors share."""


class UnknownComponent(ArgumentError):
    """A component is named that the pipeline does not have.

    Attributes:
        name: the component.
    """

    name: str


class SourceNotFound(ShmloadError, FileNotFoundError):
    """A source is neither an existing path nor a hub id that can be found or downloaded."""


class CheckpointError(ShmloadError):
    """A file of a checkpoint is missing, damaged, changed, or not what shmload can load.

    Attributes:
        path: the file, or its URL.
    """

    path: str | PathLike[str]


class ShardMissing(CheckpointError, FileNotFoundError):
    """A shard named by an index or a caller does not exist."""


class ShardUnreadable(CheckpointError, OSError):
    """The kernel refused to open or read a shard, or the server that has it did not give it."""


class ShardMalformed(CheckpointError):
    """A shard breaks the rules of its format, or has what only the libraries read.

    Attributes:
        why: what only the libraries read, such as a class that is no tensor; empty otherwise.
    """

    why: str = ""


class ShardTruncated(CheckpointError):
    """A shard is shorter than its header says, or has no end.

    Attributes:
        wanted: its size by its header, in bytes; None if only its end says that.
        got: its size, in bytes.
    """

    wanted: int | None
    got: int


class ShardChanged(CheckpointError):
    """A shard was overwritten while it was decoded, or since it was shared."""


class IndexMalformed(CheckpointError):
    """A JSON file that lists components or shards is broken or points outside its directory."""


class LibraryError(ShmloadError, ImportError):
    """A library is not installed, is too old, or is unusable in this process."""


@contextlib.contextmanager
def needing(package: str, user: str, install: str) -> Iterator[None]:
    """Import a package that need not be installed.

    A package that is installed and broken raises its own error.

    Args:
        package: as it is imported inside the block.
        user: what needs it.
        install: what pip calls it.

    Raises:
        LibraryError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != package:
            raise
        raise LibraryError(
            f"{user} needs {install}, which is not installed; `pip install {install}`"
        ) from exc


# Memory and segments ------------------------------------------------------------------------------


class CapacityError(ShmloadError, OSError):
    """There is not enough memory, or another limit forbids a load.

    Attributes:
        needed: what the load needs, in bytes; None if it was not counted.
        available: what is left, in the same unit, or the value of the limit; None if it was not
            looked at.
        limit: what sets the limit, such as `/dev/shm` or `RLIMIT_NOFILE`.
    """

    needed: int | None = None
    available: int | None = None
    limit: str


class SharedMemoryFull(CapacityError):
    """The file system at /dev/shm, or the budget, is too small."""


class MemoryLimitExceeded(CapacityError):
    """The memory of the machine, or of this process's control group, is too small."""


class DoesNotFit(CapacityError):
    """Weights need more memory on a device, or more of a budget, than there is.

    Attributes:
        device_map: the closest map that fits, to pass instead; None if there is none.
    """

    device_map: Mapping[str, str] | None = None


class SegmentError(ShmloadError):
    """A segment cannot be used, or nothing can be kept in /dev/shm.

    Attributes:
        name: of the segment.
    """

    name: str


class SegmentNotFound(SegmentError, KeyError):
    """No resident model or segment matches a name, or several do.

    Attributes:
        candidates: the names, or ids, that it fits.
    """

    candidates: tuple[str, ...] = ()


class SegmentBusy(SegmentError):
    """A process or a publication uses a segment, so it was not removed.

    Attributes:
        names: names of the segments that are in use.
        removed: names of the other segments of this request, which were removed.
    """

    names: tuple[str, ...]
    removed: tuple[str, ...] = ()


class SegmentCorrupt(SegmentError):
    """A segment's header is damaged, or its bytes do not match the digest there."""


class SegmentUntrusted(SegmentError):
    """A name in /dev/shm belongs to another user or is not a plain private file."""


class SegmentTimeout(SegmentError, TimeoutError):
    """What another process or thread uses, decodes or changes was not free in time."""


class PublicationError(SegmentError):
    """A thing cannot be published, a publication not be loaded, or weights not be updated.

    Attributes:
        reason: what is wrong, by its path.
    """

    reason: str


class ViewRefused(ShmloadError, OSError):
    """A view directory cannot be made at its place.

    Attributes:
        path: the place, or the file in it that is in the way.
    """

    path: str | PathLike[str]


# Other processes ----------------------------------------------------------------------------------


class WorkerError(ShmloadError):
    """A worker died, stalled or failed, and so did the one in its place.

    Attributes:
        path: the shard that it decoded, if it is known.
        how: how its process ended, such as `SIGKILL`; empty if it has not ended.
    """

    path: str | None = None
    how: str = ""


class ProtocolError(ShmloadError):
    """A message is not one of this version's protocol."""


class ServiceError(ShmloadError):
    """The service cannot be used."""


class JobError(ShmloadError):
    """A data-prep job could not finish all of its work."""


class ItemFailed(JobError):
    """An item has no result.

    The job's function raised an error, which is `__cause__`, with its traceback in a note; or every
    process that worked on the item ended.

    Attributes:
        index: the item's number, from 0.
        item: the item, or its key in a folder.
        reason: why there is no result; does not name the item.
        endings: how each process ended, such as `SIGKILL` or `exit code 3`.
    """

    index: int
    item: object
    reason: str
    endings: tuple[str, ...] = ()


class ResultsError(JobError, OSError):
    """A folder of results cannot be used; shards that are done are intact.

    Attributes:
        folder: the folder, or the file in it that is at fault.
    """

    folder: str


class NodeError(ShmloadError):
    """A node of a cluster died, missed the deadline, or failed otherwise.

    Attributes:
        node_id: the cluster's name for the node.
    """

    node_id: str


__all__ = sorted(
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, ShmloadError)
)

for _name in __all__:
    globals()[_name].__module__ = "shmload"  # what tracebacks and help() show
