"""The doctor's examination: the rows of one table, each a name and a judgement of facts.

Guarantee: nothing changes, except that a file that was read is in the page cache afterwards; what
`shmload gc` would remove is counted and stays.
"""

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import resource
import shlex
from collections.abc import Iterable, Iterator

from packaging.version import Version

from shmload._checkpoints.remote import is_url
from shmload._doctor import checks
from shmload._doctor.checks import Finding, Judgement
from shmload._doctor.speed import is_file_cached, measure_copies, measure_reading
from shmload._host.logind import removes_ipc
from shmload._host.procfs import (
    FileSystem,
    cgroup_free_nbytes,
    cgroup_limit_nbytes,
    file_system,
    huge_page_policy,
    machine_free_nbytes,
)
from shmload._host.reading import choose_reading
from shmload._host.shm import SHM_DIR, shm_free_nbytes, shm_total_nbytes
from shmload._ipc.procs import has_pidfds
from shmload._loading.room import chosen_budget
from shmload._loading.shard import Plan, ShardPlan
from shmload._loading.verbs import plan
from shmload._segments.eviction import evictable
from shmload._segments.listing import segments, segments_by_lock
from shmload._segments.upkeep import find_garbage, pinned_outdated
from shmload._segments.users import page_lock_limit, page_locks
from shmload._settings import (
    given_variables,
    relative_variables,
    settings,
    unknown_variables,
    worker_count,
)
from shmload._version import TESTED
from shmload.errors import LibraryMissing, ShmloadError, UnknownDtype
from shmload.workers.reader import FillError

_Rows = Iterator[tuple[str, Judgement]]


def diagnose(source: str | None = None, dtype: object = None) -> Iterator[Finding]:
    """Examine this machine as this process sees it; takes a few seconds, mostly to import torch.

    Args:
        source: a path or a hub id to examine too; not downloaded. Reads 256 MiB of one file. The
            room is judged by what `warm` would take for it.
        dtype: as for `warm`.

    Raises:
        UnknownDtype: a name is not that of a dtype.
        ArgumentError: a variable such as SHMLOAD_BUDGET has a value of the wrong kind.
    """
    settings()  # now: a mistake must not come after some of the findings
    planned = _plan(source, dtype) if source is not None else None
    rows = [_machine(planned), _libraries(), _devices()]
    if source is not None and planned is not None:
        rows.insert(1, _source(source, dtype, planned))
    for name, (state, detail, remedy) in itertools.chain.from_iterable(rows):
        yield Finding(name, state, detail, None if state == "ok" else remedy)


def _machine(planned: Plan | ShmloadError | None) -> _Rows:
    own = planned if isinstance(planned, Plan) else None
    room = own.decode_nbytes if own else None, _idle_nbytes(own.shards if own else ())
    is_writable = os.access(SHM_DIR, os.W_OK | os.X_OK)
    if _has_list():
        found = file_system(SHM_DIR.stat().st_dev)
        sizes = shm_total_nbytes(), shm_free_nbytes()
        yield "shared memory", checks.shared_memory(found, *sizes, is_writable, *room)
        yield "huge pages", checks.huge_pages(found, huge_page_policy())
        yield "leftovers", checks.leftovers(find_garbage(), _outdated_nbytes())
    else:
        hidden = None if SHM_DIR.is_dir() else FileSystem("no directory", ())
        yield "shared memory", checks.shared_memory(hidden, 0, 0, is_writable)
    yield "logout", checks.logout(removes_ipc(os.getuid()))
    limits = cgroup_free_nbytes(), cgroup_limit_nbytes()
    yield "control group", checks.control_group(*limits, *room)
    yield "machine memory", checks.machine_memory(machine_free_nbytes(), *room)
    resident = sum(info.nbytes for info in segments_by_lock()) if _has_list() else 0
    yield "budget", checks.budget(chosen_budget(), resident, *room)
    wrong = [*unknown_variables(os.environ), *relative_variables(os.environ)]
    yield "settings", checks.variables(wrong, given_variables(os.environ))
    yield "locked memory", checks.locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    pinned = [each.nbytes for each in page_locks().processes]
    yield "page locks", checks.pinned_pages(page_lock_limit(), pinned)
    yield "open files", checks.open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield "kernel", checks.kernel(os.uname().release, has_pidfds())


