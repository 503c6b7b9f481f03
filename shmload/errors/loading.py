"""The errors of arguments, sources, checkpoints, memory, workers and segments."""

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from shmload._wording import format_nbytes, listed, name_processes, nearest

_Path = str | PathLike[str]


class ShmloadError(Exception):
    """The base of every error in this package."""

    def __str__(self) -> str:
        # OSError would put the errno in front, and KeyError would quote the text.
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is not what `__init__` takes, so the parts are restored without calling it.
        state = self.__dict__ | ({"errno": self.errno} if isinstance(self, OSError) else {})
        return _rebuild, (type(self), self.args), state


def _rebuild(kind: type[ShmloadError], args: tuple[Any, ...]) -> ShmloadError:
    """Rebuild a pickled or copied error without calling its `__init__`."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ArgumentError(ShmloadError, ValueError):
    """An argument has a value that cannot work."""


class UnknownArgument(ArgumentError, TypeError):
    """A keyword argument is given that nothing takes."""

    def __init__(self, name: str, functions: Sequence[str], known: Iterable[str]) -> None:
        self.name = name
        first, *others = functions
        rest = f", nor has {' or '.join(others)}" if others else ""
        super().__init__(f"{first} has no argument {name!r}{rest}{nearest(name, sorted(known))}")


class UnknownDtype(ArgumentError):
    """A dtype name is not one that torch and safetensors share."""

    def __init__(
        self, dtype: object, known: Iterable[str], short_names: Iterable[str] = ()
    ) -> None:
        self.dtype = dtype
        known = list(known)
        hint = nearest(str(dtype).removeprefix("torch."), [*known, *short_names])
        super().__init__(f"unknown dtype {dtype!r}; use one of {', '.join(known)}{hint}")


class UnknownComponent(ArgumentError):
    """A component is named that the pipeline does not have."""

    def __init__(self, name: str, source: _Path, known: Iterable[str]) -> None:
        self.name = name
        known = sorted(known)
        super().__init__(
            f"{source} has no component {name!r}; it has {', '.join(known)}{nearest(name, known)}"
        )


class UnknownModule(ArgumentError):
    """A device map names a module that its component does not have.

    Attributes:
        path: the path in the device map.
        known: the modules that exist at that place.
    """

    def __init__(self, path: str, above: str, name: str, known: Sequence[str]) -> None:
        self.path = path
        self.known = tuple(known)
        where = above or "the model"
        there = f"it has {listed(known)}" if known else "it cannot be divided"
        super().__init__(
            f"device_map names {path!r}, but {where} has no module {name!r}; "
            f"{there}{nearest(name, known)}"
        )


class DeviceMapMalformed(ArgumentError):
    """A device map cannot be read, or cannot work."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"device_map: {reason}")


class LibraryTooOld(ShmloadError, ImportError):
    """An installed library is too old: it lacks a function that shmload needs."""

    def __init__(self, library: str, version: str, wanted: str, reason: str) -> None:
        self.library = library
        self.version = version
        self.wanted = wanted
        super().__init__(
            f"{library} {version} has no {reason}; install {library} {wanted} or later"
        )


class LibraryMissing(ShmloadError, ImportError):
    """A class needs packages that are not installed.

    Attributes:
        class_name: the class.
        packages: what pip calls the packages.
    """

    def __init__(self, class_name: str, packages: Sequence[str]) -> None:
        self.class_name = class_name
        self.packages = tuple(packages)
        verb = "is" if len(packages) == 1 else "are"
        super().__init__(
            f"{class_name} needs {', '.join(packages)}, which {verb} not installed; "
            f"`pip install {' '.join(packages)}`"
        )


class ImportCutShort(ShmloadError, ImportError):
    """The import of a library was interrupted in this process, which cannot import it again.

    Attributes:
        package: what is only half there.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(
            f"an import of {package} was cut short in this process, as by Ctrl-C, and cannot be "
            "repeated; restart the process (in a notebook, the kernel)"
        )


class SourceNotFound(ShmloadError, FileNotFoundError):
    """A source is neither an existing path nor a hub id that can be found or downloaded."""

    def __init__(self, source: _Path, reason: str) -> None:
        self.source = source
        super().__init__(f"{source}: {reason}")


class CheckpointError(ShmloadError):
    """A file of a checkpoint is missing, damaged or changed."""


class ShardMissing(CheckpointError, FileNotFoundError):
    """A shard named by an index or a caller does not exist."""

    def __init__(self, path: _Path, named_by: _Path | None = None) -> None:
        self.path = path
        by = f", named by {named_by}," if named_by else ""
        super().__init__(f"{path}{by} does not exist; download the checkpoint again")


class ShardUnreadable(CheckpointError, OSError):
    """The kernel refused to open or read a shard."""

    def __init__(self, path: _Path, reason: str, number: int = errno.EIO) -> None:
        self.path = path
        super().__init__(
            f"{path} cannot be read: {reason}; check its permissions and the disk it is on"
        )
        self.errno = number


class ShardMalformed(CheckpointError):
    """A shard's header breaks the rules of its format."""

    def __init__(self, path: _Path, reason: str, format_name: str = "safetensors") -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} is not a valid {format_name} file: {reason}; download it again")


