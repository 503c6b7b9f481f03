"""Tensors as parts: what they are without their bytes, and where these lie."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shmload._compat import as_plain_tensors, make_tensor_of_class


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
        raise CannotKeep("a tensor without bytes")
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


# Where their bytes lie ----------------------------------------------------------------------------

Spot = tuple[int, int]
"""The region of a tensor, and where the tensor begins there, in bytes."""


class Region(NamedTuple):
    """Memory that one tensor has, or several that share it."""

    address: int
    nbytes: int
    """In bytes."""
    dtype: torch.dtype
    """The dtype of the first tensor in it; uint8 if they differ."""


def merge(tensors: Sequence[torch.Tensor]) -> tuple[list[Region], list[Spot]]:
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
