"""`update`: other weights for a pipeline or model that is in use, between two calls of it.

Guarantee: afterwards all weights are those of the source, or none has changed. On the host the
tensors that differ are mapped anew, and nothing is copied; the others are not touched.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from shmload._building.homecoming import adopt, has_pinned_copies, homes_of
from shmload._building.homes import Home, Homes, homes_in_all
from shmload._building.mapped import hold_leases
from shmload._building.published import opened
from shmload._building.publishing import Published
from shmload._building.stored import Opened
from shmload._building.weights import lines_of, models_in
from shmload._checkpoints.wanted import is_publication
from shmload._compat import as_plain_tensors
from shmload._host.collector import paused_gc
from shmload._placement.inventory import DISK, META, OFFLOAD
from shmload._segments.publications import Publication
from shmload.errors import ArgumentError, UpdateRefused
from shmload.integrations.diffusers import load_pipeline

_Source = str | os.PathLike[str] | Published


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What `update` has done."""

    source: str
    """Of the weights that are there now; of a publication, with its version."""
    tensors: int
    """How many tensors are those of the source now, and were not before."""
    changed_nbytes: int
    """Their size in bytes."""


def update(thing: Any, source: _Source) -> Updated:
    """Give a pipeline or model the weights of a source, in place.

    Call it between two calls of the pipeline. Parameters stay the same objects, and so do modules,
    schedulers, tokenizers and settings. Other processes keep their weights until they ask.

    Args:
        thing: a pipeline or model of this process, on the host or on a device.
        source: a publication, as `shm:NAME` or from `publish`. For a pipeline also a directory or
            a hub id, which is loaded with `keep=True` in the dtypes that `thing` has.

    Returns:
        What has changed.

    Raises:
        UpdateRefused: a class, a shape or a dtype differs, or an offloading call has the weights.
        ShmloadError: as `load_pipeline`. After any error, nothing has changed.
    """
    text = source.source if isinstance(source, Published) else str(source)
    _refuse_offloaded(thing, text)
    with paused_gc(), as_plain_tensors(), _attached(thing, text) as new:
        homes = homes_in_all()
        pairs = _pair(thing, new, homes)
        changes = [(old, new.tensor(key, old)) for old, key in _find_changes(thing, pairs, homes)]
        # First what can fail: a device may be full, or no descriptor left.
        staged = [(old, tensor.to(old.device)) for old, tensor in changes]
        new.hold([tensor for _, tensor in changes])
        on_device = [(old, home) for old, _, home in pairs if not old.is_cpu and home is not None]
        others = [(each, each.clone()) for each in _others_in(thing)]
        for old, there in staged:
            if old.is_cpu:
                old.data = there
            else:  # its address stays: a graph that was captured has it
                old.data.copy_(there)
        for old, clone in others:
            old.data = clone
        for model in models_in(thing).values():
            adopt(model, homes, on_device)
    nbytes = sum(tensor.nbytes for _, tensor in changes)
    return Updated(source=new.source, tensors=len(changes), changed_nbytes=nbytes)


def newest(source: str) -> str:
    """Return the source of the newest version of a publication, such as `shm:NAME@3`.

    Args:
        source: as `shm:NAME`.

    Raises:
        SegmentNotFound: there is none.
    """
    return Publication(Publication.parse(source).name).newest().source


def _refuse_offloaded(thing: Any, source: str) -> None:
    for name, model in models_in(thing).items():
        devices = {str(each) for each in getattr(model, "hf_device_map", {}).values()}
        if devices & {DISK, META, OFFLOAD} or has_pinned_copies(model):
            reason = f"an offloading call has the weights of {name or 'the model'}"
            raise UpdateRefused(source, reason)


