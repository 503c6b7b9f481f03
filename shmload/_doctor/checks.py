"""The checks: each turns measured values into one finding, with a remedy.

They measure nothing themselves; `doctor` passes the values.
"""

import re
import resource
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shmload._checkpoints.formats.known import format_names
from shmload._doctor.speed import CopySpeed, ReadSpeed
from shmload._host.procfs import FileSystem
from shmload._host.reading import Reading
from shmload._loading.plan import Plan
from shmload._segments.eviction import Budget
from shmload._service.protocol import VERSION, Status
from shmload._settings import ServiceUse
from shmload._wording import count_of, format_nbytes
from shmload.errors import PeerRefused, ServiceUnavailable, ShmloadError
from shmload.workers.ranges import RANGE_NBYTES, REQUESTS

# Below the first (docker's default for /dev/shm is 64 MiB) almost no model fits. The second is the
# size of Stable Diffusion 1.5 in 16 bits.
_LEAST_NBYTES = 256 << 20
_SMALL_PIPELINE_NBYTES = 2_700_000_000
# A lease takes one descriptor, a shard that is being decoded two; a pipeline has up to 30 shards.
_LEAST_FILES, _ENOUGH_FILES = 128, 1024
# The kernel's own default since 5.16.
_ENOUGH_LOCKED_NBYTES = 8 << 20
# The next block of a large model no longer fits then.
_NEARLY_ALL = 0.9
_LEAST_KERNEL = (5, 4)
_SLOW_ANSWER_S = 1.0
# A plain SATA disk reads 0.5 GB/s; copying from the page cache below 1 GB/s has another cause.
_SLOW_DISK_BYTES_PER_S, _SLOW_CACHE_BYTES_PER_S = 0.5e9, 1e9
# Reading less is too quick to measure.
_TELLING_NBYTES = 16 << 20
# PCIe 3 with eight lanes gives 6 to 7 GB/s.
_SLOW_COPY_BYTES_PER_S = 5e9

_ENLARGE = "sudo mount -o remount,size=90% /dev/shm"
_OWN_SOCKET = "export SHMLOAD_SOCKET=$HOME/.shmload/service.sock"
_MAKE_ROOM = "shmload gc; shmload ls"  # `shmload ls` shows what `shmload rm` can remove

State = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    state: State
    detail: str
    remedy: str | None = None
    """A command; None if the state is ok."""


# Memory -------------------------------------------------------------------------------------------


def check_shared_memory(
    found: FileSystem | None,
    total: int,
    free: int,
    is_writable: bool,
    needed: int | None = None,
    idle: int = 0,
) -> Finding:
    """Check the file system at /dev/shm.

    Args:
        found: the file system; None if it is unknown.
        total: its size, in bytes.
        free: what is free of it, in bytes.
        is_writable: this user may write to it.
        needed: what a source would take, in bytes; None to judge by the sizes of models.
        idle: what a load evicts if it is short of room, in bytes.
    """
    if found is not None and found.kind != "tmpfs":
        remedy = "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        return Finding("shared memory", "bad", f"{found.kind} at /dev/shm, not tmpfs", remedy)
    if not is_writable:
        remedy = "sudo chmod 1777 /dev/shm"
        return Finding("shared memory", "bad", "this user may not write to /dev/shm", remedy)
    remedy = f"{_ENLARGE}  # a container: docker run --shm-size=16g"
    if _room(total, needed) != _room(free + idle, needed):  # other files take it
        remedy = f"{_MAKE_ROOM}; du -ah /dev/shm | sort -h | tail -n 5"
    room = f"{format_nbytes(free)} free of {format_nbytes(total)} at /dev/shm"
    return _judged("shared memory", free + idle, needed, f"{room}{_more(idle)}", remedy)


def check_huge_pages(found: FileSystem | None, policy: str | None) -> Finding:
    """Check that the kernel follows /dev/shm's mount option for huge pages.

    Both choices are fine. Warming 3.4 GB took 2.4 s without huge pages (1.3 to 3.1, n=16). With
    `within_size` it took 6.6 s when nothing had been written before (3.8 to 8.4, n=5), then 3.0 s
    (0.7 to 5.5, n=11), on 2 cores of a virtual AMD EPYC with Linux 6.18 (2026-11-20).

    Args:
        found: the file system at /dev/shm.
        policy: the word in `shmem_enabled`, which can overrule the mount; None if it is hidden.
    """
    options = found.options if found else ()
    chosen = next((option for option in options if option.startswith("huge=")), "huge=never")
    detail = f"{chosen} at /dev/shm, {policy or 'unknown'} in shmem_enabled"
    is_overruled = policy == "deny" and chosen != "huge=never"
    remedy = "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return _finding("huge pages", "warn" if is_overruled else "ok", detail, remedy)


