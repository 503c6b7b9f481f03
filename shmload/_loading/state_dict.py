"""One checkpoint as a dict of tensors over its segments."""

import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES, parse_dtype
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.rules import Rule
from shmload._host.collector import paused_gc
from shmload._host.linux import reopen
from shmload._loading.complete import complete_load
from shmload._loading.progress import Callback
from shmload._segments.lease import Lease
from shmload._segments.segment import Stay
from shmload.errors import ArgumentError, ShardMalformed

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
            source,
            rules,
            stay=Stay.RESIDENT if keep else Stay.PRIVATE,
            workers=workers,
            verify=verify,
            progress=progress,
        ) as load,
    ):
        tensors: dict[str, torch.Tensor] = {}
        shared = {segment.fd: segment for segment in load.holdings.segments() if segment.is_shared}
        for name, fd in load.holdings.open_files():
            lease = Lease(shared[fd]) if fd in shared else None
            try:
                tensors.update(wrap(fd, name, lease))
            except BaseException:
                if lease:
                    lease.close()
                raise
    return tensors


def wrap(fd: int, name: str, lease: Lease | None = None) -> "dict[str, torch.Tensor]":
    """Map a segment, or a shard, and wrap each tensor of it, with no copy.

    The mapping is private (copy-on-write), and each tensor's storage holds it. It keeps the lock on
    the descriptor too, which Python's mmap duplicates.

    Args:
        fd: of the file; stays the caller's.
        name: what errors call it.
        lease: to be closed with the mapping, instead of that lock: of a shared segment.

    Raises:
        CheckpointError: the header is wrong, or a tensor has a dtype that torch lacks.
    """
    header = read_header(fd, name)
    dtypes = torch_dtypes()
    mapped = memoryview(_map_leased(fd, lease) if lease else _map(fd))
    tensors = {}
    for spec in header.tensors:
        if spec.dtype not in dtypes:
            raise ShardMalformed(name, f"this torch has no dtype for {spec.dtype}")
        offset = header.data_offset + spec.begin
        content = mapped[offset : offset + spec.nbytes]
        tensors[spec.name] = as_tensor(content, dtypes[spec.dtype], spec.shape, NBITS[spec.dtype])
    return tensors


def as_tensor(
    content: memoryview | bytearray, dtype: "torch.dtype", shape: tuple[int, ...], nbits: int
) -> "torch.Tensor":
    """Wrap a tensor's bytes, with no copy; its storage is these bytes and no more.

    As views of one storage, saving any of a file's tensors would save them all.

    Args:
        content: writable; the tensor keeps it alive.
        dtype: torch's.
        shape: as the file says it.
        nbits: of an element. Two of half a byte are one of torch's, along the last dimension.
    """
    import torch

    if nbits < 8:
        shape = (*shape[:-1], shape[-1] * nbits // 8)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).view(shape)


def torch_dtypes() -> "dict[str, torch.dtype]":
    """Return torch's dtypes by their safetensors names, those that this torch has."""
    import torch

    return {
        dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
    }


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)


def _map_leased(fd: int, lease: Lease) -> mmap.mmap:
    """Map a file without keeping the lock on its descriptor, and close a lease with the mapping."""
    own = reopen(fd)
    try:
        mapped = _map(own)
    finally:
        os.close(own)
    weakref.finalize(mapped, lease.close).atexit = False  # leases see to that themselves
    return mapped
