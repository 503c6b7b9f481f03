"""A pipeline or model as a pickle, and the regions of memory that its tensors have.

Guarantee: what is restored has the classes, the values and the bytes of what was taken apart, and
tensors that shared memory share it again. What cannot be kept is refused, by its path.
"""

import collections
import copy
import importlib
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import tokenizers
import torch
from diffusers.configuration_utils import FrozenDict
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from shmload._building.mapped import models_in, modules_of
from shmload._building.parts import (
    CannotKeep,
    Region,
    Spot,
    merge,
    put_tokenizer_together,
    take_tensor_apart,
    take_tokenizer_apart,
)
from shmload._compat import (
    OWN_HASH,
    WRAPPED,
    arguments_of_capture,
    define_apply,
    make_capture,
    original_of_compiled,
    wrap_decode,
)

_StorageOf = Callable[[int], torch.UntypedStorage]
# The program itself, and the libraries' packages of code that repositories bring.
_OF_PROCESSES = {"__main__", "__mp_main__", "diffusers_modules", "transformers_modules"}
# How deep to look, in parts within parts, for what cannot be kept.
_MOST_LEVELS = 20


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline or model without its bytes."""

    pickled: bytes
    """The pickle; a persistent id is an index into `places`."""
    places: list[Spot]
    """The region of each tensor, and where the tensor begins there, in bytes."""
    packages: dict[str, str]
    """The versions of the packages whose classes are pickled."""
    hooks: int
    """The number that torch gives to the next hook, at least."""


class Apart(NamedTuple):
    """What was taken apart."""

    structure: Structure
    regions: list[Region]
    """By address; they do not overlap."""
    kept: list[torch.Tensor]
    """Tensors that own the memory of the regions."""
    code: set[Any]
    """The classes and functions that are pickled."""


def take_apart(thing: Any) -> Apart:
    """Take a pipeline or model apart.

    Args:
        thing: it stays as it is. Tensors on devices are copied to the host.

    Raises:
        CannotKeep: a part of it cannot be kept.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(thing)
    except (OSError, MemoryError):  # no property of the object
        raise
    except Exception as exc:
        path, reason = _find_culprit(thing, exc)
        raise CannotKeep(f"{path}: {reason}" if path else reason) from exc
    regions, places = merge(pickler.tensors)
    for tensor, (_, offset) in zip(pickler.tensors, places, strict=True):
        if offset % tensor.itemsize:
            raise CannotKeep("tensors of several dtypes that overlap by parts of an element")
    structure = Structure(
        pickled=buffer.getvalue(),
        places=places,
        packages=_versions(pickler.packages),
        hooks=RemovableHandle.next_id,
    )
    return Apart(structure, regions, pickler.tensors, pickler.code)


def put_together(
    structure: Structure,
    storage_of: _StorageOf,
    check: Callable[[Iterable[Any]], None] | None = None,
) -> Any:
    """Return what was taken apart.

    Args:
        structure: from `take_apart`.
        storage_of: returns the memory of a region.
        check: gets the classes and functions that it is made of, and raises if they will not do.

    Raises:
        ValueError: a package has another version here.
        Exception: a class is not there.
    """
    here = _versions(structure.packages)
    for name, version in structure.packages.items():
        if here[name] != version:
            raise ValueError(f"it was published with {name} {version}, and here is {here[name]}")
    unpickler = _Unpickler(structure, storage_of)
    thing = unpickler.load()
    if check:
        check(unpickler.code)
    # A later hook of the same number would replace one that the object has.
    RemovableHandle.next_id = max(RemovableHandle.next_id, structure.hooks)
    modules = [module for model in models_in(thing).values() for module in modules_of(model)]
    register_classes(modules)
    for module in modules:
        config = vars(module).get("generation_config")
        if hasattr(config, OWN_HASH):
            setattr(config, OWN_HASH, hash(config))
    for part in vars(thing).values():
        wrap_decode(part)
    return thing


class _Bytes(NamedTuple):
    """Stands for the bytes of a tensor in a pickle."""

    number: int