def check_leftovers(names: Sequence[str], pinned: int = 0, viewed: int = 0) -> Finding:
    """Check how many names `shmload gc` would remove, and what it leaves though files changed.

    Args:
        names: the names.
        pinned: size of the pinned segments whose files have changed, in bytes, without `viewed`.
        viewed: size of those that a view directory needs: `unpin` leaves these.
    """
    parts = [f"{len(names)} for `shmload gc` to remove"] if names else []
    parts += [f"{format_nbytes(pinned)} pinned, of files that have changed"] if pinned else []
    if viewed:
        parts.append(f"{format_nbytes(viewed)} in view directories, of files that have changed")
    ways = ["shmload warm --views"] if viewed else []
    ways += ["shmload ls; shmload unpin NAME"] if pinned else []
    ways += ["shmload gc"] if names or pinned else []
    return _finding(
        "leftovers", "warn" if parts else "ok", ", ".join(parts) or "none", "; ".join(ways)
    )


def check_removal(is_removed_at_logout: bool) -> Finding:
    """Check that segments outlive the user's session."""
    if not is_removed_at_logout:
        return Finding("logout", "ok", "segments stay when this user logs out")
    detail = "systemd removes this user's segments at the last logout (RemoveIPC=yes)"
    return Finding("logout", "warn", detail, "loginctl enable-linger")


def check_control_group(
    free: int | None, limit: int | None, needed: int | None = None, idle: int = 0
) -> Finding:
    """Check the room in the memory control groups, in bytes; None for no limit.

    `needed` and `idle` are as for `check_shared_memory`.
    """
    if free is None or limit is None:
        return Finding("control group", "ok", "no memory limit")
    detail = f"{format_nbytes(free)} free of {format_nbytes(limit)}{_more(idle)}"
    remedy = f"{_MAKE_ROOM}  # and docker update --memory=16g --memory-swap=16g CONTAINER"
    return _judged("control group", free + idle, needed, detail, remedy)


def check_machine_memory(available: int, needed: int | None = None, idle: int = 0) -> Finding:
    """Check the memory that is available without swapping, in bytes.

    `needed` and `idle` are as for `check_shared_memory`.
    """
    remedy = f"{_MAKE_ROOM}; ps -eo rss,pid,args --sort=-rss | head"
    detail = f"{format_nbytes(available)} available{_more(idle)}"
    return _judged("machine memory", available + idle, needed, detail, remedy)


def check_budget(
    budget: Budget | None, resident: int, needed: int | None = None, idle: int = 0
) -> Finding:
    """Check the room in the budget that loads keep to.

    Args:
        budget: the budget; None if there is none.
        resident: what is resident, in bytes.
        needed: what a source would take, in bytes; None to judge by the sizes of models.
        idle: what of the resident a load may evict, in bytes.
    """
    if budget is None:
        return Finding("budget", "ok", "none: idle models go when memory is short")
    free = max(0, budget.nbytes - resident)
    room = max(0, budget.nbytes - (resident - idle))
    total = f"{format_nbytes(budget.nbytes)}, {budget.name}"
    detail = f"{format_nbytes(free)} free of {total}{_more(room - free)}"
    remedy = f"{_MAKE_ROOM}  # unpin or remove models; or {budget.ways[0]}"
    return _judged("budget", room, needed, detail, remedy)


def _judged(name: str, room: int, needed: int | None, detail: str, remedy: str) -> Finding:
    """Judge room in bytes, and say by what."""
    state = _room(room, needed)
    if needed is not None:
        detail += f"; the source takes {format_nbytes(needed)}"
    elif state == "bad":
        detail += "; almost no model fits"
    elif state == "warn":
        detail += f"; a small pipeline takes {format_nbytes(_SMALL_PIPELINE_NBYTES)}"
    return _finding(name, state, detail, remedy)


def _room(nbytes: int, needed: int | None) -> State:
    """Judge room by what a source needs; without one, by the sizes of models."""
    if needed is not None:
        return "ok" if nbytes >= needed else "bad"
    if nbytes < _LEAST_NBYTES:
        return "bad"
    return "warn" if nbytes < _SMALL_PIPELINE_NBYTES else "ok"


def _more(idle: int) -> str:
    return f", {format_nbytes(idle)} more of idle models" if idle else ""


# Settings and limits -----------------------------------------------------------------------------


def check_settings(wrong: Sequence[str], given: Sequence[str]) -> Finding:
    """Check the variables of the environment.

    Args:
        wrong: a sentence, which begins with the variable, for each that is not what was meant.
        given: the settings that have a value.
    """
    detail = "; ".join(wrong) or " ".join(given) or "all have their defaults"
    names = " ".join(sentence.partition(" ")[0] for sentence in wrong)
    return _finding("settings", "warn" if wrong else "ok", detail, f"unset {names}")


