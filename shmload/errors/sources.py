"""The base of all errors, and the errors of what a caller gives: arguments, files, libraries.

Guarantee: what a file, a tensor or a process is called cannot steer a terminal, nor add a line to a
log, by way of an error's text.
"""

import contextlib
from collections.abc import Iterator
from os import PathLike
from typing import Any

from shmload._wording import printing

_Path = str | PathLike[str]


class ShmloadError(Exception):
    """The base of every error in this package.

    Args:
        text: what happened, to which file or segment, and what to do.
        facts: become attributes of these names.
    """

    errno: int | None = None

    def __init__(self, text: str = "", **facts: object) -> None:
        super().__init__(text)
        vars(self).update(facts)

    def __str__(self) -> str:
        # OSError would put the errno in front, and KeyError would quote the text.
        return printing(str(self.args[0])) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is not what `__init__` takes, so the parts are restored without calling it.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[ShmloadError], args: tuple[Any, ...]) -> ShmloadError:
    """Rebuild a pickled or copied error without calling its `__init__`."""
    error = kind.__new__(kind)
    error.args = args
    return error


class ArgumentError(ShmloadError, ValueError):
    """An argument has a value that cannot work."""


class UnknownDtype(ArgumentError):
    """A dtype name is not one that torch and safetensors share."""


class UnknownComponent(ArgumentError):
    """A component is named that the pipeline does not have.

    Attributes:
        name: the component.
    """

    name: str


class SourceNotFound(ShmloadError, FileNotFoundError):
    """A source is neither an existing path nor a hub id that can be found or downloaded."""


class CheckpointError(ShmloadError):
    """A file of a checkpoint is missing, damaged, changed, or not what shmload can load.

    Attributes:
        path: the file, or its URL.
    """

    path: str | PathLike[str]


class ShardMissing(CheckpointError, FileNotFoundError):
    """A shard named by an index or a caller does not exist."""


class ShardUnreadable(CheckpointError, OSError):
    """The kernel refused to open or read a shard, or the server that has it did not give it."""


class ShardMalformed(CheckpointError):
    """A shard breaks the rules of its format, or has what only the libraries read.

    Attributes:
        why: what only the libraries read, such as a class that is no tensor; empty otherwise.
    """

    why: str = ""


class ShardTruncated(CheckpointError):
    """A shard is shorter than its header says, or has no end.

    Attributes:
        wanted: its size by its header, in bytes; None if only its end says that.
        got: its size, in bytes.
    """

    wanted: int | None
    got: int


class ShardChanged(CheckpointError):
    """A shard was overwritten while it was decoded, or since it was shared."""


class IndexMalformed(CheckpointError):
    """A JSON file that lists components or shards is broken or points outside its directory."""


class LibraryError(ShmloadError, ImportError):
    """A library is not installed, is too old, or is unusable in this process."""


@contextlib.contextmanager
def needing(package: str, user: str, install: str) -> Iterator[None]:
    """Import a package that need not be installed.

    A package that is installed and broken raises its own error.

    Args:
        package: as it is imported inside the block.
        user: what needs it.
        install: what pip calls it.

    Raises:
        LibraryError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        if exc.name != package:
            raise
        raise LibraryError(
            f"{user} needs {install}, which is not installed; `pip install {install}`"
        ) from exc
