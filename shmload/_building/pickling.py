"""Pickles models without their tensors, and restores them over tensors that are elsewhere.

Guarantee: a pickle holds classes and functions of the model libraries only. Each tensor in it names
one that a shard holds whole, or comes with its bytes. Anything else raises `Unfit`.
"""

import collections
import copy
import enum
import io
import os
import pickle
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from diffusers.configuration_utils import FrozenDict
from transformers import PreTrainedModel

from shmload._building.mapped import Spans, modules_of
from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.formats.known import read_header
from shmload._compat import (
    OWN_HASH,
    define_apply,
    make_normed,
    norm_of,
)
from shmload._host.descriptors import Inode, inode_of
from shmload._host.shm import reopen
from shmload._loading.state_dict import wrap

if TYPE_CHECKING:
    from shmload._checkpoints.header import TensorSpec

Models = dict[str, torch.nn.Module]
"""The models of a pipeline by component."""
Files = list[tuple[str, int]]
"""Name and descriptor of the file that has each shard's tensors, in the order of the plan."""

# Packages whose classes and functions a model may use. This makes restored models equal; it is no
# protection: a pickle of these classes can still do harm, so only the user's own are read.
_PACKAGES = frozenset(
    {"accelerate", "collections", "diffusers", "functools", "torch", "transformers"}
)
# Names of the standard library that a model may use.
_BUILTINS = (bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
_STANDARD = {f"builtins.{kind.__name__}" for kind in _BUILTINS} | {
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "re._compile",
}
# By which numpy pickles numbers and arrays; its package had another name before numpy 2.
_NUMPY = {
    f"{package}.{name}"
    for package in ("numpy", "numpy.core", "numpy._core")
    for name in ("dtype", "multiarray.scalar", "numeric._frombuffer")
}
# Limit for tensors that are in no shard: tables that a model computes when it is built.
_MAX_OWN_NBYTES = 4 << 20


class Unfit(Exception):
    """Raised when models cannot be pickled without tensors, or a pickle does not fit."""


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a model, without the bytes that a file has."""

    file: int | None = None
    """Index of its file; None for a tensor that the model has computed."""
    name: str = ""
    """Its name in the file; without a file, torch's name of its dtype."""
    shape: tuple[int, ...] = ()
    """Its shape, without a file."""
    content: bytes = b""
    """Its bytes, without a file."""
    requires_grad: bool | None = None
    """The flag of a parameter; None for a plain tensor."""
    attributes: dict[str, bool] = {}
    """Attributes that the libraries have set on it."""
    normed: tuple[tuple[int, ...], int] | None = None
    """Of what `weight_norm` has computed of parameters without bytes, and computes anew before each
    use: the shape of the magnitudes, and the dimension."""


class PickledModels(msgspec.Struct, frozen=True, kw_only=True):
    """Models without their weights."""

    tensors: list[StoredTensor]
    models: bytes
    """The pickle of the models by component; a persistent id is an index into `tensors`."""


def pickle_models(models: Models, files: Files) -> tuple[PickledModels, set[Any]]:
    """Pickle models that were built from some files.

    Returns:
        The pickle, and the classes and functions that it names.

    Raises:
        Unfit: a tensor is neither in a file nor a small table, or is not contiguous.
        Exception: something in the models cannot be pickled.
    """
    for config in _hashed_configs(m for model in models.values() for m in model.modules()):
        if getattr(config, OWN_HASH) != hash(config):
            raise Unfit("a generation config that was changed")
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, files)
    pickler.dump(models)
    return PickledModels(tensors=pickler.tensors, models=buffer.getvalue()), pickler.named


def unpickle_models(pickled: PickledModels, files: Files) -> Models:
    """Restore models over copy-on-write mappings of some files.

    Args:
        pickled: from `pickle_models`.
        files: files with the same tensors; they stay the caller's. Their bytes may come later.

    Raises:
        Unfit: a class is not a library's own.
        Exception: the files lack a tensor.
    """
    stored = [_wrap_own(fd, name) for name, fd in files]
    models: Models = _Unpickler(pickled, stored).load()
    modules = [module for model in models.values() for module in modules_of(model)]
    register_classes(modules)
    for config in _hashed_configs(modules):
        setattr(config, OWN_HASH, hash(config))
    return models


def _wrap_own(fd: int, name: str) -> dict[str, torch.Tensor]:
    """Map a file and wrap its tensors; the mapping keeps no lock on the file's descriptor.

    The finalizer of the last storage ends the lease, and the mapping lives a moment longer.
    """
    own = reopen(fd)
    try:
        return wrap(own, name)
    finally:
        os.close(own)


