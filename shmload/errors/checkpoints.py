"""The errors of sources and their files."""

import errno
import os
from collections.abc import Sequence
from os import PathLike

from shmload._wording import format_nbytes, nearest_name
from shmload.errors.base import ShmloadError

_Path = str | PathLike[str]


class SourceNotFound(ShmloadError, FileNotFoundError):
    """A source is neither an existing path nor a hub id that can be found or downloaded."""

    def __init__(self, source: _Path, reason: str) -> None:
        self.source = source
        super().__init__(f"{source}: {reason}")


class CheckpointError(ShmloadError):
    """A file of a checkpoint is missing, damaged or changed."""


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
        format_name: str = "safetensors",
        remedy: str = "download it again",
    ) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} is not a valid {format_name} file: {reason}; {remedy}")


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