class WrongFormat(ShardMalformed):
    """A file is of a kind that shmload does not read.

    Attributes:
        kind: its kind, such as `GGUF`.
        nbytes: its size, in bytes.
    """

    def __init__(self, path: _Path, kind: str, nbytes: int, remedy: str) -> None:
        self.path = path
        self.reason = self.kind = kind
        self.nbytes = nbytes
        article = "an" if kind[0] in "AHO" else "a"
        noun = "" if " " in kind or kind == "text" else " file"
        CheckpointError.__init__(
            self,
            f"{path} is {article} {kind}{noun} ({format_nbytes(nbytes)}), not safetensors: "
            f"{remedy}",
        )


class ShardTruncated(CheckpointError):
    """A shard is shorter than its header says."""

    def __init__(self, path: _Path, wanted: int, got: int) -> None:
        self.path = path
        self.wanted = wanted
        self.got = got
        super().__init__(
            f"{path} is truncated: {wanted} bytes expected, {got} there; download it again"
        )


class ShardChanged(CheckpointError):
    """A shard was overwritten while it was being decoded."""

    def __init__(self, path: _Path) -> None:
        self.path = path
        super().__init__(
            f"{path} changed while it was read; load again when no process writes to it"
        )


class SourceChanged(CheckpointError):
    """The files of a source have changed since it was shared."""

    def __init__(self, source: _Path) -> None:
        self.source = source
        super().__init__(
            f"the weights of {source} were replaced since they were shared; share them again, and "
            "restart the processes that use the old ones"
        )


class IndexMalformed(CheckpointError):
    """A JSON file that lists components or shards is broken or points outside its directory."""

    def __init__(self, path: _Path, reason: str) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}; download the checkpoint again")


class CapacityError(ShmloadError, OSError):
    """There is not enough memory; raised before the first byte of weights is read.

    Attributes:
        needed: what the load needs, in bytes; or 1 inode if the file system has none left.
        available: what is left, in the same unit.
        limit: what sets the limit, such as `/dev/shm`.
    """

    def __init__(
        self, needed: int, available: int, limit: str, remedy: str, unit: str | None = None
    ) -> None:
        self.needed = needed
        self.available = available
        self.limit = limit
        amounts = [f"{n} {unit}" if unit else format_nbytes(n) for n in (needed, available)]
        super().__init__(
            f"{amounts[0]} needed in shared memory but {limit} leaves {amounts[1]}; {remedy}"
        )
        self.errno = errno.ENOSPC


class SharedMemoryFull(CapacityError):
    """The file system at /dev/shm is too small."""


class MemoryLimitExceeded(CapacityError):
    """The memory of the machine, or of this process's control group, is too small."""


class ProcessLimitExceeded(CapacityError):
    """A limit of this process (`ulimit`) is too small for a load.

    Attributes:
        path: the file that was opened, written or loaded.
        limit: the limit, such as `RLIMIT_NOFILE`.
        available: its value.
    """

    def __init__(
        self, path: _Path, reason: str, remedy: str, limit: str, available: int, number: int
    ) -> None:
        self.path = path
        self.limit = limit
        self.available = available
        ShmloadError.__init__(self, f"{path}: {reason}; raise it with {remedy}")
        self.errno = number


class DoesNotFit(CapacityError):
    """A placement needs more memory on a device than the device has.

    Attributes:
        needed: size of what does not fit, in bytes.
        available: what is left on the device, in bytes.
        limit: the device.
        device_map: the closest map that fits, to pass instead; None if there is none.
    """

    def __init__(
        self,
        needed: int,
        available: int,
        limit: str,
        what: str,
        remedy: str,
        device_map: Mapping[str, str] | None = None,
    ) -> None:
        self.needed = needed
        self.available = available
        self.limit = limit
        self.device_map = dict(device_map) if device_map else None
        nearest = f" device_map={self.device_map}" if self.device_map else ""
        ShmloadError.__init__(self, f"{what}; {remedy}{nearest}")
        self.errno = errno.ENOMEM


