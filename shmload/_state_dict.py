"""One checkpoint as a dict of tensors over its segments."""

import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shmload._collector import paused_gc
from shmload._complete import complete_load
from shmload._dtypes import NBITS, TORCH_NAMES, parse_dtype
from shmload._errors import ArgumentError, ShardMalformed
from shmload._header import read_header
from shmload._progress import Callback
from shmload._resolve import resolve
from shmload._rules import Rule

if TYPE_CHECKING:
    import torch


def load_state_dict(
    path: str | os.PathLike[str],
    dtype: object = None,
    *,
    keep: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
) -> "dict[str, torch.Tensor]":
    """Load one checkpoint's tensors, each a view of shared memory.

    Args:
        path: a safetensors file, or a directory with one, or with an index and its shards.
        dtype: what floating tensors shall have, as a `torch.dtype` or its name; None for their own.
        keep: leave the segments resident for the next process.
        workers: worker processes; None for as many as the settings say.
        verify: recompute the segments' digests, resident ones too.
        progress: a callback of bytes done and bytes in all, True or False for a bar, None for a bar
            on a terminal.

    Returns:
        The tensors by name, with the checkpoint's shapes. Each has a storage of its own, in a
        segment 64-byte aligned where its size is a multiple of that. They are copy-on-write:
        writing to one is private to this process. They own the mapping under them together, and
        stay valid after the segment is evicted. A file that has the wanted dtypes already and lies
        on a local disk is mapped itself, unless `keep` asks for a segment.

    Raises:
        ArgumentError: the path is a whole pipeline.
        UnknownDtype, SourceNotFound, CheckpointError, CapacityError, WorkerError, SegmentError.
    """
    source = resolve(path, Path(path))
    if source.is_pipeline:
        raise ArgumentError(f"{path} is a pipeline; give one component's directory or file")
    rule = Rule(target=None if dtype is None else parse_dtype(dtype))
    rules = {checkpoint.component: rule for checkpoint in source.checkpoints}
    with (
        paused_gc(),
        complete_load(
            source, rules, keep=keep, workers=workers, verify=verify, progress=progress
        ) as load,
    ):
        tensors: dict[str, torch.Tensor] = {}
        for name, fd in load.open_files():
            tensors.update(wrap(fd, name))
    return tensors


def wrap(fd: int, name: str) -> "dict[str, torch.Tensor]":
    """Map a segment, or a shard, and wrap each tensor of it, with no copy.

    The mapping is private (copy-on-write) and keeps the lease: Python's mmap holds a duplicate of
    the descriptor, and each tensor's storage holds the mapping.

    Args:
        fd: of the file; stays the caller's.
        name: what errors call it.

    Raises:
        CheckpointError: the header is wrong, or a tensor has a dtype that torch lacks.
    """
    import torch

    header = read_header(fd, name)
    dtypes = {dtype: getattr(torch, name, None) for dtype, name in TORCH_NAMES.items()}
    mapped = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
    tensors = {}
    for spec in header.tensors:
        dtype = dtypes.get(spec.dtype)
        if dtype is None:
            raise ShardMalformed(name, f"this torch has no dtype for {spec.dtype}")
        # Two half-byte elements are one of torch's, along the last dimension.
        nbits = NBITS[spec.dtype]
        shape = spec.shape if nbits >= 8 else (*spec.shape[:-1], spec.shape[-1] * nbits // 8)
        if spec.nbytes == 0:
            tensors[spec.name] = torch.empty(shape, dtype=dtype)
            continue
        # A storage for each tensor: as views of one, saving any of them would save them all.
        flat = torch.frombuffer(
            mapped,
            dtype=dtype,
            count=spec.nbytes // dtype.itemsize,
            offset=header.data_offset + spec.begin,
        )
        tensors[spec.name] = flat.view(shape)
    return tensors
