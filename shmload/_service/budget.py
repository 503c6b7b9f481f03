"""The service's budget for resident segments: its default, and warnings of one that cannot be kept.

What goes to stay within it is decided in `_segments.eviction`.
"""

from collections.abc import Iterable, Iterator

from shmload._host.linux import shm_total_nbytes
from shmload._host.procfs import cgroup_limit_nbytes
from shmload._segments.eviction import Budget
from shmload._segments.listing import SegmentInfo
from shmload._wording import format_nbytes


def service_budget(nbytes: int) -> Budget:
    """Return a service's budget of so many bytes."""
    return Budget(
        nbytes,
        "the service's budget",
        ("raise `shmload serve --budget`", "load without the service, with SHMLOAD_SERVICE=off"),
    )


def default_budget() -> int:
    """Return half of the smaller limit, /dev/shm or the memory control group, in bytes."""
    return min(_limits().values()) // 2


def budget_warnings(
    budget: int, resident: Iterable[SegmentInfo], file_nbytes: int | None = None
) -> Iterator[str]:
    """Yield warnings for a budget that cannot be reached or is exceeded already.

    Args:
        budget: in bytes.
        resident: all segments at the start of the service.
        file_nbytes: the largest file that the service may write, in bytes; None for no limit.
    """
    if budget == 0:
        yield "the budget is 0: each load that keeps weights is refused"
    if file_nbytes is not None and file_nbytes < budget:
        yield (
            f"RLIMIT_FSIZE lets the service write files of {format_nbytes(file_nbytes)}; it "
            "refuses a load with a larger segment; raise it with `ulimit -f unlimited`, or "
            "LimitFSIZE= of a systemd unit"
        )
    for name, nbytes in _limits().items():
        if budget > nbytes:
            yield (
                f"the budget is {format_nbytes(budget)} but {name} allows for "
                f"{format_nbytes(nbytes)}; what is resident stays within that"
            )
    nbytes = sum(info.nbytes for info in resident)
    if nbytes > budget:
        yield (
            f"{format_nbytes(nbytes)} are resident already, more than the budget of "
            f"{format_nbytes(budget)}; the excess is evicted at the next decode"
        )


def _limits() -> dict[str, int]:
    """Return the limits for all segments together, in bytes, by name."""
    limits = {"/dev/shm": shm_total_nbytes(), "the memory control group": cgroup_limit_nbytes()}
    return {name: limit for name, limit in limits.items() if limit is not None}