class WorkerError(ShmloadError):
    """A worker process failed."""


class WorkerDied(WorkerError):
    """Workers kept dying on the same piece."""

    def __init__(self, path: _Path, how: str) -> None:
        self.path = path
        hint = "; perhaps the kernel ran out of memory, see dmesg" if "SIGKILL" in how else ""
        super().__init__(f"a worker died ({how}) while it decoded {path}, twice{hint}")


class WorkerStalled(WorkerError):
    """Workers made no progress within the deadline."""

    def __init__(self, path: _Path, timeout_s: float) -> None:
        self.path = path
        self.timeout_s = timeout_s
        super().__init__(
            f"no progress on {path} in {timeout_s:g} s, twice; check the disk it is on or raise "
            "SHMLOAD_STALL_TIMEOUT_S"
        )


class WorkerFailed(WorkerError):
    """A worker could not start or failed in its own code; its last output is a note."""


class ProtocolError(ShmloadError):
    """A message is not one of this version's protocol."""


class SegmentError(ShmloadError):
    """A segment cannot be used."""


class SegmentNotFound(SegmentError, KeyError):
    """No resident model or segment matches.

    Args:
        what: the name, id or path.
        known: what it might have been meant for.
    """

    def __init__(self, what: str, known: Sequence[str] = ()) -> None:
        super().__init__(
            f"no resident model or segment matches {what!r}{nearest(what, known) or ';'} "
            "`shmload ls` lists them"
        )


class AmbiguousName(SegmentError, ValueError):
    """A part of a name fits several resident models.

    Attributes:
        candidates: the names, or ids, that it fits.
    """

    def __init__(self, what: str, candidates: Iterable[str]) -> None:
        self.candidates = tuple(candidates)
        super().__init__(
            f"{what!r} fits several: {', '.join(self.candidates)}; give more of the name, or an id "
            "from `shmload ls --long`"
        )


class SegmentBusy(SegmentError):
    """A process still has a lease on a segment, or maps it, so the segment was not removed.

    Attributes:
        names: names of the segments that are in use.
        removed: names of the other segments of this request, which were removed.
        variables: names of this process's variables that hold some of them; None if this process
            holds none.

    Args:
        pids: the processes that use each segment, by its name.
        removed: as the attribute.
        variables: as the attribute.
        models: what to call the segments' models, by segment.
    """

    def __init__(
        self,
        pids: Mapping[str, Collection[int]],
        removed: Iterable[str] = (),
        variables: Sequence[str] | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.names = tuple(pids)
        self.removed = tuple(removed)
        by_model: dict[str, set[int]] = {}
        for name, by in pids.items():
            by_model.setdefault((models or {}).get(name, name), set()).update(by)
        held = (f"{name} by {name_processes(by)}" for name, by in by_model.items())
        self.variables = None if variables is None else tuple(variables)
        rest = f" ({len(self.removed)} removed)" if self.removed else ""
        remedy = "end that process, or evict later"
        if self.variables is not None:
            dropping = f"`del {', '.join(self.variables)}`" if self.variables else "drop the models"
            # Pipelines refer to themselves: a dropped one stays until a collection.
            remedy = f"in this process {dropping}, then call `gc.collect()` and evict again"
        super().__init__(f"still in use: {', '.join(held)}; {remedy}{rest}")


class SegmentCorrupt(SegmentError):
    """A segment's bytes do not match the digest in its header."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"segment {name} is corrupt: {reason}; remove it with `shmload rm {name}`")


class SegmentRemoved(SegmentError):
    """A segment's name was removed from outside while it was being decoded."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"/dev/shm/{name} was removed while it was being decoded; load again. If no one ran "
            "`rm`, systemd did (RemoveIPC= in logind.conf) when the user's last session ended: "
            "`loginctl enable-linger` prevents it"
        )


class SegmentUntrusted(SegmentError):
    """A name in /dev/shm belongs to another user or is not a plain private file."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        super().__init__(f"/dev/shm/{name} is not trusted: {reason}; ask its owner to remove it")


class SegmentTimeout(SegmentError, TimeoutError):
    """Another process is still decoding or changing the wanted segment after the deadline.

    Args:
        doing: what the other process does to it; None for a decode.
    """

    def __init__(self, name: str, timeout_s: float, doing: str | None = None) -> None:
        self.name = name
        remedy = "end that process" if doing else "raise SHMLOAD_WAIT_TIMEOUT_S or end that process"
        super().__init__(
            f"segment {name} is still being {doing or 'decoded'} by another process "
            f"after {timeout_s:g} s; {remedy}"
        )
