"""Has torch unpickle a shard that shmload does not read itself, into memory of the load.

Guarantee: the copy has no name. It goes with the load that asked for it, however that ends. Its
header is the one that the load was planned by.
"""

import os
from collections.abc import Callable

import msgspec

from shmload._checkpoints.formats.known import OF_SEGMENTS
from shmload._checkpoints.formats.unpickled import (
    Answer,
    Lost,
    Wish,
    unpickle,
)
from shmload._checkpoints.header import Header
from shmload._checkpoints.identity import is_unchanged
from shmload._host.limits import no_memory, process_refused
from shmload.errors import (
    PickleUnread,
    ShardChanged,
    ShmloadError,
    WorkerDied,
    WorkerFailed,
    WorkerStalled,
)

_Path = str | os.PathLike[str]

_ATTEMPTS = 2


def unpack(
    path: _Path, fd: int, source: os.stat_result, planned: Header, go_on: Callable[[], None]
) -> int:
    """Return a descriptor of a file in memory, like a segment, with the tensors of a shard.

    Args:
        path: of the shard.
        fd: the open shard.
        source: its fstat when the load was planned.
        planned: the header that the load was planned by.
        go_on: called several times a second; what it raises ends the call.

    Returns:
        The descriptor, which is the caller's. The file has as many bytes as the tensors have.

    Raises:
        PickleUnread: it is damaged where only a read of all of it tells.
        ShardChanged: the shard is no longer what the load was planned by.
        CapacityError: there is no memory, or no process may be started.
        WorkerError: the process that unpickles it died, stalled or failed.
    """
    target_fd = os.memfd_create("shmload-unpickled", os.MFD_CLOEXEC)
    try:
        answer = _ask(path, fd, target_fd, go_on)
        if not is_unchanged(source, os.fstat(fd)):
            raise ShardChanged(path)
        _require_success(path, source.st_size, answer)
        header = OF_SEGMENTS.read_header(target_fd, path)
        if msgspec.structs.replace(header, metadata=None, is_unpickled=True) != planned:
            raise WorkerFailed(f"{path} was unpickled to other tensors than before; load it again")
    except BaseException:
        os.close(target_fd)
        raise
    return target_fd


def _ask(path: _Path, fd: int, target_fd: int, go_on: Callable[[], None]) -> Answer:
    """Have it unpickled; once more if the process is lost."""
    for attempt in range(1, _ATTEMPTS + 1):
        os.ftruncate(target_fd, 0)
        try:
            return unpickle(fd, target_fd, Wish.of(path), has_data=True, go_on=go_on)
        except Lost as exc:
            if exc.lacked_memory:
                raise no_memory(path) from exc
            if attempt == _ATTEMPTS:
                raise _error_of_loss(path, exc) from exc
        except OSError as exc:
            if isinstance(exc, ShmloadError):
                raise
            refused = process_refused("the process that unpickles", exc)
            error = refused or WorkerFailed(f"{path} cannot be unpickled: {exc}")
            raise error from exc
    raise AssertionError("the last attempt returns or raises")


def _error_of_loss(path: _Path, loss: Lost) -> ShmloadError:
    return WorkerDied(path, loss.how) if loss.how else WorkerStalled(path, loss.timeout_s)


def _require_success(path: _Path, nbytes: int, answer: Answer) -> None:
    if answer.refusal:  # what its header did not tell, such as an end that is missing
        raise PickleUnread(path, nbytes, answer.refusal)
    if answer.lacks_memory:
        raise no_memory(path)
    if answer.failure:
        error = WorkerFailed(f"a worker failed while it unpickled {path}; please report this")
        error.add_note(answer.failure)
        raise error
