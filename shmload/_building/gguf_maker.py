"""Makes models of GGUF files: of their blocks as they are, or as floats.

`from_single_file` also takes a dict of tensors. For blocks it gets the one that diffusers would
read from the file, but mapped from the segment. So what is left for it to do is to rename and to
split.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shmload._building.single_file import SingleFileMaker
from shmload._checkpoints.chosen_rule import wanted_dtype
from shmload._checkpoints.dtypes import AUTO
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import PLAIN_KINDS, RAW, Rule
from shmload._checkpoints.weights import has_blocks
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload._loading.plan import Action
from shmload._loading.shard import OpenShard
from shmload._loading.state_dict import wrap
from shmload.errors.sources import needing


def maker_of_file(
    wanted: object, path: str | os.PathLike[str], kwargs: Mapping[str, Any]
) -> SingleFileMaker:
    """Return what makes a model of a file of weights.

    Args:
        wanted: the class, as for `SingleFileMaker`.
        path: of the file.
        kwargs: for `from_single_file`. With a `quantization_config` the weights of a GGUF file stay
            quantised.

    Raises:
        ArgumentError: as `SingleFileMaker`.
    """
    if not has_blocks(path):
        return SingleFileMaker(wanted)
    if kwargs.get("quantization_config"):
        return BlocksMaker(wanted, path, kwargs["quantization_config"])
    return FloatsMaker(wanted)


class FloatsMaker(SingleFileMaker):
    """Makes an ordinary model of weights that workers have dequantised."""

    uncast_rule = Rule(target="F32", is_widening=True)


class BlocksMaker(SingleFileMaker):
    """Makes a model by the `from_single_file` of a class, with a `quantization_config`.

    Args:
        wanted: as for `SingleFileMaker`.
        path: of the file.
        config: the `quantization_config`, which names the dtype to compute with.

    Raises:
        ArgumentError: as `SingleFileMaker`.
    """

    keeps_blocks = True

    def __init__(self, wanted: object, path: str | os.PathLike[str], config: Any) -> None:
        super().__init__(wanted)
        self._path = Path(path)
        self._compute_dtype = getattr(config, "compute_dtype", None)

    def settle_dtype(self, dtype: object, source: Source) -> object:
        """Return the dtype; for `auto` none, which is the one to compute with."""
        return (
            None
            if isinstance(dtype, str) and dtype == AUTO
            else super().settle_dtype(dtype, source)
        )

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
        with OpenShard("", self._path, RAW, keep=True) as raw:
            return raw.plan.action is Action.ATTACH

    @contextlib.contextmanager
    def _weights(self, path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
        """Yield mapped tensors.

        Raises:
            LibraryMissing: diffusers needs the gguf package for them.
        """
        from shmload._building.movement import Joins

        with Descriptor(open_source(Path(path))) as segment:
            tensors = self._read_tensors(segment.fd)
            with Joins(segment.fd):
                yield tensors

    def _read_tensors(self, fd: int) -> dict[str, Any]:
        """Return what diffusers' `load_gguf_checkpoint` returns, over a segment.

        Raises:
            ValueError: as there, of a kind that it does not know.
        """
        with needing("gguf", f"a quantised model of {self._path}", "gguf"):
            import gguf
        import torch
        from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter

        stored = wrap(fd, os.fspath(self._path))
        with Descriptor(open_source(self._path)) as file:
            header = read_header(file.fd, self._path)
        found = {}
        for spec in header.tensors:
            tensor = stored[spec.name]
            if spec.dtype not in PLAIN_KINDS:
                kind = gguf.GGMLQuantizationType[spec.dtype]
                if kind not in SUPPORTED_GGUF_QUANT_TYPES:
                    raise _refuse(spec.name, kind, SUPPORTED_GGUF_QUANT_TYPES)
                tensor = GGUFParameter(tensor.view(torch.uint8), quant_type=kind)
            found[spec.name] = tensor
        return found


def _refuse(name: str, kind: Any, supported: Any) -> ValueError:
    """Return the error of diffusers for a kind that it does not know."""
    names = ", ".join(each.name for each in supported)
    return ValueError(
        f"{name} has a quantization type: {kind.name}, which diffusers does not support; it "
        f"supports {names}. Give a dtype and no quantization_config to load it as floats"
    )
