"""Makes models of files with quantised blocks: of the blocks as they are, or as floats.

`from_single_file` also takes a dict of tensors. For blocks it gets the one that diffusers would
read from the file, but mapped from the segment. So what is left for it to do is to rename and to
split.

diffusers' converters split a tensor and pass each part to `torch.cat([part])`, and exchange the
halves of some. To copy them is most of the time of such a load, so they are joined without a copy.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.mapped import map_ranges
from shmload._building.single_file import SingleFileMaker
from shmload._checkpoints.dtypes import is_auto
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.header import Quants
from shmload._checkpoints.rule import PLAIN_KINDS, RAW, Rule, wanted_dtype
from shmload._checkpoints.source import Checkpoint, Source
from shmload._checkpoints.weights import format_with_quants
from shmload._decoding.shard import Shard
from shmload._host.descriptors import Descriptor, inode_of
from shmload._host.files import open_source
from shmload._host.memory import PAGE_NBYTES, is_modified
from shmload._host.procfs import mappings_of
from shmload._loading.state_dict import wrap


def maker_of_file(
    wanted: object, path: str | os.PathLike[str], kwargs: Mapping[str, Any]
) -> SingleFileMaker:
    """Return what makes a model of a file of weights.

    Args:
        wanted: the class, as for `SingleFileMaker`.
        path: of the file.
        kwargs: for `from_single_file`. With a `quantization_config` quantised weights stay as they
            are.

    Raises:
        ArgumentError: as `SingleFileMaker`.
    """
    found = format_with_quants(path)
    if not found or not found.quants:
        return SingleFileMaker(wanted)
    if kwargs.get("quantization_config"):
        return BlocksMaker(wanted, path, found.quants, kwargs["quantization_config"])
    return FloatsMaker(wanted)


class FloatsMaker(SingleFileMaker):
    """Makes an ordinary model of weights that workers have dequantised."""

    uncast_rule = Rule(target="F32", is_widening=True)


class BlocksMaker(SingleFileMaker):
    """Makes a model by the `from_single_file` of a class, with a `quantization_config`.

    Args:
        wanted: as for `SingleFileMaker`.
        path: of the file.
        blocks: what is done with its format's blocks.
        config: the `quantization_config`, which names the dtype to compute with.

    Raises:
        ArgumentError: as `SingleFileMaker`.
    """

    keeps_blocks = True

    def __init__(
        self, wanted: object, path: str | os.PathLike[str], blocks: Quants, config: Any
    ) -> None:
        super().__init__(wanted)
        self._blocks = blocks
        self._path = Path(path)
        self._compute_dtype = getattr(config, "compute_dtype", None)

    def settle_dtype(self, dtype: object, source: Source) -> object:
        """Return the dtype; for `auto` none, which is the one to compute with."""
        return None if is_auto(dtype) else super().settle_dtype(dtype, source)

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule that leaves blocks as they are, and casts the other tensors.

        diffusers would cast these. All stay as they are for a class that keeps some in float32: it
        names them by the model's names, which the file need not have; and where `shmload warm` has
        made such a segment.
        """
        found = self._class or self._wanted
        dtype = self._compute_dtype if dtype is None else dtype
        if getattr(found, "_keep_in_fp32_modules", None) or dtype is None or self._is_warm():
            return RAW
        return Rule(target=wanted_dtype(dtype, ""), keeps_blocks=True)

    def _is_warm(self) -> bool:
        with Shard("", self._path, RAW, may_link=False) as raw:
            return bool(raw.resident_nbytes)

    @contextlib.contextmanager
    def _weights(self, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
        """Yield mapped tensors."""
        with Descriptor(open_source(Path(path))) as segment:
            tensors = self._read_tensors(segment.fd)
            with Joins(segment.fd):
                yield tensors

    def _read_tensors(self, fd: int) -> dict[str, Any]:
        """Return what the libraries' reader of the format returns, over a segment.

        Raises:
            LibraryError: the library needs another package for them.
            ValueError: as there, of a kind that it does not know.
        """
        stored = wrap(fd, os.fspath(self._path))
        with Descriptor(open_source(self._path)) as file:
            header = read_header(file.fd, self._path)
        return {
            spec.name: stored[spec.name]
            if spec.dtype in PLAIN_KINDS
            else self._blocks.parameter(spec, stored[spec.name].view(torch.uint8), self._path)
            for spec in header.tensors
        }


class Joins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `torch.cat` copies less.

    Of one contiguous tensor it gives that tensor's own memory. Several that are whole pages of the
    segment are mapped once more, side by side. It sees the calling thread's operations only.

    Args:
        fd: descriptor of the segment; stays the caller's, and open.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fd = fd
        self._inode = inode_of(os.fstat(fd))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.cat.default and not kwargs:
            joined = self._join(*args)
            if joined is not None:
                return joined
        return func(*args, **(kwargs or {}))

    def _join(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
        """Join tensors without a copy; return None if that is not possible."""
        if not all(each.is_cpu and each.is_contiguous() for each in tensors):
            return None
        if len(tensors) == 1:
            joined: torch.Tensor = torch.ops.aten.alias.default(tensors[0])
            return joined
        kinds = {(each.dtype, each.shape[1:]) for each in tensors}
        offsets = self._offsets(tensors)
        if dim != 0 or len(kinds) != 1 or offsets is None:
            return None
        rows = sum(each.shape[0] for each in tensors)
        mapped = map_ranges(self._fd, [(offset, each.nbytes) for offset, each in offsets])
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        return flat.view(tensors[0].dtype).view(rows, *tensors[0].shape[1:])

    def _offsets(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]] | None:
        """Return where in the segment tensors begin; None if one is not whole pages of it.

        Pages that were written to are not the segment's any more.
        """
        places = [(each.data_ptr(), each.nbytes) for each in tensors]
        if any(nbytes == 0 or (begin | nbytes) % PAGE_NBYTES for begin, nbytes in places):
            return None
        found = []
        mapped = [each for each in mappings_of({self._inode}) if not is_modified(each)]
        for tensor, (begin, nbytes) in zip(tensors, places, strict=True):
            inside = (each for each in mapped if each.start <= begin <= each.end - nbytes)
            home = next(inside, None)
            if home is None:
                return None
            found.append((home.offset + begin - home.start, tensor))
        return found
