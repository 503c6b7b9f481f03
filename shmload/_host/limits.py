"""The limits of this process (setrlimit): open files, sizes of files, address space.

Guarantee: where the kernel refuses because of such a limit, the error names the limit, its value
and how to raise it.
"""

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator

from shmload._wording import format_nbytes
from shmload.errors import CapacityError, MemoryLimitExceeded, ShmloadError

_Path = str | os.PathLike[str]

# For what a load opens beside its shards: sockets, workers, the libraries' own files.
_OTHER_DESCRIPTORS = 64
# The words of strerror(3) for ENOMEM, Python, the dynamic linker, Python's threads and OpenBLAS.
_NO_MEMORY = (
    "Cannot allocate memory",
    "MemoryError",
    "failed to map segment",
    "can't start new thread",
    "Memory allocation still failed",
)
_MAX_ERRORS = 20  # of one chain; they can be cyclic


# How each limit is raised.
_RAISING = {
    "RLIMIT_AS": "`ulimit -v unlimited`, or LimitAS= of a systemd unit",
    "RLIMIT_DATA": "`ulimit -d unlimited`, or LimitDATA= of a systemd unit",
    "RLIMIT_FSIZE": "`ulimit -f unlimited`, or LimitFSIZE= of a systemd unit",
    "RLIMIT_NOFILE": "`ulimit -n 65536`, LimitNOFILE=, or `docker run --ulimit nofile=`",
    "RLIMIT_NPROC": "`ulimit -u`, TasksMax= of a systemd unit, or `docker run --pids-limit`",
}


def allow_descriptors(count: int) -> None:
    """Let this process open so many more files, as far as its hard limit allows.

    Raises the soft limit for good, in children that start later too; a program that uses select(2)
    is not disturbed before it opens more than 1,024 files itself.
    """
    _raise_soft("RLIMIT_NOFILE", len(os.listdir("/proc/self/fd")) + count + _OTHER_DESCRIPTORS)


def allow_file_size() -> None:
    """Let this process write files as large as its hard limit allows."""
    _raise_soft("RLIMIT_FSIZE", sys.maxsize)


def _raise_soft(name: str, wanted: int) -> None:
    number = getattr(resource, name)
    soft, hard = resource.getrlimit(number)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and most > soft:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(number, (most, hard))


def require_file_size(path: _Path, nbytes: int) -> None:
    """Check that this process may write a file of so many bytes.

    Args:
        path: of the shard whose segment it is, or the name of what else needs it.
        nbytes: its size, in bytes.

    Raises:
        CapacityError: RLIMIT_FSIZE forbids it.
    """
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if soft != resource.RLIM_INFINITY and nbytes > soft:
        reason = f"it needs a file of {format_nbytes(nbytes)} in shared memory"
        raise _limit_reached(path, reason, "RLIMIT_FSIZE", errno.EFBIG)


def too_many_files(path: _Path) -> CapacityError:
    """Return the error for a file that cannot be opened because too many are."""
    return _limit_reached(path, "too many open files", "RLIMIT_NOFILE", errno.EMFILE)


def process_refused(what: str, exc: OSError) -> CapacityError | None:
    """Return the error for a process that a limit forbids to start; None if none does.

    Args:
        what: the process.
        exc: what the start raised.
    """
    if exc.errno == errno.EMFILE:
        return too_many_files(what)
    if exc.errno == errno.EAGAIN:
        reason = "too many processes, of this user or of its control group"
        return _limit_reached(what, reason, "RLIMIT_NPROC", errno.EAGAIN)
    return None


def no_memory(path: _Path) -> CapacityError:
    """Return the error for a load to which the kernel gave no memory."""
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        if resource.getrlimit(getattr(resource, name))[0] != resource.RLIM_INFINITY:
            return _limit_reached(path, "there is no memory", name, errno.ENOMEM)
    return MemoryLimitExceeded(
        f"{os.fspath(path)}: the kernel gives no memory; free some, or see vm.overcommit_memory",
        limit="the machine's memory",
        errno=errno.ENOMEM,
    )


def _limit_reached(path: _Path, reason: str, limit: str, number: int) -> CapacityError:
    soft = resource.getrlimit(getattr(resource, limit))[0]
    shown = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return CapacityError(
        f"{path}: {reason}; {limit} is {shown}; raise it with {_RAISING[limit]}",
        path=path,
        limit=limit,
        available=soft,
        errno=number,
    )


def says_no_memory(text: str) -> bool:
    """Tell whether some program's words say that the kernel gave no memory."""
    return any(words in text for words in _NO_MEMORY)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and then those that it came from; 20 at most."""
    for _ in range(_MAX_ERRORS):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def repair_errors(error: BaseException | None, repair: Callable[[str], str]) -> None:
    """Repair the texts of an error and of its causes in place.

    Args:
        error: changed in place.
        repair: returns a text with the right paths.
    """
    for found in chain_of(error):
        found.args = tuple(repair(each) if isinstance(each, str) else each for each in found.args)
        if isinstance(found, OSError) and isinstance(found.filename, str):
            found.filename = repair(found.filename)


def is_lack_of_memory(exc: BaseException | None) -> bool:
    """Tell whether an error, or one that it came from, says that the kernel gave no memory."""
    return any(isinstance(e, MemoryError) or says_no_memory(str(e)) for e in chain_of(exc))


@contextlib.contextmanager
def explained(path: _Path) -> Iterator[None]:
    """Raise the errors of this module for what the kernel refuses inside the block.

    Args:
        path: what is loaded, for errors that name no file.

    Raises:
        CapacityError: a limit is reached.
    """
    try:
        yield
    except ShmloadError:
        raise
    except (MemoryError, ImportError, RuntimeError) as exc:
        if not is_lack_of_memory(exc):
            raise
        error = no_memory(path)
        if isinstance(exc, RuntimeError) and not error.limit.startswith("RLIMIT_"):
            raise  # a thread that cannot be started may have other causes than memory
        raise error from exc
    except OSError as exc:
        named = exc.filename if isinstance(exc.filename, str) else path
        match exc.errno:
            case errno.EMFILE:
                raise too_many_files(named) from exc
            case errno.ENOMEM:
                raise no_memory(named) from exc
            case _:
                raise
