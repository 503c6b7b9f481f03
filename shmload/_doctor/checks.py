"""The judgements: each turns facts into a state, what was found, and a command that helps.

They measure nothing themselves; `doctor` has the table of what is measured for each.
"""

import re
import resource
import shlex
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from shmload._checkpoints.formats.known import format_names
from shmload._doctor.speed import CopySpeed, ReadSpeed
from shmload._host.procfs import FileSystem
from shmload._host.reading import Reading
from shmload._loading.shard import Plan
from shmload._segments.eviction import Budget
from shmload._wording import count_of, format_nbytes
from shmload.errors import ShmloadError
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
# A plain SATA disk reads 0.5 GB/s; copying from the page cache below 1 GB/s has another cause.
_SLOW_DISK_BYTES_PER_S, _SLOW_CACHE_BYTES_PER_S = 0.5e9, 1e9
# Reading less is too quick to measure.
_TELLING_NBYTES = 16 << 20
# PCIe 3 with eight lanes gives 6 to 7 GB/s.
_SLOW_COPY_BYTES_PER_S = 5e9

_ENLARGE = "sudo mount -o remount,size=90% /dev/shm"
_MOUNT = "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
_MAKE_ROOM = "shmload gc; shmload ls"  # `shmload ls` shows what `shmload rm` can remove

State = Literal["ok", "warn", "bad"]
Judgement = tuple[State, str, str]
"""The state, what was found, and a command that helps; nobody sees that one of an `ok`."""


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    name: str
    state: State
    detail: str
    remedy: str | None = None
    """A command; None if the state is ok."""


# Memory: `needed` is what a source would take, in bytes; None to judge by the sizes of models.
# `idle` is what a load evicts if it is short of room, in bytes.


def shared_memory(
    found: FileSystem | None,
    total: int,
    free: int,
    is_writable: bool,
    needed: int | None = None,
    idle: int = 0,
) -> Judgement:
    """Judge the file system at /dev/shm, None if it is unknown, and its size and room in bytes."""
    if found is not None and found.kind != "tmpfs":
        return "bad", f"{found.kind} at /dev/shm, not tmpfs", _MOUNT
    if not is_writable:
        return "bad", "this user may not write to /dev/shm", "sudo chmod 1777 /dev/shm"
    remedy = f"{_ENLARGE}  # a container: docker run --shm-size=16g"
    if _state(total, needed) != _state(free + idle, needed):  # other files take it
        remedy = f"{_MAKE_ROOM}; du -ah /dev/shm | sort -h | tail -n 5"
    detail = f"{format_nbytes(free)} free of {format_nbytes(total)} at /dev/shm"
    return _room(free, idle, needed, detail, remedy)


def huge_pages(found: FileSystem | None, policy: str | None) -> Judgement:
    """Judge whether the kernel follows /dev/shm's mount option for huge pages.

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
    return "warn" if is_overruled else "ok", detail, remedy


def leftovers(names: Sequence[str], pinned: int = 0) -> Judgement:
    """Judge what `shmload gc` would remove, and the pinned bytes that it leaves."""
    parts = [f"{len(names)} for `shmload gc` to remove"] if names else []
    parts += [f"{format_nbytes(pinned)} pinned, of files that have changed"] if pinned else []
    ways = ["shmload ls; shmload unpin NAME"] if pinned else []
    ways += ["shmload gc"] if names or pinned else []
    return "warn" if parts else "ok", ", ".join(parts) or "none", "; ".join(ways)


def logout(is_removed: bool) -> Judgement:
    """Judge whether segments outlive the user's session."""
    if not is_removed:
        return "ok", "segments stay when this user logs out", ""
    detail = "systemd removes this user's segments at the last logout (RemoveIPC=yes)"
    return "warn", detail, "loginctl enable-linger"


def control_group(
    free: int | None, limit: int | None, needed: int | None = None, idle: int = 0
) -> Judgement:
    """Judge the room in the memory control groups, in bytes; None for no limit."""
    if free is None or limit is None:
        return "ok", "no memory limit", ""
    remedy = f"{_MAKE_ROOM}  # and docker update --memory=16g --memory-swap=16g CONTAINER"
    return _room(
        free, idle, needed, f"{format_nbytes(free)} free of {format_nbytes(limit)}", remedy
    )


def machine_memory(available: int, needed: int | None = None, idle: int = 0) -> Judgement:
    """Judge the memory that is available without swapping, in bytes."""
    remedy = f"{_MAKE_ROOM}; ps -eo rss,pid,args --sort=-rss | head"
    return _room(available, idle, needed, f"{format_nbytes(available)} available", remedy)