def check_locked_memory(soft: int) -> Finding:
    """Check how many bytes a process may lock; -1 for no limit.

    shmload locks none; some device drivers do.
    """
    name, remedy = "locked memory", "sudo prlimit --pid $$ --memlock=unlimited"
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "ok", "no limit")
    state: State = "ok" if soft >= _ENOUGH_LOCKED_NBYTES else "warn"
    hint = "" if state == "ok" else ", less than the kernel's default; pinning may fail"
    return _finding(name, state, f"at most {format_nbytes(soft)}{hint}", remedy)


def check_page_locks(limit: int, pinned: Iterable[int]) -> Finding:
    """Check whether a process pins as much of waiting weights as it may.

    Args:
        limit: how many bytes a process may pin.
        pinned: how many bytes each process pins.
    """
    most = max(pinned, default=0)
    detail = f"at most {format_nbytes(limit)} of weights that wait for a device"
    if most >= limit * _NEARLY_ALL and most:
        detail += f", and a process pins {format_nbytes(most)}: others of its weights travel slowly"
        remedy = f"export SHMLOAD_PAGE_LOCKED={2 * most >> 20}MiB"
        return Finding("page locks", "warn", detail, remedy)
    return Finding("page locks", "ok", detail)


def check_open_files(soft: int, hard: int) -> Finding:
    """Check how many descriptors a process may have; -1 for no limit."""
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    state: State = "ok" if soft >= _ENOUGH_FILES else "warn" if soft >= _LEAST_FILES else "bad"
    remedy = "sudo prlimit --pid $$ --nofile=65536"
    if hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES:
        remedy = f"ulimit -Sn {65536 if hard == resource.RLIM_INFINITY else hard}"
    return _finding("open files", state, f"at most {soft} a process", remedy)


