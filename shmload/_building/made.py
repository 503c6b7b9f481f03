"""Weights that a library has made of the files' while it loaded: one copy for all processes.

Some weights lie in no segment after a load: the library has joined, split, transposed or cast them.
The first load with `keep=True` writes them to a segment of their own, one for each component, and
has its models lie there. Each later load still lets the library make them, compares, and has those
that are equal lie in the segment; its own copies go.

Guarantee: nothing but the place of bytes changes, whatever made them. A segment that cannot be had
is done without.
"""

import contextlib
import hashlib
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building import mapped
from shmload._building.mapped import Spans, hold_leases, host_tensors, map_ranges, modules_of
from shmload._building.writing import content_of, fill, plan
from shmload._checkpoints.identity import identify
from shmload._checkpoints.source import Checkpoint, Source
from shmload._compat import as_plain_tensors
from shmload._host.shm import shm_nbytes
from shmload._loading.room import own_budget
from shmload._segments.eviction import require_room
from shmload._segments.metadata import make_metadata
from shmload._segments.names import part_names, segment_name, segment_names
from shmload._segments.part import Awaited, acquire
from shmload._segments.segment import Segment
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import CapacityError, ShmloadError

logger = logger_of(__name__)


class _Memory(NamedTuple):
    """Memory of this process that tensors of a model lie in."""

    address: int
    content: torch.Tensor
    """Its bytes."""
    dtype: torch.dtype
    """Of the first tensor in it."""


def share_made(
    parts: Mapping[str, Any], private: Mapping[int, int], source: Source
) -> tuple[list[Segment], Collection[int]]:
    """Have models lie in segments where the library has made their weights, as far as can be.

    Args:
        parts: the components that the library has loaded, by name.
        private: the sizes of the storages that lie in no segment, in bytes, by address.
        source: what was loaded. Of components with less than 1 MiB, the weights stay.

    Returns:
        The segments, which are the caller's: the models have leases of their own. And the
        addresses of the storages that nothing lies in any more.
    """
    checkpoints = {each.component: each for each in source.checkpoints}
    models = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    segments = []
    moved: dict[int, torch.UntypedStorage] = {}
    with as_plain_tensors():
        for name, model in models.items():
            checkpoint = checkpoints.get(name) or checkpoints.get("")
            made = [each for each in _memories_of(model, private) if each.address not in moved]
            nbytes = sum(each.content.nbytes for each in made)
            if checkpoint is None or not checkpoint.shards or nbytes < mapped.LEAST_NBYTES:
                continue
            try:
                with contextlib.ExitStack() as closing:
                    segment = closing.enter_context(_segment_of(name, checkpoint, made))
                    equal = _equal_ones(segment, made)
                    closing.pop_all()
            # Of all that may be wrong with the segment; KeyError of one that another has written.
            except (ShmloadError, OSError, KeyError, ValueError, MemoryError) as exc:
                # str(exc): a handler that keeps log records must not keep the traceback's memory.
                reason = str(exc)
                logger.info("%s: weights of %s are not shared: %s", source.given, name, reason)
                continue
            segments.append(segment)
            moved |= equal
        for model in models.values():
            for tensor in host_tensors(model):
                storage = moved.get(tensor.untyped_storage().data_ptr())
                if storage is not None:
                    place = tensor.storage_offset(), tensor.shape, tensor.stride()
                    lying = torch.empty(0, dtype=tensor.dtype, device="cpu")
                    tensor.data = lying.set_(storage, *place)
    hold_leases(models.values(), segments, Spans({each.inode for each in segments}))
    return segments, moved.keys()


def _memories_of(model: torch.nn.Module, private: Mapping[int, int]) -> list[_Memory]:
    """Return the private memory that a model's tensors lie in, in the order of the tensors.

    Left out is what a module also has as a plain attribute, which would not lie there, and what a
    tensor shows otherwise than it is: conjugate or negative.
    """
    attributes = (each for module in modules_of(model) for each in vars(module).values())
    staying = {
        each.untyped_storage().data_ptr()
        for each in attributes
        if type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta
    }
    tensors = list(host_tensors(model))
    staying |= {
        each.untyped_storage().data_ptr() for each in tensors if each.is_conj() or each.is_neg()
    }
    found: dict[int, _Memory] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if private.get(address) and address not in found and address not in staying:
            content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            found[address] = _Memory(address, content, tensor.dtype)
    return list(found.values())


def _segment_of(name: str, checkpoint: Checkpoint, made: list[_Memory]) -> Segment:
    """Return the segment for some memory, which has its bytes unless it was there before.

    It is a segment of the component's first file. Its name depends on all files, and on the sizes.

    Raises:
        ShmloadError, OSError: there is no room, the file has gone, or another process takes too
            long to write it.
    """
    facts = [
        name,
        [(str(each.dtype), each.content.nbytes) for each in made],
        [identify(shard, os.stat(shard)).key for shard in checkpoint.shards],
    ]
    key = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    file = checkpoint.shards[0]
    identity = identify(file, os.stat(file))
    conversion = f"made/{key}"
    held = acquire(segment_name(identity, conversion))
    if isinstance(held, Awaited):
        with held:
            held = held.wait(settings().wait_timeout_s)
    if isinstance(held, Segment):
        return held
    with held as part:
        contents = {
            str(number): content_of(memoryview(each.content.numpy().data), each.dtype)
            for number, each in enumerate(made)
        }
        layout = plan(contents, make_metadata(str(file), identity.key, conversion))
        _require_free(layout.nbytes)
        part.prepare(layout)
        return fill(part, contents)


def _require_free(nbytes: int) -> None:
    """Check that there is room without an eviction: each process can do without the segment.

    Raises:
        CapacityError: there is none.
    """
    require_room(nbytes)
    budget = own_budget()
    if budget is not None:
        held_nbytes = sum(map(shm_nbytes, (*segment_names(), *part_names())))
        if held_nbytes + nbytes > budget.nbytes:
            free_nbytes = max(0, budget.nbytes - held_nbytes)
            raise CapacityError(nbytes, free_nbytes, budget.name, budget.ways[0])


def _equal_ones(segment: Segment, made: list[_Memory]) -> dict[int, torch.UntypedStorage]:
    """Return what of a segment has the bytes of some memory, by its address."""
    header = segment.read_header()
    specs = {spec.name: spec for spec in header.tensors}
    whole = memoryview(map_ranges(segment.fd, [(0, segment.nbytes)]))
    found = {}
    for number, memory in enumerate(made):
        begin = header.data_offset + specs[str(number)].begin
        content = torch.frombuffer(whole[begin : begin + memory.content.nbytes], dtype=torch.uint8)
        if torch.equal(content, memory.content):
            found[memory.address] = content.untyped_storage()
    return found
