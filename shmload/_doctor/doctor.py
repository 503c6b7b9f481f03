"""The doctor's examination: measures this machine and passes the values to the checks.

Guarantee: nothing changes, except that a file that was read is in the page cache afterwards; what
`shmload gc` would remove is counted and stays.
"""

import contextlib
import importlib.util
import os
import resource
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shmload._checkpoints.library import library
from shmload._checkpoints.remote import is_url
from shmload._doctor.checks import (
    Finding,
    check_budget,
    check_control_group,
    check_devices,
    check_huge_pages,
    check_kernel,
    check_leftovers,
    check_locked_memory,
    check_machine_memory,
    check_objects,
    check_open_files,
    check_page_locks,
    check_read_speed,
    check_reading,
    check_removal,
    check_service,
    check_settings,
    check_shared_memory,
    check_skeletons,
    check_source,
)
from shmload._doctor.speed import is_file_cached, measure_copies, measure_reading
from shmload._doctor.variables import given_variables, relative_variables, unknown_variables
from shmload._host.linux import (
    SHM_DIR,
    has_pidfds,
    kernel_release,
    resource_limits,
    shm_free_nbytes,
    shm_total_nbytes,
)
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
from shmload._loading.plan import Plan, ShardPlan
from shmload._loading.room import own_budget
from shmload._loading.verbs import plan
from shmload._segments.eviction import Budget, may_go
from shmload._segments.listing import segments, segments_by_lock
from shmload._segments.page_locks import page_lock_limit, page_locks
from shmload._segments.pins import pinned_outdated
from shmload._segments.upkeep import find_garbage
from shmload._segments.view_register import views_by_segment
from shmload._service.budget import service_budget
from shmload._service.client import Client
from shmload._service.endpoint import connect, service_pid, socket_path
from shmload._service.folder import why_unusable
from shmload._service.protocol import GetStatus, Status
from shmload._settings import settings, worker_count
from shmload.errors import LibraryMissing, ProtocolError, ServiceError, ShmloadError, UnknownDtype
from shmload.workers.reader import FillError


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
    needed = planned.decode_nbytes if isinstance(planned, Plan) else None
    idle = _idle_nbytes(planned.shards if isinstance(planned, Plan) else ())
    yield from _diagnose_shared_memory(needed, idle)
    yield check_removal(removes_ipc(os.getuid()))
    yield check_control_group(cgroup_free_nbytes(), cgroup_limit_nbytes(), needed, idle)
    yield check_machine_memory(machine_free_nbytes(), needed, idle)
    answer = _ask_service(socket_path())
    yield check_budget(_budget_of(answer.found), _resident_nbytes(), needed, idle)
    wrong = [*unknown_variables(os.environ), *relative_variables(os.environ)]
    yield check_settings(wrong, given_variables(os.environ))
    yield check_locked_memory(resource_limits(resource.RLIMIT_MEMLOCK)[0])
    yield check_page_locks(page_lock_limit(), [each.nbytes for each in page_locks().processes])
    yield check_open_files(*resource_limits(resource.RLIMIT_NOFILE))
    yield check_kernel(kernel_release(), has_pidfds())
    yield _diagnose_service(socket_path(), answer)
    if source is not None and planned is not None:
        yield from _diagnose_source(source, dtype, planned)
        yield _diagnose_skeletons(source)
    yield from _diagnose_devices()


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
    return sum(info.nbytes for info in segments() if may_go(info) and info.name not in attached)


def _resident_nbytes() -> int:
    return sum(info.nbytes for info in segments_by_lock()) if _has_list() else 0


def _has_list() -> bool:
    """Tell whether this user may list /dev/shm."""
    return SHM_DIR.is_dir() and os.access(SHM_DIR, os.R_OK | os.X_OK)


def _outdated_nbytes() -> tuple[int, int]:
    """Return the size of what stays though its files have changed: only pinned, and in views."""
    outdated = pinned_outdated()
    views = views_by_segment()
    viewed = sum(info.nbytes for info in outdated if info.name in views)
    return sum(info.nbytes for info in outdated) - viewed, viewed