def check_kernel(release: str, has_pidfds: bool) -> Finding:
    """Check that the kernel has pidfds, and that no sandbox forbids them."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_KERNEL:
        remedy = "sudo apt-get install linux-generic && sudo reboot  # of the host"
        return Finding("kernel", "bad", f"Linux {release}; workers need 5.4 or later", remedy)
    if not has_pidfds:
        remedy = "sudo apt-get install --only-upgrade libseccomp2 containerd.io  # on the host"
        return Finding("kernel", "bad", f"Linux {release}; a sandbox forbids pidfd_open", remedy)
    return Finding("kernel", "ok", f"Linux {release}")


# Service ------------------------------------------------------------------------------------------


def check_service(
    path: Path,
    use: ServiceUse,
    found: Status | ShmloadError | None,
    elapsed_s: float,
    pid: int | None = None,
    why_none: str = "",
) -> Finding:
    """Check the service.

    Args:
        path: of its socket.
        use: the setting: whether loads use a service.
        found: its answer, or the error; None if there is no socket.
        elapsed_s: how long the answer took, in seconds.
        pid: of the service, in this process's pid namespace; None if unknown.
        why_none: why none of this user can listen there; empty if one can.
    """
    match found:
        case None if why_none:
            state: State = "bad" if use == "require" else "warn"
            detail, remedy = f"none runs, and none can: {why_none}", _OWN_SOCKET
        case None:
            state = "bad" if use == "require" else "ok"
            detail, remedy = "none runs", "shmload serve &"
        case Status():
            state = "ok" if elapsed_s < _SLOW_ANSWER_S else "warn"
            detail = f"process {found.pid}, protocol {VERSION}, answers in {elapsed_s:.3f} s"
            remedy = "shmload top"
        case ServiceUnavailable(__cause__=ConnectionRefusedError()):
            state = "bad" if use == "require" else "warn"
            detail = f"none runs, and {path} is left from a dead one"
            remedy = "shmload serve &"  # it replaces the socket
        case PeerRefused() | ServiceUnavailable(__cause__=PermissionError()):
            state, detail = "bad", str(found)
            remedy = _OWN_SOCKET
        case _:
            state, detail = "bad", str(found)
            remedy = f"kill -9 {pid}; shmload serve &" if pid else "shmload serve &"
    return _finding("service", state, detail, remedy)


# Source -------------------------------------------------------------------------------------------


def check_source(
    source: str,
    sizes: Sequence[int],
    file_systems: Iterable[FileSystem | None],
    resident: int = 0,
    dtype: object = None,
) -> Finding:
    """Check the file systems of a source's weight files; sizes in bytes.

    Args:
        source: what was given.
        sizes: of its files.
        file_systems: those that have the files.
        resident: size of its segments that are resident in the wanted dtype.
        dtype: as for `warm`, for the remedy.
    """
    if not sizes:
        remedy = f"ls -lRL {shlex.quote(source)}"
        return Finding("source", "bad", f"no {format_names()} weights in {source}", remedy)
    known = [found for found in file_systems if found is not None]
    is_remote = any(found.is_remote for found in known)
    kinds = " and ".join(sorted({found.kind for found in known})) or "an unknown file system"
    place = "remote" if is_remote else "local" if known else "local or remote"
    detail = f"{format_nbytes(sum(sizes))} in {_count(len(sizes))} on {kinds}, {place}"
    if resident:
        detail += f"; {format_nbytes(resident)} resident"
    return _finding("source", "warn" if is_remote else "ok", detail, _warm(source, dtype))


def check_objects(source: str, planned: Plan | ShmloadError) -> Finding:
    """Check a source in a bucket or on a web server.

    Args:
        source: its URL.
        planned: what a load would do, or the error for which there is none.
    """
    if isinstance(planned, ShmloadError):
        return Finding("source", "bad", str(planned), f"shmload plan {shlex.quote(source)}")
    nbytes = sum(shard.read_nbytes for shard in planned.shards)
    count = len(planned.shards)
    detail = (
        f"{format_nbytes(nbytes)} in {count_of(count, 'object')}, which each worker reads in "
        f"{REQUESTS} ranges of {format_nbytes(RANGE_NBYTES)} at a time; "
        f"{format_nbytes(planned.resident_nbytes)} resident"
    )
    return Finding("source", "ok", detail)


def check_read_speed(
    source: str, speed: ReadSpeed, cached: int, files: int, dtype: object = None
) -> Finding:
    """Check the speed of reading a source, and how many of its files are in the page cache.

    `dtype` is as for `check_source`.
    """
    slow = _SLOW_CACHE_BYTES_PER_S if speed.was_cached else _SLOW_DISK_BYTES_PER_S
    is_slow = speed.nbytes >= _TELLING_NBYTES and speed.bytes_per_s < slow
    origin = "from the page cache" if speed.was_cached else "not from the page cache"
    detail = (
        f"{speed.bytes_per_s / 1e9:.2f} GB/s, {format_nbytes(speed.nbytes)} {origin}; "
        f"{cached} of {_count(files)} {'is' if files == 1 else 'are'} in it"
    )
    return _finding("read speed", "warn" if is_slow else "ok", detail, _warm(source, dtype))


def check_reading(reading: Reading, workers: int) -> Finding:
    """Say how workers read the largest file of a source, and why.

    Args:
        reading: how one of them reads it.
        workers: how many read at the same time.
    """
    way = "past the page cache" if reading.is_direct else "through the page cache"
    each = f"each of {workers} workers" if workers > 1 else "one worker"
    if reading.readers:
        how = f"{each} keeps {reading.readers} reads of 1 MiB under way, {way}"
    else:
        how = f"{each} reads 1 MiB when it needs it, {way}"
    return Finding("reading", "ok", f"{how}: {reading.why}")


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _warm(source: str, dtype: object) -> str:
    """Write the command that warms a source in a dtype, as `dtype_by_component` reads it."""
    by_component = dtype if isinstance(dtype, dict) else {"default": dtype} if dtype else {}
    options = (
        f"--dtype {shlex.quote(f'{each}' if name == 'default' else f'{name}={each}')}"
        for name, each in by_component.items()
    )
    return " ".join(("shmload warm", shlex.quote(source), *options))


# Devices ------------------------------------------------------------------------------------------


def check_devices(speeds: Sequence[CopySpeed]) -> Iterator[Finding]:
    """Check the speed of copies to each CUDA device."""
    if not speeds:
        yield Finding("devices", "ok", "no CUDA device")
    for number, speed in enumerate(speeds):
        detail = (
            f"{speed.device}, copies at {speed.pageable_bytes_per_s / 1e9:.1f} GB/s from pageable "
            f"and {speed.pinned_bytes_per_s / 1e9:.1f} GB/s from pinned memory"
        )
        state: State = "warn" if speed.pinned_bytes_per_s < _SLOW_COPY_BYTES_PER_S else "ok"
        query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
        remedy = f"nvidia-smi --id={number} --query-gpu={query},pcie.link.width.max --format=csv"
        yield _finding(f"device {number}", state, detail, remedy)


def _finding(name: str, state: State, detail: str, remedy: str) -> Finding:
    return Finding(name, state, detail, None if state == "ok" else remedy)


def check_skeletons(is_on: bool, found: Iterable[tuple[str, str, str]]) -> Finding:
    """Say which loads of a source have a skeleton, and why others have none.

    Args:
        is_on: whether loads use skeletons.
        found: class, dtype and reason of each load that was judged; an empty reason where there is
            a skeleton.
    """
    if not is_on:
        return Finding("skeletons", "ok", "turned off by SHMLOAD_SKELETONS=0")
    said = [
        f"{class_name} in {dtype}: {f'none: {reason}' if reason else 'yes'}"
        for class_name, dtype, reason in found
    ]
    return Finding("skeletons", "ok", "; ".join(said) or "none yet: made after the first load")
