"""The doctor: nine checks of what makes loads fail or slow on this machine, with a remedy for each.

Guarantee: nothing changes; what `shmload gc` would remove is counted and stays.
"""

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
from packaging.version import Version

from shmload._checkpoints.remote import is_url
from shmload._compat import TESTED
from shmload._host.procfs import (
    cgroup_free_nbytes,
    cgroup_limit_nbytes,
    file_system,
    machine_free_nbytes,
)
from shmload._host.procs import has_pidfds
from shmload._host.shm import SHM_DIR, shm_free_nbytes, shm_total_nbytes
from shmload._loading.plan import plan
from shmload._loading.room import chosen_budget
from shmload._runtimes import kinds
from shmload._segments.eviction import evictable
from shmload._segments.listing import segments, segments_by_lock
from shmload._segments.upkeep import find_garbage, pinned_outdated
from shmload._service.notice import service_status
from shmload._settings import settings
from shmload._wording import format_nbytes
from shmload.errors import ShmloadError

# Below the first (docker's default for /dev/shm is 64 MiB) almost no model fits. The second is the
# size of Stable Diffusion 1.5 in 16 bits.
_LEAST_NBYTES = 256 << 20
_SMALL_PIPELINE_NBYTES = 2_700_000_000
_LEAST_KERNEL = (5, 4)

_MOUNT = "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
_MAKE_ROOM = "shmload gc; shmload ls"  # `shmload ls` shows what `shmload rm` can remove

State = Literal["ok", "warn", "bad"]
_Judgement = tuple[State, str, str]
"""The state, what was found, and a command that helps, which is not shown for `ok`."""


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    state: State
    detail: str
    remedy: str | None = None
    """A command; None if the state is ok."""


def diagnose(source: str | None = None, dtype: object = None) -> Iterator[Finding]:
    """Examine this machine as this process sees it; takes some seconds, to import torch.

    Args:
        source: judge room by what `warm` would take for it; None for the sizes of usual models.
        dtype: as for `warm`.

    Raises:
        ShmloadError: the source cannot be planned.
        ArgumentError: a variable such as SHMLOAD_BUDGET has a value of the wrong kind.
    """
    settings()
    needed = None
    if source is not None:  # of a URL only its server knows anything; else nothing is downloaded
        planned = plan(source, dtype=dtype, keep=True, local_files_only=not is_url(source))
        needed = planned.decode_nbytes
    idle = 0
    with contextlib.suppress(ShmloadError):  # the first check says why
        idle = sum(info.nbytes for info in evictable(segments()))
    needs = _Needs(needed, idle)
    for name, look in _CHECKS.items():
        try:
            state, detail, remedy = look(needs)
        except (ShmloadError, OSError) as exc:  # such as: /dev/shm is closed to this user
            state, detail, remedy = "bad", str(exc), _MOUNT
        yield Finding(name, state, detail, None if state == "ok" else remedy)


# Room ---------------------------------------------------------------------------------------------


class _Needs(NamedTuple):
    """What room is judged by."""

    nbytes: int | None
    """What the source would take; None without a source."""
    idle_nbytes: int
    """What a load would evict if it were short of room."""

    def judge(self, free: int, detail: str, remedy: str) -> _Judgement:
        """Judge room in bytes; what is idle counts as free."""
        if self.idle_nbytes:
            detail += f", {format_nbytes(self.idle_nbytes)} more of idle models"
        free += self.idle_nbytes
        if self.nbytes is not None:
            detail += f"; the source takes {format_nbytes(self.nbytes)}"
            return "ok" if free >= self.nbytes else "bad", detail, remedy
        if free < _LEAST_NBYTES:
            return "bad", f"{detail}; almost no model fits", remedy
        if free < _SMALL_PIPELINE_NBYTES:
            small = format_nbytes(_SMALL_PIPELINE_NBYTES)
            return "warn", f"{detail}; a small pipeline takes {small}", remedy
        return "ok", detail, ""


def _shared_memory(needs: _Needs) -> _Judgement:
    segments_by_lock()  # it says why /dev/shm cannot be used
    kind = file_system(SHM_DIR.stat().st_dev)
    if kind not in ("tmpfs", ""):
        return "bad", f"{kind} at /dev/shm, not tmpfs", _MOUNT
    if not os.access(SHM_DIR, os.W_OK | os.X_OK):
        return "bad", "this user may not write to /dev/shm", "sudo chmod 1777 /dev/shm"
    free, total = shm_free_nbytes(), shm_total_nbytes()
    detail = f"{format_nbytes(free)} free of {format_nbytes(total)} at /dev/shm"
    remedy = f"{_MAKE_ROOM}; sudo mount -o remount,size=90% /dev/shm, or docker run --shm-size=16g"
    return needs.judge(free, detail, remedy)