def budget(
    found: Budget | None, resident: int, needed: int | None = None, idle: int = 0
) -> Judgement:
    """Judge the room in the budget that loads keep to, None if there is none.

    `resident` is what is resident, in bytes.
    """
    if found is None:
        return "ok", "none: idle models go when memory is short", ""
    free = max(0, found.nbytes - resident)
    more = max(0, found.nbytes - (resident - idle)) - free
    detail = f"{format_nbytes(free)} free of {format_nbytes(found.nbytes)}, {found.name}"
    remedy = f"{_MAKE_ROOM}  # unpin or remove models; or {found.ways[0]}"
    return _room(free, more, needed, detail, remedy)


def _room(free: int, idle: int, needed: int | None, detail: str, remedy: str) -> Judgement:
    """Judge room in bytes, and say by what."""
    detail += f", {format_nbytes(idle)} more of idle models" if idle else ""
    state = _state(free + idle, needed)
    if needed is not None:
        detail += f"; the source takes {format_nbytes(needed)}"
    elif state == "bad":
        detail += "; almost no model fits"
    elif state == "warn":
        detail += f"; a small pipeline takes {format_nbytes(_SMALL_PIPELINE_NBYTES)}"
    return state, detail, remedy


def _state(nbytes: int, needed: int | None) -> State:
    """Judge room by what a source needs; without one, by the sizes of models."""
    if needed is not None:
        return "ok" if nbytes >= needed else "bad"
    if nbytes < _LEAST_NBYTES:
        return "bad"
    return "warn" if nbytes < _SMALL_PIPELINE_NBYTES else "ok"


# Settings and limits -----------------------------------------------------------------------------


def variables(wrong: Sequence[str], given: Sequence[str]) -> Judgement:
    """Judge the variables of the environment.

    Args:
        wrong: a sentence, which begins with the variable, for each that is not what was meant.
        given: the settings that have a value.
    """
    detail = "; ".join(wrong) or " ".join(given) or "all have their defaults"
    names = " ".join(sentence.partition(" ")[0] for sentence in wrong)
    return "warn" if wrong else "ok", detail, f"unset {names}"


def locked_memory(soft: int) -> Judgement:
    """Judge how many bytes a process may lock; shmload locks none, some device drivers do."""
    if soft == resource.RLIM_INFINITY:
        return "ok", "no limit", ""
    is_little = soft < _ENOUGH_LOCKED_NBYTES
    hint = ", less than the kernel's default; pinning may fail" if is_little else ""
    remedy = "sudo prlimit --pid $$ --memlock=unlimited"
    return "warn" if is_little else "ok", f"at most {format_nbytes(soft)}{hint}", remedy


def pinned_pages(limit: int, pinned: Iterable[int]) -> Judgement:
    """Judge whether a process pins as many bytes of waiting weights as it may."""
    most = max(pinned, default=0)
    detail = f"at most {format_nbytes(limit)} of weights that wait for a device"
    if not most or most < limit * _NEARLY_ALL:
        return "ok", detail, ""
    detail += f", and a process pins {format_nbytes(most)}: others of its weights travel slowly"
    return "warn", detail, f"export SHMLOAD_PAGE_LOCKED={2 * most >> 20}MiB"


def open_files(soft: int, hard: int) -> Judgement:
    """Judge how many descriptors a process may have; -1 for no limit."""
    if soft == resource.RLIM_INFINITY:
        return "ok", "no limit", ""
    state: State = "ok" if soft >= _ENOUGH_FILES else "warn" if soft >= _LEAST_FILES else "bad"
    remedy = "sudo prlimit --pid $$ --nofile=65536"
    if hard == resource.RLIM_INFINITY or hard >= _ENOUGH_FILES:
        remedy = f"ulimit -Sn {65536 if hard == resource.RLIM_INFINITY else hard}"
    return state, f"at most {soft} a process", remedy


