"""One checkpoint as a dict of tensors over its segments."""

import mmap
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES, is_auto, parse_dtype
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.quantised import says_quantised
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.wanted import Wanted, require_bools
from shmload._host.collector import paused_gc
from shmload._host.descriptors import Descriptor
from shmload._host.limits import explained
from shmload._host.shm import reopen
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import complete_load, find_certain, require_read
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, Stay
from shmload._wording import logger_of
from shmload.errors import ArgumentError, ShardMalformed

if TYPE_CHECKING:
    import torch

    class StateDict(OrderedDict[str, torch.Tensor]):
        """What torch calls a state dict, with the file's own metadata."""

        metadata: dict[str, str]


logger = logger_of(__name__)

# diffusers keeps a LoRA's scale there, which it reads from files alone.
_LORA_METADATA = "lora_adapter_metadata"


def load_state_dict(
    path: str | os.PathLike[str],
    dtype: object = None,
    *,
    keep: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    variant: str | None = None,
    **hub_kwargs: Any,
) -> "StateDict":
    """Load one checkpoint's tensors, each a view of shared memory.

    Args:
        path: a file of weights; a directory with one, or with an index and its shards, or with an
            adapter (LoRA, IP-Adapter, textual inversion); or the hub id of such a directory.
        dtype: the dtype of floating-point tensors, as a `torch.dtype` or its name; None or
            `auto` for the stored dtypes. Quantised weights keep theirs.
        keep: leave the segments resident for the next process.
        workers: number of worker processes; None for the number in the settings.
        verify: recompute the digests of all segments, resident ones too.
        progress: a function that gets bytes done and bytes in all; True or False for a bar or
            none; None for a bar on a terminal.
        variant: as for `from_pretrained`, such as `fp16`.
        hub_kwargs: as for `warm`; and `torch_dtype`, the older name of `dtype`.

    Returns:
        The tensors by name, with the checkpoint's shapes. Each has its own storage; in a segment
        it is aligned to 64 bytes if its size is a multiple of 64. The tensors are copy-on-write: a
        write is private to this process. Together they own the mapping, and stay valid after the
        segment is evicted. A file on a local disk that has the wanted dtypes is mapped directly,
        unless `keep` is True. Like `Module.state_dict()` it is an `OrderedDict`, and torch saves
        it as such. Its attribute `metadata` has what the files' headers say beside the tensors, as
        `safe_open(path).metadata()`: texts by name, empty if there are none.

    Raises:
        ArgumentError: the path is a whole pipeline, or the dtype is given under both names.
        UnknownDtype, SourceNotFound, CheckpointError, CapacityError, WorkerError, SegmentError.
    """
    require_bools(keep=keep, verify=verify)
    wanted = Wanted.parse(path, dtype, None, variant, hub_kwargs, function=load_state_dict)
    source = find_certain(wanted)
    if source.is_pipeline:
        raise ArgumentError(f"{path} is a pipeline; give one component's directory or file")
    require_read(source, wanted)
    dtype = wanted.dtype
    is_stored = dtype is None or is_auto(dtype)
    rule = Rule(target=None if is_stored else parse_dtype(dtype))
    rules = {each.component: RAW if says_quantised(each) else rule for each in source.checkpoints}
    stay = Stay.RESIDENT if keep else Stay.PRIVATE
    with (
        explained(path),
        whole_libraries(),
        paused_gc(),
        Progress(progress, source.root.name) as counter,
        complete_load(source, rules, counter, stay, workers, verify) as load,
    ):
        tensors: StateDict = OrderedDict()  # type: ignore[assignment]  # pickled by this name
        tensors.metadata = {}
        for shard, segment in load.holdings.opened():
            tensors.metadata |= shard.header.metadata or {}
            name = segment.name if segment else str(shard.path)
            tensors.update(wrap((segment or shard).fd, name, segment))
    if _LORA_METADATA in tensors.metadata:
        logger.warning(
            "%s: its metadata scales it, and load_lora_weights of diffusers reads metadata from "
            "files alone; give it `shmload.view(...)` in place of these tensors",
            path,
        )
    return tensors


def wrap(fd: int, name: str, segment: Descriptor | None = None) -> "dict[str, torch.Tensor]":
    """Map a segment or a shard, and wrap each of its tensors without a copy.

    The mapping is private (copy-on-write), and each tensor's storage keeps it alive. Python's mmap
    duplicates the descriptor, so the mapping also keeps the lock on it.

    Args:
        fd: descriptor of the file; stays the caller's.
        name: the file's name in errors.
        segment: the file's, if it is one. If it has a name, the mapping has a lease on it instead
            of the lock.

    Raises:
        CheckpointError: the header is wrong, or a tensor has a dtype that torch lacks.
    """
    import torch

    header = read_header(fd, name)
    dtypes = torch_dtypes()
    mapped = memoryview(_map(fd, segment))
    tensors = {}
    for spec in header.tensors:
        if spec.dtype not in dtypes:
            raise ShardMalformed(
                f"{name}: torch {torch.__version__} has no dtype for {spec.dtype}; update torch",
                path=name,
            )
        offset = header.data_offset + spec.begin
        content = mapped[offset : offset + spec.nbytes]
        tensors[spec.name] = as_tensor(content, dtypes[spec.dtype], spec.shape, NBITS[spec.dtype])
    return tensors


def as_tensor(
    content: memoryview | bytearray, dtype: "torch.dtype", shape: tuple[int, ...], nbits: int
) -> "torch.Tensor":
    """Wrap one tensor's bytes without a copy, in a storage of their own.

    If all tensors of a file were views of one storage, saving one of them would save them all.

    Args:
        content: writable; the tensor keeps it alive.
        dtype: torch's dtype.
        shape: the shape in the file.
        nbits: bits of an element in the file. torch counts two elements of 4 bits as one, along
            the last dimension.
    """
    import torch

    if nbits < 8:
        shape = (*shape[:-1], shape[-1] * nbits // 8)
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(content, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def torch_dtypes() -> "dict[str, torch.dtype]":
    """Return the dtypes that this torch has, by their safetensors names."""
    import torch

    return {
        dtype: getattr(torch, name) for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
    }


def _map(fd: int, segment: Descriptor | None) -> mmap.mmap:
    """Map a file; the mapping of a segment with a name has a lease on it."""
    if not isinstance(segment, Segment) or not segment.has_name:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    with Descriptor(reopen(fd)) as own:
        mapped = mmap.mmap(own.fd, 0, access=mmap.ACCESS_COPY)
    Lease(segment).end_with([mapped])
    return mapped
