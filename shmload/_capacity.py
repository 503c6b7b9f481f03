"""Whether there is room, asked before the first byte is read.

Shared memory is charged to whoever touches a page first, counts against the file system at
/dev/shm, the control group and the machine, and a group that runs over is killed rather than told.
"""

from shmload._errors import MemoryLimitExceeded, SharedMemoryFull
from shmload._identity import PART_SUFFIX, name_prefix
from shmload._linux import shm_free_nbytes, unwritten_nbytes
from shmload._procfs import cgroup_free_nbytes, machine_free_nbytes

# Left to the rest of the process: page tables, the workers themselves (about 40 MB each).
_MARGIN_NBYTES = 64 << 20


def require_room(nbytes: int) -> None:
    """Check that segments of so many bytes can be made.

    Raises:
        SharedMemoryFull: the file system at /dev/shm is too small.
        MemoryLimitExceeded: the control group or the machine has too little memory.
    """
    if nbytes == 0:
        return
    promised = unwritten_nbytes(name_prefix(), PART_SUFFIX)  # to loads that run beside this one
    free = max(0, shm_free_nbytes() - promised)
    if nbytes > free:
        raise SharedMemoryFull(
            nbytes,
            free,
            "/dev/shm",
            "free some with `shmload rm` or `shmload gc`, or enlarge it: "
            "`mount -o remount,size=90% /dev/shm`, `docker run --shm-size`, "
            "or an emptyDir of medium Memory",
        )
    group_free = cgroup_free_nbytes()
    if group_free is not None and nbytes + promised + _MARGIN_NBYTES > group_free:
        raise MemoryLimitExceeded(
            nbytes, group_free, "the memory control group", "raise the container's memory limit"
        )
    machine_free = machine_free_nbytes()
    if nbytes + promised + _MARGIN_NBYTES > machine_free:
        raise MemoryLimitExceeded(
            nbytes,
            machine_free,
            "the machine's memory",
            "free some with `shmload rm` or stop a process",
        )
