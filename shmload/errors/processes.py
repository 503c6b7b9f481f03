"""The errors of other processes: workers, services, jobs and their results, nodes."""

from shmload.errors.sources import ShmloadError


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