class _Pickler(pickle.Pickler):
    """Takes out the bytes of tensors, and notes the packages of classes."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.packages: set[str] = set()
        self.code: set[Any] = set()

    def persistent_id(self, obj: object) -> int | None:
        return obj.number if type(obj) is _Bytes else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and (made_of := arguments_of_capture(obj)):
            return make_capture, (made_of,)
        if isinstance(obj, type | types.FunctionType):
            package = str(obj.__module__).partition(".")[0]
            if package in _OF_PROCESSES:
                raise CannotKeep(f"{obj.__qualname__} is of {package}, which is another elsewhere")
            self.packages.add(package)
        if isinstance(obj, type | types.FunctionType):
            self.code.add(obj)
        if type(obj) is FrozenDict:  # its own way changes the order of its attributes
            return _restore_frozen_dict, (list(obj.items()), dict(vars(obj)))
        if isinstance(obj, torch.Tensor):
            return take_tensor_apart(obj, self._keep)
        if isinstance(obj, tokenizers.Tokenizer) and vars(obj).keys() - {WRAPPED}:
            raise CannotKeep(f"a tokenizer with its own {', '.join(vars(obj))}")
        if type(obj) is tokenizers.Tokenizer and (parts := take_tokenizer_apart(obj)):
            return put_tokenizer_together, tuple(parts)
        if isinstance(obj, types.MethodType) and not isinstance(obj.__self__, type):
            return _bind, (obj.__func__, obj.__self__)  # by name it may be another one by now
        if (original := original_of_compiled(obj)) is not None:
            return _same, (original,)
        return NotImplemented

    def _keep(self, tensor: torch.Tensor) -> _Bytes:
        self.tensors.append(tensor)
        return _Bytes(len(self.tensors) - 1)


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: Structure, storage_of: _StorageOf) -> None:
        super().__init__(io.BytesIO(structure.pickled))
        self._places = structure.places
        self._storage_of = storage_of
        self.code: set[Any] = set()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type | types.FunctionType):
            self.code.add(found)
        return found

    def persistent_load(self, pid: Any) -> "tuple[torch.UntypedStorage, int] | None":
        region, offset = self._places[pid]
        return None if region < 0 else (self._storage_of(region), offset)


def _bind(function: Any, owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


def _same(thing: Any) -> Any:
    """Return what stands for something else: a model for what torch has compiled of it."""
    return thing


def _restore_frozen_dict(items: list[tuple[str, Any]], attributes: dict[str, Any]) -> Any:
    """Restore the configuration of a model of diffusers."""
    made = FrozenDict.__new__(FrozenDict)
    for key, value in items:
        collections.OrderedDict.__setitem__(made, key, value)
    vars(made).update(attributes)
    return made


def register_classes(modules: Iterable[torch.nn.Module]) -> None:
    """Register the classes of some modules with transformers.

    The constructor of `PreTrainedModel` enters each class in a table of the process, which
    capturing hidden states needs. A model that is unpickled, or whose class is replaced, never
    runs that constructor.

    Args:
        modules: any modules; those that are not models of transformers are left out.
    """
    known = set()
    for module in modules:
        kind = type(module)
        if isinstance(module, PreTrainedModel) and kind not in known:
            known.add(kind)
            unused = torch.nn.Module.__new__(kind)
            PreTrainedModel.__init__(unused, copy.deepcopy(module.config))
    if known:
        define_apply()


# What cannot be kept ------------------------------------------------------------------------------


def _find_culprit(thing: Any, error: Exception, depth: int = 0) -> tuple[str, str]:
    """Return the path of what cannot be pickled, and why; an empty path if it is not found."""
    for path, part in _parts_of(thing) if depth < _MOST_LEVELS else ():
        try:
            _Pickler(io.BytesIO()).dump(part)
        except Exception as exc:  # as many kinds as there are objects
            below, reason = _find_culprit(part, exc, depth + 1)
            return f"{path}.{below}" if below else path, reason
    return "", str(error) or type(error).__name__


def _parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, torch.nn.Module):
        for held in (thing._parameters, thing._buffers, thing._modules):
            yield from held.items()
        own = {"_parameters", "_buffers", "_modules"}
        yield from ((name, part) for name, part in vars(thing).items() if name not in own)
    elif isinstance(thing, dict):
        yield from ((str(name), part) for name, part in thing.items())
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | types.FunctionType):
        yield from vars(thing).items()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages; an empty text for one that tells none.

    Raises:
        ImportError: one is not installed.
    """
    found = {name: importlib.import_module(name) for name in packages}
    return {name: str(getattr(found[name], "__version__", "")) for name in sorted(found)}
