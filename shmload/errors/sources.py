"""The base of all errors, and the errors of what a caller gives: arguments, files, libraries.

Guarantee: what a file, a tensor or a process is called cannot steer a terminal, nor add a line to a
log, by way of an error's text.
"""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

from shmload._wording import format_nbytes, nearest_name, printing

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

    def __init__(self, source: _Path, reason: str) -> None:
        self.source = source
        super().__init__(f"{source}: {reason}")


class CheckpointError(ShmloadError):
    """A file of a checkpoint is missing, damaged or changed."""


class ComponentFailed(CheckpointError):
    """A component of a modular pipeline is not where its spec points, or cannot be loaded.

    Attributes:
        name: the component.
        source: the repository, directory or file that its spec names.
    """

    def __init__(self, name: str, source: _Path, cause: object) -> None:
        self.name = name
        self.source = source
        super().__init__(
            f"component {name} cannot be loaded from {source}: {cause}; to do without it, name "
            "the others in `components`"
        )


class ShardMissing(CheckpointError, FileNotFoundError):
    """A shard named by an index or a caller does not exist."""

    def __init__(
        self, path: _Path, named_by: _Path | None = None, there: Sequence[str] = ()
    ) -> None:
        self.path = path
        by = f", named by {named_by}," if named_by else ""
        super().__init__(f"{path}{by} does not exist; {self._remedy(there)}")

    def _remedy(self, there: Sequence[str]) -> str:
        """Say what to do; `there` are the files that a caller can name instead."""
        if not there:
            return "download the checkpoint again"
        by_stem = {os.path.splitext(name)[0]: name for name in there}  # endings are all alike
        stem = os.path.splitext(os.path.basename(self.path))[0]
        near = nearest_name(stem, list(by_stem))
        hint = f"; did you mean {by_stem[near]!r}?" if near else ""
        return f"there are {', '.join(there)}{hint}"


class ShardUnreadable(CheckpointError, OSError):
    """The kernel refused to open or read a shard, or the server that has it did not give it."""

    def __init__(self, path: _Path, reason: str, number: int = errno.EIO, remedy: str = "") -> None:
        self.path = path
        if not remedy:
            remedy = "check its permissions and the disk it is on"
            if "://" in str(path):
                remedy = "check the network and the credentials, and load again"
        super().__init__(f"{path} cannot be read: {reason}; {remedy}")
        self.errno = number


class ShardMalformed(CheckpointError):
    """A shard's header breaks the rules of its format."""

    def __init__(
        self,
        path: _Path,
        reason: str,
        format_name: str,
        remedy: str = "download it again",
    ) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} is not a valid {format_name} file: {reason}; {remedy}")


class WrongFormat(ShardMalformed):
    """A file is of a kind that shmload does not read, or does not read there.

    Attributes:
        kind: its kind, such as `HDF5`.
        nbytes: its size, in bytes.
    """

    def __init__(self, path: _Path, kind: str, nbytes: int, remedy: str, where: str = "") -> None:
        self.path = path
        self.reason = self.kind = kind
        self.nbytes = nbytes
        article = "an" if kind[0] in "AHOu" else "a"
        noun = "" if " " in kind or kind == "text" else " file"
        CheckpointError.__init__(
            self,
            f"{path} is {article} {kind}{noun} ({format_nbytes(nbytes)}), which shmload does not "
            f"read{where}: {remedy}",
        )


class PickleUnread(WrongFormat):
    """A file of PyTorch has something that shmload leaves to the libraries, or is damaged.

    Attributes:
        why: what that is, such as a class that is no tensor.
    """

    def __init__(self, path: _Path, nbytes: int, why: str) -> None:
        self.path = path
        self.reason = self.kind = "PyTorch pickle"
        self.nbytes = nbytes
        self.why = why
        CheckpointError.__init__(
            self,
            f"{path} is a PyTorch pickle ({format_nbytes(nbytes)}) that shmload does not read: "
            f"{why}; let the library load it, or convert it once: load it with the library and "
            "`save_pretrained`, or `safetensors.torch.save_file`",
        )


class KindNotDequantised(CheckpointError):
    """A GGUF file has a kind of tensors that nothing here dequantises.

    Attributes:
        tensor: the first tensor of that kind.
        kind: its name, such as `Q8_K`.
    """

    def __init__(self, path: _Path, tensor: str, kind: str) -> None:
        self.path = path
        self.tensor = tensor
        self.kind = kind
        super().__init__(
            f"{path}: its tensor {tensor!r} has the kind {kind}, which the installed gguf package "
            "does not dequantise; update the package, load without dtype to get the blocks as they "
            "are, or download the model in another kind"
        )


class ShardTruncated(CheckpointError):
    """A shard is shorter than its header says, or has no end.

    Attributes:
        wanted: its size by its header, in bytes; None if only its end says that.
        got: its size, in bytes.
    """

    def __init__(self, path: _Path, wanted: int | None, got: int) -> None:
        self.path = path
        self.wanted = wanted
        self.got = got
        expected = "its end is missing" if wanted is None else f"{wanted} bytes expected"
        super().__init__(
            f"{path} is truncated: {expected}, {got} bytes are there; download it again"
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

    def __init__(
        self, path: _Path, reason: str, remedy: str = "download the checkpoint again"
    ) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}; {remedy}")


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
