"""The stored tensors of a checkpoint: names and sizes from the headers of its shards."""

import os
from collections.abc import Iterator

from shmload._checkpoints.dtypes import converted_nbytes
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.resolve import Checkpoint
from shmload._checkpoints.rule import Rule
from shmload._host.files import open_source


def stored_tensors(checkpoint: Checkpoint) -> Iterator[TensorSpec]:
    """Yield the tensors of all shards.

    Raises:
        CheckpointError: a header is wrong.
    """
    for path in checkpoint.shards:
        fd = open_source(path)
        try:
            yield from read_header(fd, path).tensors
        finally:
            os.close(fd)


def stored_sizes(checkpoint: Checkpoint, rule: Rule) -> Iterator[tuple[str, int]]:
    """Yield name and size of each tensor, in bytes, with the dtype that a rule gives it.

    Raises:
        CheckpointError: a header is wrong.
    """
    for tensor in stored_tensors(checkpoint):
        yield tensor.name, converted_nbytes(tensor.nbytes, tensor.dtype, rule(tensor))
