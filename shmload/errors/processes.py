"""The errors of other processes: workers, services, templates, jobs and their results, nodes."""

import reprlib
from collections.abc import Sequence
from os import PathLike

from shmload.errors.sources import ArgumentError, ShmloadError

_Path = str | PathLike[str]
# Enough of an item to recognize it, such as a path.
_ITEM = reprlib.Repr()
_ITEM.maxstring = _ITEM.maxother = 200


class WorkerError(ShmloadError):
    """A worker process failed."""


class WorkerDied(WorkerError):
    """Workers kept dying on the same piece."""

    def __init__(self, path: _Path, how: str) -> None:
        self.path = path
        hint = "; perhaps the kernel ran out of memory, see dmesg" if "SIGKILL" in how else ""
        super().__init__(f"a worker died ({how}) while it decoded {path}, twice{hint}")


class WorkerStalled(WorkerError):
    """Workers made no progress within the deadline."""

    def __init__(self, path: _Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        super().__init__(
            f"no progress on {path} in {timeout_s:g} s, twice; check the disk it is on or raise "
            "SHMLOAD_STALL_TIMEOUT_S"
        )


class WorkerFailed(WorkerError):
    """A worker could not start or failed in its own code; its last output is a note."""


class ProtocolError(ShmloadError):
    """A message is not one of this version's protocol."""


class ServiceError(ShmloadError):
    """No service of this user runs, or one runs already."""


class TemplateUnavailable(ShmloadError):
    """No template could be started.

    Args:
        name: of the template.
        reason: what went wrong.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(
            f"the template {name} cannot be started: {reason}; programs under `shmload run` start "
            "in the ordinary way"
        )


class DuplicateKey(ArgumentError):
    """Two items of a job have the same key.

    Attributes:
        key: the key of both items.
        index: the number of the second, from 0.
    """

    def __init__(self, key: str, index: int) -> None:
        self.key = key
        self.index = index
        super().__init__(
            f"item {index} has the key {key!r}, as an item before it; give each its own"
        )


class JobError(ShmloadError):
    """A data-prep job could not finish all of its work."""


class JobFailed(JobError):
    """A job's processes cannot start or work, or the results cannot be written in their format."""


class ItemFailed(JobError):
    """The job's function raised an error for an item. It is `__cause__`; a note has its traceback.

    Attributes:
        index: the item's number, from 0.
        item: the item, or its key in a folder.
        reason: why there is no result; does not name the item.
    """

    def __init__(self, index: int, item: object, reason: str) -> None:
        self.index = index
        self.item = item
        self.reason = reason
        super().__init__(f"item {index}, {_ITEM.repr(item)}: {reason}")


class ItemKilled(ItemFailed):
    """Every process that worked on an item ended, so the job gave it up.

    Attributes:
        endings: how each process ended, such as `SIGKILL` or `exit code 3`.
    """

    def __init__(self, index: int, item: object, endings: Sequence[str]) -> None:
        self.endings = tuple(endings)
        hint = "; perhaps the kernel ran out of memory, see dmesg" if "SIGKILL" in endings else ""
        super().__init__(
            index, item, f"{len(endings)} processes ended at it ({', '.join(endings)}){hint}"
        )


class ResultsError(JobError):
    """A folder of results cannot be used."""


class ResultsBusy(ResultsError):
    """Another job writes to a folder of results."""

    def __init__(self, folder: _Path) -> None:
        self.folder = folder
        super().__init__(
            f"another job writes to {folder}; wait for its end, or give another folder"
        )


class ResultsMismatch(ResultsError):
    """A folder has results of other items, or of the same items made in another way.

    Attributes:
        folder: the folder of results.
        reason: what differs.
    """

    def __init__(self, folder: _Path, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(
            f"{folder} has the results of another job: {reason}; give another folder, or the items "
            "and facts of before. Nothing was changed"
        )


class ResultsInaccessible(ResultsError, OSError):
    """A file of results cannot be written or read. Shards that are done are intact."""

    def __init__(self, path: _Path, error: Exception) -> None:
        self.path = path
        reason = getattr(error, "strerror", None) or error
        super().__init__(
            f"{path} cannot be written or read: {reason}; see to its disk and permissions, then "
            "run the job again: it does what is missing"
        )
        self.errno = getattr(error, "errno", None)


class ResultsUnfinished(ResultsError, FileNotFoundError):
    """A folder has no index of results: the job that writes it has not ended, or not begun."""

    def __init__(self, folder: _Path) -> None:
        self.folder = folder
        super().__init__(f"{folder} has no index of results; run the job that writes it to its end")


class NodeError(ShmloadError):
    """A node of a cluster died, missed the deadline, or failed otherwise.

    Attributes:
        node_id: the cluster's name for the node.
    """

    def __init__(self, node_id: str, reason: str) -> None:
        self.node_id = node_id
        super().__init__(f"node {node_id[:12]}: {reason}")