def _diagnose_shared_memory(needed: int | None, idle: int) -> Iterator[Finding]:
    is_writable = os.access(SHM_DIR, os.W_OK | os.X_OK)
    if not SHM_DIR.is_dir():
        yield check_shared_memory(FileSystem("no directory", ()), 0, 0, is_writable=False)
    elif not _has_list():
        yield check_shared_memory(None, 0, 0, is_writable)
    else:
        found = file_system(SHM_DIR.stat().st_dev)
        total, free = shm_total_nbytes(), shm_free_nbytes()
        yield check_shared_memory(found, total, free, is_writable, needed, idle)
        yield check_huge_pages(found, huge_page_policy())
        yield check_leftovers(find_garbage(), *_outdated_nbytes())


class _Answer(msgspec.Struct, frozen=True):
    """What the service said, or why it said nothing; None if there is no socket."""

    found: Status | ShmloadError | None
    elapsed_s: float


def _ask_service(path: Path) -> _Answer:
    found: Status | ShmloadError | None = None
    began_at = time.monotonic()
    if os.path.lexists(path):
        try:
            with Client(path) as client:
                found = client.ask(GetStatus(), Status)
        except (ServiceError, ProtocolError) as exc:
            found = exc
    return _Answer(found, time.monotonic() - began_at)


def _budget_of(found: Status | ShmloadError | None) -> Budget | None:
    """Return the budget that a load of this process would keep to."""
    if isinstance(found, Status) and settings().service != "off":
        return service_budget(found.budget_nbytes)
    return own_budget()


def _diagnose_service(path: Path, answer: _Answer) -> Finding:
    pid = _service_pid(path) if isinstance(answer.found, ShmloadError) else None
    why_none = why_unusable(path) if answer.found is None else ""
    return check_service(path, settings().service, answer.found, answer.elapsed_s, pid, why_none)


def _service_pid(path: Path) -> int | None:
    """Return the process that has the service's socket, from the kernel: the service may hang."""
    with (
        contextlib.suppress(ServiceError),
        contextlib.closing(connect(path, settings().service_timeout_s)) as connection,
    ):
        return service_pid(connection, path)
    return None


def _diagnose_source(source: str, dtype: object, planned: Plan | ShmloadError) -> Iterator[Finding]:
    if is_url(source):
        yield check_objects(source, planned)
        return
    try:
        if isinstance(planned, ShmloadError):
            raise planned
        shards = [shard.path for shard in planned.shards]
        found = {shard: os.stat(shard) for shard in shards}
        cached = sum(map(is_file_cached, shards))
        largest = max(shards, key=lambda shard: found[shard].st_size, default=None)
        speed = measure_reading(largest) if largest else None
    except (ShmloadError, FillError, OSError) as exc:
        yield Finding("source", "bad", str(exc), _command_for(exc, source))
        return
    kinds = {stat.st_dev: file_system(stat.st_dev) for stat in found.values()}
    sizes = [stat.st_size for stat in found.values()]
    yield check_source(source, sizes, kinds.values(), planned.resident_nbytes, dtype)
    if speed:
        workers = worker_count(parent_is_busy=False)
        yield check_reading(choose_reading(speed.facts, workers), workers)
        yield check_read_speed(source, speed, cached, len(shards), dtype)


def _command_for(exc: Exception, source: str) -> str:
    """Return the command that mends an error of a source, or shows more of it."""
    if isinstance(exc, LibraryMissing):
        return f"pip install {' '.join(map(shlex.quote, exc.packages))}"
    return f"ls -lL {shlex.quote(str(getattr(exc, 'path', source)))}"


def _diagnose_skeletons(source: str) -> Finding:
    if os.path.isfile(source):
        return Finding("skeletons", "ok", "none: they are for directories and hub ids")
    if importlib.util.find_spec("diffusers") is None:
        return check_skeletons(settings().skeletons, [])
    return check_skeletons(settings().skeletons, library().skeletons_of(source))


def _diagnose_devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("devices", "ok", "torch is not installed")
        return
    try:
        speeds = measure_copies()
    except (ImportError, OSError) as exc:
        reason = str(exc).partition("\n")[0]
        remedy = "pip install --force-reinstall torch"
        yield Finding("devices", "bad", f"torch cannot be imported: {reason}", remedy)
    except RuntimeError as exc:
        yield Finding("devices", "bad", str(exc).partition("\n")[0], "nvidia-smi")
    else:
        yield from check_devices(speeds)