def kernel(release: str, has_pidfds: bool) -> Judgement:
    """Judge whether the kernel has pidfds, and no sandbox forbids them."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < _LEAST_KERNEL:
        remedy = "sudo apt-get install linux-generic && sudo reboot  # of the host"
        return "bad", f"Linux {release}; workers need 5.4 or later", remedy
    if not has_pidfds:
        remedy = "sudo apt-get install --only-upgrade libseccomp2 containerd.io  # on the host"
        return "bad", f"Linux {release}; a sandbox forbids pidfd_open", remedy
    return "ok", f"Linux {release}", ""


# Source -------------------------------------------------------------------------------------------


def source(
    given: str,
    sizes: Sequence[int],
    file_systems: Iterable[FileSystem | None],
    resident: int = 0,
    dtype: object = None,
) -> Judgement:
    """Judge the file systems of a source's weight files.

    Args:
        given: the source.
        sizes: of its files, in bytes.
        file_systems: those that have the files.
        resident: size of its segments that are resident in the wanted dtype.
        dtype: as for `warm`, for the remedy.
    """
    if not sizes:
        return "bad", f"no {format_names()} weights in {given}", f"ls -lRL {shlex.quote(given)}"
    known = [found for found in file_systems if found is not None]
    is_remote = any(found.is_remote for found in known)
    kinds = " and ".join(sorted({found.kind for found in known})) or "an unknown file system"
    place = "remote" if is_remote else "local" if known else "local or remote"
    amount = f"{format_nbytes(sum(sizes))} in {count_of(len(sizes), 'file')}"
    more = f"; {format_nbytes(resident)} resident" if resident else ""
    detail = f"{amount} on {kinds}, {place}{more}"
    return "warn" if is_remote else "ok", detail, _warm(given, dtype)


def objects(given: str, planned: Plan | ShmloadError) -> Judgement:
    """Judge a source in a bucket or on a web server by what a load would do, or by the error."""
    if isinstance(planned, ShmloadError):
        return "bad", str(planned), f"shmload plan {shlex.quote(given)}"
    nbytes = sum(shard.read_nbytes for shard in planned.shards)
    detail = (
        f"{format_nbytes(nbytes)} in {count_of(len(planned.shards), 'object')}, which each worker "
        f"reads in {REQUESTS} ranges of {format_nbytes(RANGE_NBYTES)} at a time; "
        f"{format_nbytes(planned.resident_nbytes)} resident"
    )
    return "ok", detail, ""


def read_speed(
    given: str, speed: ReadSpeed, cached: int, files: int, dtype: object = None
) -> Judgement:
    """Judge the speed of reading a source, and how many of its files are in the page cache."""
    slow = _SLOW_CACHE_BYTES_PER_S if speed.was_cached else _SLOW_DISK_BYTES_PER_S
    is_slow = speed.nbytes >= _TELLING_NBYTES and speed.bytes_per_s < slow
    origin = "from the page cache" if speed.was_cached else "not from the page cache"
    detail = (
        f"{speed.bytes_per_s / 1e9:.2f} GB/s, {format_nbytes(speed.nbytes)} {origin}; "
        f"{cached} of {count_of(files, 'file')} {'is' if files == 1 else 'are'} in it"
    )
    return "warn" if is_slow else "ok", detail, _warm(given, dtype)


def reading(found: Reading, workers: int) -> Judgement:
    """Say how each of some workers reads the largest file of a source, and why."""
    way = "past the page cache" if found.is_direct else "through the page cache"
    each = f"each of {workers} workers" if workers > 1 else "one worker"
    how = f"{each} reads 1 MiB when it needs it, {way}"
    if found.readers:
        how = f"{each} keeps {found.readers} reads of 1 MiB under way, {way}"
    return "ok", f"{how}: {found.why}", ""


def _warm(source: str, dtype: object) -> str:
    """Write the command that warms a source in a dtype, as `dtype_by_component` reads it."""
    by_component = dtype if isinstance(dtype, dict) else {"default": dtype} if dtype else {}
    options = (
        f"--dtype {shlex.quote(f'{each}' if name == 'default' else f'{name}={each}')}"
        for name, each in by_component.items()
    )
    return " ".join(("shmload warm", shlex.quote(source), *options))


# Devices ------------------------------------------------------------------------------------------


def device(number: int, speed: CopySpeed) -> Judgement:
    """Judge the speed of copies to a CUDA device."""
    detail = (
        f"{speed.device}, copies at {speed.pageable_bytes_per_s / 1e9:.1f} GB/s from pageable "
        f"and {speed.pinned_bytes_per_s / 1e9:.1f} GB/s from pinned memory"
    )
    is_slow = speed.pinned_bytes_per_s < _SLOW_COPY_BYTES_PER_S
    query = "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current"
    remedy = f"nvidia-smi --id={number} --query-gpu={query},pcie.link.width.max --format=csv"
    return "warn" if is_slow else "ok", detail, remedy