def _plan(source: str, dtype: object) -> Plan | ShmloadError:
    """Plan what `warm` would do; return the error if it cannot."""
    try:
        # Nothing is downloaded; of a URL only its server knows anything.
        return plan(source, dtype=dtype, keep=True, local_files_only=not is_url(source))
    except UnknownDtype:
        raise
    except ShmloadError as exc:
        return exc


def _idle_nbytes(own: Iterable[ShardPlan]) -> int:
    """Return how much a load would evict if it were short of room, in bytes; not its own."""
    if not _has_list():
        return 0
    attached = {shard.segment for shard in own}
    return sum(info.nbytes for info in evictable(segments()) if info.name not in attached)


def _has_list() -> bool:
    """Tell whether this user may list /dev/shm."""
    return SHM_DIR.is_dir() and os.access(SHM_DIR, os.R_OK | os.X_OK)


def _outdated_nbytes() -> int:
    """Return the size of what stays though its files have changed, because it is pinned."""
    return sum(info.nbytes for info in pinned_outdated())


def _source(source: str, dtype: object, planned: Plan | ShmloadError) -> _Rows:
    if is_url(source):
        yield "source", checks.objects(source, planned)
    else:
        yield from _files(source, dtype, planned)


def _files(source: str, dtype: object, planned: Plan | ShmloadError) -> _Rows:
    try:
        if isinstance(planned, ShmloadError):
            raise planned
        shards = [shard.path for shard in planned.shards]
        found = {shard: os.stat(shard) for shard in shards}
        cached = sum(map(is_file_cached, shards))
        largest = max(shards, key=lambda shard: found[shard].st_size, default=None)
        speed = measure_reading(largest) if largest else None
    except LibraryMissing as exc:
        packages = " ".join(map(shlex.quote, exc.packages))
        yield "source", ("bad", str(exc), f"pip install {packages}")
        return
    except (ShmloadError, FillError, OSError) as exc:
        path = shlex.quote(str(getattr(exc, "path", source)))
        yield "source", ("bad", str(exc), f"ls -lL {path}")
        return
    kinds = {stat.st_dev: file_system(stat.st_dev) for stat in found.values()}
    sizes = [stat.st_size for stat in found.values()]
    resident = planned.resident_nbytes
    yield "source", checks.source(source, sizes, kinds.values(), resident, dtype)
    if speed:
        workers = worker_count(parent_is_busy=False)
        yield "reading", checks.reading(choose_reading(speed.facts, workers), workers)
        yield "read speed", checks.read_speed(source, speed, cached, len(shards), dtype)


def _libraries() -> _Rows:
    found: dict[str, str] = {}
    for name in TESTED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    newer = {
        name: TESTED[name][1]
        for name, version in found.items()
        if Version(version).release[:2] > Version(TESTED[name][1]).release
    }
    detail = ", ".join(map(" ".join, found.items())) or "none is installed"
    if newer:
        detail += f"; tested up to {', '.join(map(' '.join, newer.items()))}"
    pins = " ".join(f"'{name}~={newest}.0'" for name, newest in newer.items())
    yield "libraries", ("warn" if newer else "ok", detail, f"pip install {pins}")


def _devices() -> _Rows:
    if importlib.util.find_spec("torch") is None:
        yield "devices", ("ok", "torch is not installed", "")
        return
    try:
        speeds = measure_copies()
    except (ImportError, OSError) as exc:
        reason = str(exc).partition("\n")[0]
        remedy = "pip install --force-reinstall torch"
        yield "devices", ("bad", f"torch cannot be imported: {reason}", remedy)
    except RuntimeError as exc:
        yield "devices", ("bad", str(exc).partition("\n")[0], "nvidia-smi")
    else:
        if not speeds:
            yield "devices", ("ok", "no accelerator", "")
        for number, speed in enumerate(speeds):
            yield f"device {number}", checks.device(number, speed)
