"""Whether there is room for segments, checked before the first byte is read.

Shared memory counts against the file system at /dev/shm, the machine, and the control group of the
process that touches a page first. The kernel kills processes of a group that exceeds its limit.
"""

from collections.abc import Iterator
from typing import NamedTuple

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes
from shmload._host.shm import shm_free_nbytes, shm_total_nbytes, unwritten_nbytes, written_nbytes
from shmload._segments.names import part_names, segment_names
from shmload._wording import format_nbytes
from shmload.errors import CapacityError, MemoryLimitExceeded, SharedMemoryFull

# Left for page tables and the workers themselves (about 40 MB each).
_MARGIN_NBYTES = 64 << 20


class _Limit(NamedTuple):
    """One limit on segments; sizes in bytes."""

    error: type[CapacityError]
    free: int
    kept: int
    """How much of `free` is not for new segments."""
    name: str
    remedy: str
    """Empty for /dev/shm: what helps there depends on what lies there."""


def require_room(
    nbytes: int, *, evictable: int = 0, is_charged_here: bool = True, beside_nbytes: int = 0
) -> None:
    """Check that there is room for `nbytes` of new segments.

    Args:
        nbytes: size of the segments, in bytes.
        evictable: how many bytes could be evicted for them.
        is_charged_here: whether this process or its workers fill them, rather than a service, which
            may be in another control group.
        beside_nbytes: what this process's children need until the segments are filled, in bytes. It
            takes memory, and nothing of /dev/shm.

    Raises:
        SharedMemoryFull: the file system at /dev/shm is too small.
        MemoryLimitExceeded: the control group or the machine has too little memory.
    """
    if nbytes == beside_nbytes == 0:
        return
    for limit in _limits(of_group=is_charged_here):
        free = limit.free + evictable
        wanted = nbytes if limit.error is SharedMemoryFull else nbytes + beside_nbytes
        if wanted + limit.kept > free:
            remedy = limit.remedy or _shm_remedy(nbytes)
            raise limit.error(wanted, max(0, free - limit.kept), limit.name, remedy)


def _shm_remedy(nbytes: int) -> str:
    """Return what gives room for `nbytes` in /dev/shm: what is shmload's, or others', or neither.

    What others have is named where shmload's own files would not free enough.
    """
    enlarge = (
        "enlarge it: `mount -o remount,size=90% /dev/shm`, `docker run --shm-size`, "
        "or an emptyDir of medium Memory"
    )
    total, free = shm_total_nbytes(), shm_free_nbytes()
    if nbytes > total:
        return f"all of it is {format_nbytes(total)}; {enlarge}"
    own = written_nbytes([*segment_names(), *part_names()])
    others = max(0, total - free - own)
    ways = ["free some with `shmload rm` or `shmload gc`"] if own else []
    if nbytes > free + own:
        ways.append(
            f"remove what others have there, {format_nbytes(others)} "
            "(`du -ah /dev/shm | sort -h | tail`)"
        )
    return ", or ".join([*ways, enlarge])


def room_nbytes(beside_nbytes: int = 0) -> int:
    """Return the room for new segments, in bytes; negative if the margin is used already.

    Args:
        beside_nbytes: as for `require_room`.
    """
    return min(
        limit.free - limit.kept - (0 if limit.error is SharedMemoryFull else beside_nbytes)
        for limit in _limits()
    )


def _limits(*, of_group: bool = True) -> Iterator[_Limit]:
    promised = unwritten_nbytes(part_names())  # to the parts of other loads
    yield _Limit(
        SharedMemoryFull,
        max(0, shm_free_nbytes() - promised),
        0,
        "/dev/shm",
        "",  # `_shm_remedy` looks at the files there
    )
    group_free = cgroup_free_nbytes() if of_group else None
    if group_free is not None:
        yield _Limit(
            MemoryLimitExceeded,
            group_free,
            promised + _MARGIN_NBYTES,
            "the memory control group",
            "raise the container's memory limit",
        )
    yield _Limit(
        MemoryLimitExceeded,
        machine_free_nbytes(),
        promised + _MARGIN_NBYTES,
        "the machine's memory",
        "free some with `shmload rm` or stop a process",
    )
