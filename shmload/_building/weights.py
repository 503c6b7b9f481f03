"""The weights of a pipeline or model as a list of lines: their paths, and all but their bytes.

Guarantee: two models whose lines have the same paths and looks compute the same with the same
weights and the same state of adapters.
"""

import functools
import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building.mapped import plain_tensors
from shmload._compat import original_of_compiled

_Simple = bool | int | float | str | None
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What a configuration says of the file that it was in; dtypes are compared tensor by tensor.
_NO_MEANING = {"architectures", "dtype", "torch_dtype", "transformers_version"}


class Line(NamedTuple):
    """A tensor, a module, or a value of a model's configuration."""

    path: str
    """As `unet.conv_in.weight`, or `unet.config.sample_size`."""
    look: str
    """A module's class; a tensor's dtype and shape, and how it is made of its bytes; a value."""
    part: torch.Tensor | torch.nn.Module | None
    """A tensor with bytes of its own, or a module; None for a value."""


def models_in(thing: Any) -> Mapping[str, torch.nn.Module]:
    """Return the models of a pipeline by name, or a model by the empty name; none compiled."""
    parts = {"": thing} if isinstance(thing, torch.nn.Module) else vars(thing)
    return {
        name: original_of_compiled(part) or part
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
    }


def lines_of(thing: Any) -> Iterator[Line]:
    """Yield the weights of a pipeline or model, in an order that depends on its modules alone."""
    configs = set()
    for name, model in sorted(models_in(thing).items()):
        for path, module in model.named_modules(prefix=name):
            yield Line(path, _name_of(module), module)
            config = getattr(module, "config", None)
            if id(config) not in configs:  # parts of a model have the same one
                configs.add(id(config))
                yield from _lines_of_config(f"{path}.config", config)
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        yield from _lines_of_tensor(f"{path}.{key}", tensor)


def _lines_of_config(path: str, config: Any) -> Iterator[Line]:
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        if not path.endswith(".config"):
            # A list from a file may be a tuple in a model that a program has made.
            yield Line(path, json.dumps(values, default=repr), None)
        return
    for name, value in sorted(values.items(), key=str):
        if not str(name).startswith("_") and name not in _NO_MEANING:
            yield from _lines_of_config(f"{path}.{name}", value)


def _lines_of_tensor(path: str, tensor: torch.Tensor) -> Iterator[Line]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    inner, context = flatten() if flatten else ((), "")
    left_out = {*inner, "persistent"}  # the tensors in it have lines; buffers may have the other
    kind = "" if type(tensor) is torch.nn.Parameter else f"{_name_of(tensor)} "
    if type(tensor) not in _PLAIN or any(name[0] != "_" for name in vars(tensor)):
        kind += "".join(
            # What cannot be compared is never the same.
            f"{name}={value if _is_simple(value) else secrets.token_hex(8)} "
            for name, value in vars(tensor).items()
            if name not in left_out and (type(tensor) not in _PLAIN or name[0] != "_")
        )
    if flatten is None:
        yield Line(path, f"{kind}{_look_of_bytes(tensor)}", tensor)
        return
    for number, part in enumerate(plain_tensors(tensor)):
        yield Line(f"{path}.{number}", f"{kind}{context} {_look_of_bytes(part)}", part)


def _is_simple(value: object) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(each, _Simple) for each in values)


def _look_of_bytes(tensor: torch.Tensor) -> str:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _written(tensor.dtype, tensor.shape, strides)


@functools.cache  # few differ in one model
def _written(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...] | None) -> str:
    return f"{dtype} {tuple(shape)}{'' if strides is None else f' {strides}'}"


def _name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
