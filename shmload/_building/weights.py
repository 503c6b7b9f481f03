"""The weights of a pipeline or model as a list of lines: their paths, and all but their bytes.

Two lists whose lines look alike are of models that can have each other's weights.
"""

import functools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building.mapped import plain_tensors
from shmload._compat import original_of_compiled

_Simple = bool | int | float | str | None
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Line(NamedTuple):
    """A tensor, or a module that has none of its own."""

    path: str
    """As `unet.conv_in.weight`."""
    look: str
    """A module's class; a tensor's dtype and shape, and how it is made of its bytes."""
    tensor: torch.Tensor | None
    """With bytes of its own; None for a module."""


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
    for name, model in sorted(models_in(thing).items()):
        for path, module in model.named_modules(prefix=name):
            yield Line(path, _name_of(module), None)
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        yield from _lines_of_tensor(f"{path}.{key}", tensor)


def _lines_of_tensor(path: str, tensor: torch.Tensor) -> Iterator[Line]:
    kind = "" if type(tensor) is torch.nn.Parameter else f"{_name_of(tensor)} "
    marks = ""
    if type(tensor) not in _PLAIN or any(name[0] != "_" for name in vars(tensor)):
        marks = "".join(
            # What cannot be compared is never the same.
            f"{name}={value if isinstance(value, _Simple) else secrets.token_hex(8)} "
            for name, value in vars(tensor).items()
            if type(tensor) not in _PLAIN or name[0] != "_"
        )
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield Line(path, f"{kind}{marks}{_look_of_bytes(tensor)}", tensor)
        return
    for number, part in enumerate(plain_tensors(tensor)):
        look = f"{kind}{flatten()[1]} {marks}{_look_of_bytes(part)}"
        yield Line(f"{path}.{number}", look, part)


def _look_of_bytes(tensor: torch.Tensor) -> str:
    strides = None if tensor.is_contiguous() else tensor.stride()
    return _written(tensor.dtype, tensor.shape, strides)


@functools.cache  # few differ in one model
def _written(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...] | None) -> str:
    return f"{dtype} {tuple(shape)}{'' if strides is None else f' {strides}'}"


def _name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