def _others_in(thing: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of schedulers: they are copied, or would keep an old version's memory."""
    for part in vars(thing).values():
        if not isinstance(part, torch.nn.Module) and hasattr(part, "__dict__"):
            values = vars(part).values()
            yield from (each for each in values if isinstance(each, torch.Tensor) and each.is_cpu)


# The weights of the source ------------------------------------------------------------------------


class _New(NamedTuple):
    """The weights of a source, as `lines_of` has them; attached, and not read."""

    source: str
    """With its version."""
    lines: Sequence[tuple[str, str, object]]
    """Path, look, and a key; None for a module."""
    tensor: Callable[[Any, torch.Tensor], torch.Tensor]
    """Returns the tensor of a key, given one of its dtype, shape and strides."""
    home: Callable[[Any, torch.Tensor, Homes], Home | None]
    """Returns where that tensor lies."""
    hold: Callable[[Sequence[torch.Tensor]], None]
    """Keeps their segments as long as some tensors live."""


@contextlib.contextmanager
def _attached(thing: Any, source: str) -> Iterator[_New]:
    """Attach a source: of a publication its segments, else the pipeline."""
    if is_publication(source):
        with opened(source) as version:
            weights = version.structure.weights
            lines = [(path, look, None if key < 0 else key) for path, look, key in weights]
            yield _New(
                version.source,
                lines,
                version.tensor,
                lambda key, like, homes: version.home(key, like),
                functools.partial(_hold, version),
            )
        return
    if isinstance(thing, torch.nn.Module):
        raise ArgumentError(f"{source}: a model takes its weights from a publication, shm:NAME")
    dtypes = {name: _dtype_of(model) for name, model in models_in(thing).items()}
    pipe = load_pipeline(source, pipeline_class=type(thing), dtype=dtypes, keep=True)
    yield _New(
        source,
        list(lines_of(pipe)),
        lambda tensor, like: tensor,
        lambda tensor, like, homes: homes.find(tensor),
        lambda tensors: None,
    )


def _dtype_of(model: torch.nn.Module) -> torch.dtype | None:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def _hold(version: Opened, tensors: Sequence[torch.Tensor]) -> None:
    holder = torch.nn.Module()
    holder._buffers.update({str(number): each for number, each in enumerate(tensors)})
    hold_leases([holder], version.segments, version.spans)


# What differs -------------------------------------------------------------------------------------


_Pair = tuple[torch.Tensor, Any, Home | None]


def _pair(thing: Any, new: _New, homes: Homes) -> list[_Pair]:
    """Return each tensor of a pipeline, with the key and the home of that of the source.

    Raises:
        UpdateRefused: something else differs.
    """
    here = list(lines_of(thing))
    found: dict[int, _Pair] = {}
    for (path, look, old), (new_path, new_look, key) in zip(here, new.lines, strict=False):
        if path != new_path:
            raise UpdateRefused(new.source, f"here is {path}, where there is {new_path}")
        if look != new_look:
            raise UpdateRefused(new.source, f"{path} is {look} here, and {new_look} there")
        if old is None:
            continue
        if old.is_meta or key is None:
            where = "here" if old.is_meta else "there"
            raise UpdateRefused(new.source, f"{path} has no bytes {where}")
        # On a device, what shares memory is one: its bytes are copied there. Empty ones have none.
        place = id(old) if old.is_cpu or not old.numel() else old.data_ptr()
        if place not in found:
            found[place] = old, key, new.home(key, old, homes)
        elif not _is_same(found[place][1], key):
            raise UpdateRefused(new.source, f"{path} is tied to another weight here, and not there")
    if len(here) != len(new.lines):
        longer = max(here, new.lines, key=len)
        path = longer[min(len(here), len(new.lines))][0]
        raise UpdateRefused(new.source, f"{path} is only {'here' if longer is here else 'there'}")
    return list(found.values())


def _is_same(key: object, other: object) -> bool:
    return key is other or (isinstance(key, int) and key == other)


def _find_changes(
    thing: Any, pairs: Sequence[_Pair], homes: Homes
) -> list[tuple[torch.Tensor, Any]]:
    """Return the tensors that differ, with the keys of those of the source.

    On the host a tensor is the same at the same place of the same segment, if this process has no
    page of its own of it. Elsewhere it differs, whatever its bytes: it would keep the memory of an
    old version. On a device the bytes are compared there.
    """
    before = {each for model in models_in(thing).values() if (each := homes_of(model))}
    same = set()
    to_compare: list[tuple[torch.Tensor, Home]] = []
    for old, _, home in pairs:
        if old.numel() == 0:
            same.add(id(old))
        elif home and old.is_cpu:
            if homes.find(old) == home and homes.is_untouched(old):
                same.add(id(old))
        elif home and home in (each.find(old) for each in before):
            to_compare.append((old, home))
    same |= homes.take_home(to_compare).keys()
    return [(old, key) for old, key, _ in pairs if id(old) not in same]