class _Pickler(pickle.Pickler):
    """Takes out the tensors, and collects the classes and functions."""

    def __init__(self, buffer: io.BytesIO, files: Files) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = _Places(files)
        self._seen: dict[int, int] = {}
        self._own_nbytes = 0
        self.named: set[Any] = set()
        self.tensors: list[StoredTensor] = []

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, torch.Tensor):
            place = self._seen.get(id(obj))
            if place is None:
                place = self._seen[id(obj)] = len(self.tensors)
                self.tensors.append(self._describe(obj))
            return place
        self.named.add(obj if isinstance(obj, type | types.FunctionType) else type(obj))
        return None

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is FrozenDict:  # its own way changes the order of its attributes
            return restore_frozen_dict, (list(obj.items()), dict(vars(obj)))
        return NotImplemented

    def _describe(self, tensor: torch.Tensor) -> StoredTensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_contiguous():
            raise Unfit(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}")
        attributes = vars(tensor)
        if not all(isinstance(value, bool) for value in attributes.values()):
            raise Unfit(f"a tensor with {attributes}")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        requires_grad = tensor.requires_grad if is_parameter else None
        place = self._places.find(tensor)
        if place:
            file, name = place
            return StoredTensor(
                file=file, name=name, requires_grad=requires_grad, attributes=attributes
            )
        if tensor.is_meta:
            return StoredTensor(
                name=_dtype_name(tensor), shape=tuple(tensor.shape), normed=_normed(tensor)
            )
        self._own_nbytes += tensor.nbytes
        if is_parameter or tensor.requires_grad or self._own_nbytes > _MAX_OWN_NBYTES:
            raise Unfit("weights that are in no shard")
        return StoredTensor(
            name=_dtype_name(tensor),
            shape=tuple(tensor.shape),
            content=tensor.reshape(-1).view(torch.uint8).numpy().tobytes(),
            attributes=attributes,
        )


def _normed(tensor: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Return how `torch.nn.utils.weight_norm` has made a tensor without bytes.

    Raises:
        Unfit: it has not.
    """
    norm = norm_of(tensor)
    if norm is None:
        raise Unfit("a tensor without bytes")
    direction, magnitudes, dim = norm
    if any((p.dtype, p.device.type) != (tensor.dtype, "meta") for p in (direction, magnitudes)):
        raise Unfit("a normed weight of other parameters")
    return tuple(magnitudes.shape), dim


class _Places:
    """Finds the file and the name of a tensor of this process."""

    def __init__(self, files: Files) -> None:
        self._specs: dict[tuple[Inode, int], tuple[int, TensorSpec]] = {}
        for number, (name, fd) in enumerate(files):
            header = read_header(fd, name)
            inode = inode_of(os.fstat(fd))
            for spec in header.tensors:
                if spec.nbytes:
                    place = (inode, header.data_offset + spec.begin)
                    self._specs.setdefault(place, (number, spec))
        self._spans = Spans({inode for inode, _ in self._specs})

    def find(self, tensor: torch.Tensor) -> tuple[int, str] | None:
        """Return index of the file and name of a tensor, or None if it lies in no file.

        Raises:
            Unfit: it lies in a file, but is not one of the file's tensors in dtype and shape.
        """
        mapping = self._spans.find(tensor)
        if mapping is None:
            return None
        offset = mapping.offset + tensor.data_ptr() - mapping.start
        found = self._specs.get((mapping.inode, offset))
        shape = tuple(tensor.shape)
        if found:
            number, spec = found
            if (TORCH_NAMES.get(spec.dtype), spec.shape) == (_dtype_name(tensor), shape):
                return number, spec.name
        raise Unfit(f"a tensor of shape {shape} that its shard has otherwise")


class _Unpickler(pickle.Unpickler):
    """Puts given tensors in, and refuses all but the libraries' own classes."""

    def __init__(self, pickled: PickledModels, stored: list[dict[str, torch.Tensor]]) -> None:
        super().__init__(io.BytesIO(pickled.models))
        self._tensors = pickled.tensors
        self._stored = stored
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        tensor = self._made.get(pid)
        if tensor is None:
            tensor = self._made[pid] = _make_tensor(self._tensors[pid], self._stored)
        return tensor

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" == "builtins.getattr":
            return _bound_method
        if (module, name) == (__name__, restore_frozen_dict.__name__):
            return restore_frozen_dict
        if f"{module}.{name}" in _STANDARD | _NUMPY:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.partition(".")[0] in _PACKAGES else None
        home = str(getattr(found, "__module__", None) or module)
        if found is None or home.partition(".")[0] not in _PACKAGES:
            raise Unfit(f"{module}.{name} is of another package")
        return found


def _make_tensor(tensor: StoredTensor, stored: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    if tensor.file is not None:
        made = stored[tensor.file][tensor.name]
    elif tensor.normed is not None:
        shape, dim = tensor.normed
        direction, magnitudes = (
            torch.empty(each, dtype=getattr(torch, tensor.name), device="meta", requires_grad=True)
            for each in (tensor.shape, shape)
        )
        return make_normed(direction, magnitudes, dim)
    else:
        dtype = getattr(torch, tensor.name)
        content = bytearray(tensor.content)  # writable, like any buffer of a model
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        made = flat.reshape(tensor.shape)
    if tensor.requires_grad is not None:
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    if tensor.attributes:
        vars(made).update(tensor.attributes)
    return made


def restore_frozen_dict(items: list[tuple[str, Any]], attributes: dict[str, Any]) -> Any:
    """Restore the configuration of a model of diffusers."""
    made = FrozenDict.__new__(FrozenDict)
    for key, value in items:
        collections.OrderedDict.__setitem__(made, key, value)
    vars(made).update(attributes)
    return made


def _hashed_configs(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Yield the generation configs that store their own hash, which differs in each process."""
    for module in modules:
        config = vars(module).get("generation_config")
        if hasattr(config, OWN_HASH):
            yield config


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


def _bound_method(owner: object, name: str) -> Any:
    """Replace `getattr`, by which pickle stores bound methods, for models and enums only."""
    if not isinstance(owner, torch.nn.Module | type | enum.Enum):
        raise Unfit(f"{name} of a {type(owner).__name__}")
    return getattr(owner, name)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
