"""A pipeline or model as a pickle, and the regions of memory that its tensors have.

Guarantee: what is restored has the classes, the values and the bytes of what was taken apart, and
tensors that shared memory share it again. What cannot be kept is refused, by its path.
"""

import importlib
import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import tokenizers
import torch
from diffusers.configuration_utils import FrozenDict
from torch.utils.hooks import RemovableHandle

from shmload._building import local_functions, tokenizer_parts
from shmload._building.mapped import modules_of
from shmload._building.pickling import register_classes, restore_frozen_dict
from shmload._building.weights import lines_of, models_in
from shmload._compat import (
    OWN_HASH,
    WRAPPED,
    arguments_of_capture,
    as_plain_tensors,
    make_capture,
    make_normed,
    make_tensor_of_class,
    norm_of,
    original_of_compiled,
    wrap_decode,
)

_Spot = tuple[int, int]
_StorageOf = Callable[[int], torch.UntypedStorage]
# The program itself, and the libraries' packages of code that repositories bring.
_OF_PROCESSES = {"__main__", "__mp_main__", "diffusers_modules", "transformers_modules"}
# Of parts within parts, below which what cannot be kept is not looked for.
_MOST_LEVELS = 20


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline or model without its bytes."""

    pickled: bytes
    """The pickle; a persistent id is an index into `places`."""
    places: list[_Spot]
    """Of each tensor: its region, and where it begins there, in bytes."""
    packages: dict[str, str]
    """The versions of the packages whose classes are pickled."""
    weights: list[tuple[str, str, int]]
    """The lines of its weights, each with an index into `places`; of modules -1."""


class Region(NamedTuple):
    """Memory that one tensor has, or several that share it."""

    address: int
    nbytes: int
    """In bytes."""
    dtype: torch.dtype
    """Of the first tensor in it; of bytes if they differ."""


class CannotKeep(Exception):
    """Raised with the path of what cannot be kept, and why."""


class Apart(NamedTuple):
    """What was taken apart."""

    structure: Structure
    regions: list[Region]
    """By address; they do not overlap."""
    kept: list[torch.Tensor]
    """Tensors that own the memory of the regions."""


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
    except Exception as exc:
        path, reason = _find_culprit(thing, exc)
        raise CannotKeep(f"{path}: {reason}" if path else reason) from exc
    regions, places = _merge(pickler.tensors)
    for tensor, (_, offset) in zip(pickler.tensors, places, strict=True):
        if offset % tensor.itemsize:
            raise CannotKeep("tensors of several dtypes that overlap by parts of an element")
    structure = Structure(
        pickled=buffer.getvalue(),
        places=places,
        packages=_versions(pickler.packages),
        weights=[
            (path, look, -1 if tensor is None else pickler.numbers.get(id(tensor), -1))
            for path, look, tensor in lines_of(thing)
        ],
    )
    return Apart(structure, regions, pickler.tensors)


def put_together(structure: Structure, storage_of: _StorageOf) -> Any:
    """Return what was taken apart.

    Args:
        structure: from `take_apart`.
        storage_of: returns the memory of a region.

    Raises:
        ValueError: a package has another version here.
        Exception: a class is not there.
    """
    here = _versions(structure.packages)
    for name, version in structure.packages.items():
        if here[name] != version:
            raise ValueError(f"it was published with {name} {version}, and here is {here[name]}")
    thing = _Unpickler(structure, storage_of).load()
    modules = [module for model in models_in(thing).values() for module in modules_of(model)]
    register_classes(modules)
    _keep_numbers_of_hooks(modules)
    for module in modules:
        config = vars(module).get("generation_config")
        if hasattr(config, OWN_HASH):
            setattr(config, OWN_HASH, hash(config))
    for part in vars(thing).values():
        wrap_decode(part)
    return thing


def _keep_numbers_of_hooks(modules: Iterable[torch.nn.Module]) -> None:
    """Have torch give later hooks other numbers: one of the same number would replace the first."""
    numbers = [
        number
        for module in modules
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)
        for number in hooks
    ]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(each + 1 for each in numbers)])


class _Bytes(NamedTuple):
    """Stands for the bytes of a tensor in a pickle."""

    number: int


class _Pickler(pickle.Pickler):
    """Takes out the bytes of tensors, and notes the packages of classes."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        """By the id of what was pickled."""
        self.packages: set[str] = set()

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
        if isinstance(obj, types.FunctionType) and (inner := local_functions.take_apart(obj)):
            return local_functions.put_together, tuple(inner)
        if isinstance(obj, types.CellType):
            return local_functions.make_cell, local_functions.content_of(obj)
        if type(obj) is FrozenDict:  # its own way changes the order of its attributes
            return restore_frozen_dict, (list(obj.items()), dict(vars(obj)))
        if isinstance(obj, torch.Tensor):
            return self._reduce_tensor(obj)
        if isinstance(obj, tokenizers.Tokenizer) and vars(obj).keys() - {WRAPPED}:
            raise CannotKeep(f"a tokenizer with its own {', '.join(vars(obj))}")
        if type(obj) is tokenizers.Tokenizer and (parts := tokenizer_parts.take_apart(obj)):
            return tokenizer_parts.put_together, tuple(parts)
        if isinstance(obj, types.MethodType) and not isinstance(obj.__self__, type):
            return _bind, (obj.__func__, obj.__self__)  # by name it may be another one by now
        if (original := original_of_compiled(obj)) is not None:
            return _same, (original,)
        return NotImplemented

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if tensor.is_meta:
            return _make_empty_normed, _sizes_of_norm(tensor)
        if tensor.grad_fn is not None:
            raise CannotKeep("a tensor that was computed with gradients: detach it")
        attributes = {k: v for k, v in vars(tensor).items() if k != "_backward_hooks" or v}
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            names, context = flatten()
            inner = {name: getattr(tensor, name) for name in names}
            own = {k: v for k, v in attributes.items() if k not in inner}
            kind = type(tensor)
            size = tuple(tensor.size()), tuple(tensor.stride()), tensor.requires_grad
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            return _unflatten, (kind, inner, context, *size, is_parameter, own)
        if (
            tensor.layout != torch.strided
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise CannotKeep(
                f"a {tensor.layout} tensor of {tensor.dtype}, or one that stands for a negative or "
                "conjugate of another"
            )
        with as_plain_tensors():
            self.numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor.detach().cpu())
        made = tensor.dtype, tuple(tensor.shape), tuple(self.tensors[-1].stride())
        content = _Bytes(len(self.tensors) - 1)
        return _wrap, (type(tensor), content, *made, tensor.requires_grad, attributes)


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: Structure, storage_of: _StorageOf) -> None:
        super().__init__(io.BytesIO(structure.pickled))
        self._places = structure.places
        self._storage_of = storage_of

    def persistent_load(self, pid: Any) -> "tuple[torch.UntypedStorage, int] | None":
        region, offset = self._places[pid]
        return None if region < 0 else (self._storage_of(region), offset)


def _wrap(
    kind: type[torch.Tensor],
    content: tuple[torch.UntypedStorage, int] | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    # Whatever the program's default device is.
    made = torch.empty(0, dtype=dtype, device="cpu")
    if content is None:
        made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    else:
        storage, offset = content
        made.set_(storage, offset // dtype.itemsize, shape, stride)
    if kind is torch.nn.Parameter:
        made = torch.nn.Parameter(made, requires_grad=requires_grad)
    elif kind is not torch.Tensor:
        made = make_tensor_of_class(kind, made, requires_grad)
    elif requires_grad:
        made.requires_grad_()
    vars(made).update(attributes)
    return made


def _sizes_of_norm(
    tensor: torch.Tensor,
) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
    """Return of what `torch.nn.utils.weight_norm` has made a tensor without bytes.

    A layer has such a tensor until it is first called, which computes it of two parameters.

    Raises:
        CannotKeep: it has not made the tensor.
    """
    norm = norm_of(tensor)
    if norm is None or vars(tensor):
        raise CannotKeep("a tensor without bytes")
    *parameters, dim = norm
    if any((each.dtype, each.is_meta) != (tensor.dtype, True) for each in parameters):
        raise CannotKeep("a normed weight of other parameters")
    direction, magnitudes = (tuple(each.shape) for each in parameters)
    return tensor.dtype, direction, magnitudes, dim


def _make_empty_normed(
    dtype: torch.dtype, direction: tuple[int, ...], magnitudes: tuple[int, ...], dim: int
) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        one, other = (
            torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
            for size in (direction, magnitudes)
        )
        return make_normed(one, other, dim)


def _unflatten(
    kind: Any,
    inner: dict[str, torch.Tensor],
    context: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    attributes: dict[str, Any],
) -> torch.Tensor:
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
    if is_parameter and not isinstance(made, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=requires_grad)
    made.requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def _bind(function: Any, owner: Any) -> types.MethodType:
    return types.MethodType(function, owner)


def _same(thing: Any) -> Any:
    """Return what stands for something else: a model for what torch has compiled of it."""
    return thing


# Memory -------------------------------------------------------------------------------------------


def _merge(tensors: Sequence[torch.Tensor]) -> tuple[list[Region], list[_Spot]]:
    """Return the regions of some tensors, and the place of each tensor."""
    spans = sorted(
        (tensor.data_ptr(), _extent_of(tensor), number)
        for number, tensor in enumerate(tensors)
        if tensor.numel()
    )
    regions: list[Region] = []
    places = [(-1, 0)] * len(tensors)
    for address, nbytes, number in spans:
        dtype = tensors[number].dtype
        last = regions[-1] if regions else None
        if last is None or address >= last.address + last.nbytes:
            regions.append(Region(address, nbytes, dtype))
        else:
            joined = max(last.nbytes, address + nbytes - last.address)
            is_one = dtype == last.dtype and (address - last.address) % dtype.itemsize == 0
            regions[-1] = Region(last.address, joined, dtype if is_one else torch.uint8)
        places[number] = len(regions) - 1, address - regions[-1].address
    return regions, places


def _extent_of(tensor: torch.Tensor) -> int:
    """Return how many bytes lie from a tensor's first element to behind its last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


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
