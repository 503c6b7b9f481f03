"""`update`: other weights for a pipeline or model that is in use, between two calls of it.

Guarantee: afterwards all weights are those of the source, or none has changed. On the host the
tensors that differ are mapped anew, and nothing is copied; the others are not touched.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from shmload._building.homecoming import adopt, has_pinned_copies, homes_of
from shmload._building.homes import Homes
from shmload._building.mapped import modules_of, plain_tensors
from shmload._building.publishing import Published, load_published
from shmload._building.structure import models_in
from shmload._checkpoints.wanted import is_publication
from shmload._compat import original_of_compiled
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import has_own_pages
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
    version, load = _loader_of(thing, source)
    new = load()
    try:
        pairs = list(_pair(models_in(thing), models_in(new)))
        changes = [change for pair in pairs for change in _changes_of(*pair)]
    except _Differs as exc:
        raise UpdateRefused(version, str(exc)) from exc
    # First what can fail: a device may be full.
    staged = [(old, new.to(old.device)) for old, new in changes]
    for old, there in staged:
        vars(old).update(vars(there))
        if old.is_cpu:
            old.data = there
        else:  # its address stays: a graph that was captured has it
            old.data.copy_(there)
    for _, old_model, new_model in pairs:
        adopt(old_model, new_model)
    _copy_others(thing)
    nbytes = sum(new.nbytes for _, new in changes)
    return Updated(source=version, tensors=len(changes), changed_nbytes=nbytes)


def newest(source: str) -> str:
    """Return the source of the newest version of a publication, such as `shm:NAME@3`.

    Args:
        source: as `shm:NAME`.

    Raises:
        SegmentNotFound: there is none.
    """
    return Publication(Publication.parse(source).name).newest().source


def _loader_of(thing: Any, source: _Source) -> tuple[str, Callable[[], Any]]:
    """Return a source with its version, and the function that loads it."""
    text = source.source if isinstance(source, Published) else str(source)
    if is_publication(text):
        asked = Publication.parse(text)
        version = (asked if asked.version else asked.newest()).source
        return version, lambda: load_published(version)
    if isinstance(thing, torch.nn.Module):
        raise ArgumentError(f"{text}: a model takes its weights from a publication, shm:NAME")
    dtypes = {name: _dtype_of(model) for name, model in models_in(thing).items()}
    return text, lambda: load_pipeline(text, pipeline_class=type(thing), dtype=dtypes, keep=True)


def _dtype_of(model: torch.nn.Module) -> torch.dtype | None:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), None)


def _copy_others(thing: Any) -> None:
    """Copy the tensors of schedulers, which would keep the memory of an old version."""
    for part in vars(thing).values():
        if not isinstance(part, torch.nn.Module) and hasattr(part, "__dict__"):
            for value in vars(part).values():
                if isinstance(value, torch.Tensor) and value.is_cpu:
                    value.data = value.clone()


# What differs -------------------------------------------------------------------------------------


class _Differs(Exception):
    """Raised with what differs here and in the source, other than bytes."""


class _Change(NamedTuple):
    """A tensor, and the one whose bytes it gets."""

    old: torch.Tensor
    new: torch.Tensor


def _pair(
    here: Mapping[str, torch.nn.Module], there: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """Yield the models of a pipeline by name, each with that of the source; they are alike.

    Raises:
        _Differs: a module differs in its class or its parts.
    """
    _require_equal("the list of models", sorted(here), sorted(there))
    for name, new in there.items():
        old = original_of_compiled(here[name]) or here[name]
        olds, news = list(modules_of(old)), list(modules_of(new))
        for module, other in zip(olds, news, strict=False):
            if _look_of(module) != _look_of(other):
                path = _path_of(old, module, name)
                _require_equal(path, _look_of(module), _look_of(other))
            devices = {str(each) for each in getattr(module, "hf_device_map", {}).values()}
            if has_pinned_copies(module) or devices & {DISK, META, OFFLOAD}:
                path = _path_of(old, module, name)
                raise _Differs(f"an offloading call has the weights of {path}")
        _require_equal(f"the number of modules of {name or 'the model'}", len(olds), len(news))
        yield name, old, new


def _require_equal(what: str, here: object, there: object) -> None:
    if here != there:
        raise _Differs(f"{what} is {here} here, and {there} there")


def _look_of(module: torch.nn.Module) -> str:
    """Describe a module; two that are described alike can have each other's weights."""
    tensors = ", ".join(
        f"{name} {type(each).__name__} {each.dtype} {tuple(each.shape)} {_made_how(each)}"
        for name, each in _tensors_of(module)
    )
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(module._modules)}; {tensors})"


def _made_how(tensor: torch.Tensor) -> object:
    """Return how a tensor is made of others, beside their bytes; empty for one of bytes."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return flatten()[1] if flatten else ""


def _path_of(model: torch.nn.Module, module: torch.nn.Module, name: str) -> str:
    paths = (path for path, each in model.named_modules(prefix=name) if each is module)
    return str(next(paths))


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for held in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)


def _changes_of(
    model_name: str, old_model: torch.nn.Module, new_model: torch.nn.Module
) -> list[_Change]:
    """Return the tensors of a model that are to change.

    Raises:
        _Differs: tensors are tied here, and not there, or have no bytes here.
    """
    homes = homes_of(new_model)
    pairs: dict[int, _Change] = {}
    for module, other in zip(modules_of(old_model), modules_of(new_model), strict=True):
        for (name, here), (_, there) in zip(_tensors_of(module), _tensors_of(other), strict=True):
            parts = zip(plain_tensors(here), plain_tensors(there), strict=True)
            for old, new in parts:
                is_tied = pairs.setdefault(id(old), _Change(old, new)).new is not new
                if old.is_meta or is_tied:
                    path = f"{_path_of(old_model, module, model_name)}.{name}"
                    why = "tied to another here, and not there" if is_tied else "without bytes here"
                    raise _Differs(f"{path} is {why}")
    same = _unchanged(list(pairs.values()), homes) if homes else set()
    return [change for key, change in pairs.items() if key not in same]


def _unchanged(changes: list[_Change], homes: Homes) -> set[int]:
    """Return the ids of the tensors that have the bytes of the source.

    On the host, those that lie at the same place of the same segment, and of which this process
    has no page of its own. Those at another place change, whatever their bytes: they would keep the
    memory of an old version. On a device, those that do not differ when they are compared there.
    """
    same = set()
    on_device = []
    for old, new in changes:
        home = homes.find(new)
        is_there = home is not None and homes.find(old) == home
        if old.numel() == 0:
            same.add(id(old))
        elif not _are_marked_alike(old, new):
            continue
        elif home and is_there and not old.is_cpu:
            on_device.append((old, home))
        elif is_there and _is_untouched(old):
            same.add(id(old))
    return same | homes.take_home(on_device).keys()


def _are_marked_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Tell whether two tensors have the same attributes; False if one cannot be compared."""
    values = (*vars(old).values(), *vars(new).values())
    is_simple = all(isinstance(each, bool | int | float | str) for each in values)
    return is_simple and vars(old) == vars(new)


def _is_untouched(tensor: torch.Tensor) -> bool:
    """Tell whether this process has no page of its own of a mapped tensor."""
    begin = tensor.data_ptr() // PAGE_NBYTES * PAGE_NBYTES
    end = -(-(tensor.data_ptr() + tensor.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    return not has_own_pages(begin, end)