def _control_group(needs: _Needs) -> _Judgement:
    free, limit = cgroup_free_nbytes(), cgroup_limit_nbytes()
    if free is None or limit is None:
        return "ok", "no memory limit", ""
    detail = f"{format_nbytes(free)} free of {format_nbytes(limit)}"
    remedy = f"{_MAKE_ROOM}; docker update --memory=16g --memory-swap=16g CONTAINER"
    return needs.judge(free, detail, remedy)


def _memory(needs: _Needs) -> _Judgement:
    free = machine_free_nbytes()
    remedy = f"{_MAKE_ROOM}; ps -eo rss,pid,args --sort=-rss | head"
    return needs.judge(free, f"{format_nbytes(free)} available", remedy)


def _budget(needs: _Needs) -> _Judgement:
    found = chosen_budget()
    if found is None:
        return "ok", "none: idle models go when memory is short", ""
    free = max(0, found.nbytes - sum(info.nbytes for info in segments_by_lock()))
    detail = f"{format_nbytes(free)} free of {format_nbytes(found.nbytes)}, {found.name}"
    return needs.judge(free, detail, f"{_MAKE_ROOM}; or {found.remedy}")


def _leftovers(_: _Needs) -> _Judgement:
    garbage = len(find_garbage())
    pinned = sum(info.nbytes for info in pinned_outdated())
    if pinned:
        detail = f"{format_nbytes(pinned)} pinned, of files that have changed"
        return "warn", detail, "shmload unpin NAME; shmload gc"
    if garbage:
        return "warn", f"{garbage} for `shmload gc` to remove", "shmload gc"
    return "ok", "none", ""


# What else a load needs ---------------------------------------------------------------------------


def _kernel(_: _Needs) -> _Judgement:
    release = os.uname().release
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_KERNEL:
        return "bad", f"Linux {release}; workers need 5.4 or later", "boot a newer kernel"
    if not has_pidfds():
        remedy = "sudo apt-get install --only-upgrade libseccomp2 containerd.io  # on the host"
        return "bad", f"Linux {release}; a sandbox forbids pidfd_open", remedy
    return "ok", f"Linux {release}", ""


def _service(_: _Needs) -> _Judgement:
    status = service_status()
    if status is None:
        return "ok", "none runs", ""
    if failed := status.failed_preloads:
        detail = f"process {status.pid}; {failed} of its {status.to_preload} preloads failed"
        return "warn", detail, "see its log, mend its list, and start it again"
    return "ok", f"process {status.pid}", ""


def _libraries(_: _Needs) -> _Judgement:
    found: dict[str, str] = {}
    for name in TESTED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    detail = ", ".join(map(" ".join, found.items())) or "none is installed"
    untested = {
        name: TESTED[name][1]
        for name, version in found.items()
        if Version(version).release[:2] > Version(TESTED[name][1]).release
    }
    if not untested:
        return "ok", detail, ""
    pins = " ".join(f"'{name}~={newest}.0'" for name, newest in untested.items())
    newest = ", ".join(map(" ".join, untested.items()))
    return "warn", f"{detail}; tested up to {newest}", f"pip install {pins}"


def _devices(_: _Needs) -> _Judgement:
    try:
        import torch  # takes a second or more

        names = kinds.accelerator_names()
        free = kinds.free_nbytes(names)
    except ModuleNotFoundError:
        return "ok", "torch is not installed", ""
    except (ImportError, OSError, RuntimeError) as exc:
        reason = str(exc).partition("\n")[0]
        return "bad", f"torch fails: {reason}", "pip install --force-reinstall torch; nvidia-smi"
    if not names and kinds.may_have_accelerators():
        detail = f"there is a driver, but torch {torch.__version__} finds no device"
        return "warn", detail, "python -c 'import torch; print(torch.zeros(1).cuda())'"
    rooms = (f"{name}, {format_nbytes(free[name] or 0)} free" for name in names)
    return "ok", f"torch {torch.__version__}: {'; '.join(rooms) or 'no accelerator'}", ""


_CHECKS = {
    "shared memory": _shared_memory,
    "control group": _control_group,
    "memory": _memory,
    "budget": _budget,
    "leftovers": _leftovers,
    "kernel": _kernel,
    "service": _service,
    "libraries": _libraries,
    "devices": _devices,
}
