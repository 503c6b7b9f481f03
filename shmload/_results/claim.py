"""A run's claim on a folder of results: the lock of its only writer, and its facts."""

import os
import weakref
from pathlib import Path

import msgspec

from shmload._host.changes import add_row
from shmload._host.descriptors import close_sharing_lock, inode_of, try_lock
from shmload._host.files import plain_only, replacing
from shmload._host.procfs import lock_holders
from shmload._results.names import FACTS_NAME, FORMATS
from shmload.errors import ArgumentError, ResultsBusy, ResultsCorrupt, ResultsMismatch

_LOCK_NAME = ".lock"
_OTHERWISE = "put the file back from a copy, or give another folder"


class FolderLock:
    """The lock of a folder, held until `release`; the kernel drops it when the process ends.

    A forked child does not have it.

    Raises:
        ResultsBusy: another process, or another object in this one, has it.
        OSError: the file system refuses.
    """

    def __init__(self, folder: Path) -> None:
        # A file, not the directory: NFS needs it open for writing, which a directory cannot be.
        self._fd: int | None = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(self._fd, exclusive=True):
                inode = inode_of(os.fstat(self._fd))
                raise ResultsBusy(folder, lock_holders().get(inode, ()))
        except BaseException:
            self.release()
            raise
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Tell whether this process has the lock."""
        return self._fd is not None

    def release(self) -> None:
        """Give the lock up; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            close_sharing_lock(fd)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


# A child's copy of the descriptor would keep the lock held after its parent's death.
add_row("locks of folders", lambda: sum(lock.is_held for lock in list(_held)), _release_all)


# Facts --------------------------------------------------------------------------------------------


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Two folders with equal facts and the same items have equal bytes."""

    format: str
    """The version of the format, which says its name too."""
    shard_items: int
    facts: dict[str, str]


def check_facts(folder: Path, facts: Facts, others: set[str]) -> None:
    """Compare a run's facts with those of a folder that has results; write them if it has none.

    Args:
        folder: of results; the caller has its lock.
        facts: of this run.
        others: names of the folder's other files that a job writes.

    Raises:
        ArgumentError: a fact is not text that UTF-8 can encode.
        ResultsMismatch: the folder has other facts.
        ResultsCorrupt: the folder has results but no facts, or facts that cannot be read.
        OSError: they cannot be read or written.
    """
    path = folder / FACTS_NAME
    if others:
        if not path.exists():
            raise ResultsCorrupt(path, f"it is not there, but {min(others)} is", _OTHERWISE)
        different = _differences(_read(path), facts)
        if different:
            raise ResultsMismatch(folder, "; ".join(different))
    else:  # facts that are there now are those of a run that has stored nothing
        try:
            content = msgspec.json.format(msgspec.json.encode(facts, order="sorted"))
        except UnicodeEncodeError as exc:
            raise ArgumentError("a fact is not text that UTF-8 can encode") from exc
        with replacing(path, durable=True) as file:
            file.write(content + b"\n")


def _read(path: str | os.PathLike[str]) -> Facts:
    with open(path, "rb", opener=plain_only) as file:
        content = file.read()
    try:
        return msgspec.json.decode(content, type=Facts)
    except msgspec.DecodeError as exc:
        raise ResultsCorrupt(path, str(exc), _OTHERWISE) from exc


def _differences(there: Facts, now: Facts) -> list[str]:
    names = {each.version: each.name for each in FORMATS.values()}
    pairs = [
        ("the format", names.get(there.format, there.format), names[now.format]),
        ("shard_items", there.shard_items, now.shard_items),
        *(
            (f"fact {name!r}", there.facts.get(name), now.facts.get(name))
            for name in sorted(there.facts.keys() | now.facts.keys())
        ),
    ]
    return [f"{name} is {old!r} there, and {new!r} now" for name, old, new in pairs if old != new]
