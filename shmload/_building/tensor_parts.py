"""Tensors as parts: what they are without their bytes, and what makes them of these again."""

from collections.abc import Callable
from typing import Any

import torch

from shmload._compat import as_plain_tensors, make_normed, make_tensor_of_class, norm_of


class CannotKeep(Exception):
    """Raised with the path of what cannot be kept, and why."""


class CannotKeepHere(CannotKeep):
    """Raised for what is so in this process alone, or at this time."""


def take_apart(tensor: torch.Tensor, keep: Callable[[torch.Tensor], Any]) -> Any:
    """Return what pickle makes a tensor of again.

    Args:
        tensor: it stays as it is.
        keep: keeps a plain tensor on the host; returns what stands for its bytes in the pickle.

    Raises:
        CannotKeep: it cannot be kept.
    """
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
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise CannotKeep(
            f"a {tensor.layout} tensor of {tensor.dtype}, or one that stands for a negative or "
            "conjugate of another"
        )
    with as_plain_tensors():
        plain = tensor.detach().cpu()
    made = tensor.dtype, tuple(tensor.shape), tuple(plain.stride())
    return _wrap, (type(tensor), keep(plain), *made, tensor.requires_grad, attributes)


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
