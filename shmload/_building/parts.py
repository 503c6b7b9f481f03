"""Tensors and tokenizers as parts: what a pickle has of them, and where tensors' bytes lie."""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram

from shmload._compat import as_plain_tensors, make_tensor_of_class


class CannotKeep(Exception):
    """Raised with the path of what cannot be kept, and why."""


class CannotKeepHere(CannotKeep):
    """Raised for what is so in this process alone, or at this time."""


def take_tensor_apart(tensor: torch.Tensor, keep: Callable[[torch.Tensor], Any]) -> Any:
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
    if plain.numel() and not plain.data_ptr():
        raise CannotKeep(f"a {type(tensor).__name__} without bytes of its own: its class needs "
                         "`__tensor_flatten__`")  # fmt: skip
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


# Tokenizers ---------------------------------------------------------------------------------------
# Of the package `tokenizers`: restored exactly, and faster than by their own pickles. These are
# JSON, of which the package reads a float64 inexactly: the last bit of a score of a Unigram model
# may come back otherwise. Lists of 49,000 words and their merges make a model twice as fast.

# No word of a text has it.
_BETWEEN = "\0"


class TokenizerParts(NamedTuple):
    """A tokenizer whose model is BPE or Unigram."""

    shell: str
    """JSON of all but the model and the added tokens."""
    words: str
    """In the order of their numbers, which count from 0."""
    merges: str | None
    """BPE's pairs of pieces, in the order in which they are merged."""
    scores: list[float]
    """Unigram's score of each word."""
    settings: dict[str, Any]
    """The model's settings that are not None."""
    added: list[dict[str, Any]]
    """The tokens that are added to the words."""


def take_tokenizer_apart(tokenizer: Tokenizer) -> TokenizerParts | None:
    """Return the parts of a tokenizer; None if its own pickle restores it exactly.

    Raises:
        ValueError: neither its parts nor its pickle do.
    """
    text = tokenizer.to_str()
    parts = _parts_of(json.loads(text))
    try:
        if parts and put_tokenizer_together(*parts).to_str() == text:
            return parts
    except Exception:  # the package has errors of no class of its own
        pass
    if Tokenizer.from_str(text).to_str() != text:
        raise ValueError("a tokenizer that cannot be restored exactly")
    return None


def _parts_of(shell: dict[str, Any]) -> TokenizerParts | None:
    """Return the parts of a tokenizer's JSON, which it takes apart; None of another model."""
    model = shell["model"]
    kind = model.pop("type")
    if kind == "BPE":
        numbers: dict[str, int] = model.pop("vocab")
        words, scores = sorted(numbers, key=numbers.__getitem__), []
        merges = _BETWEEN.join(piece for pair in model.pop("merges") for piece in pair)
        empty: dict[str, Any] = {"vocab": {}, "merges": []}
    elif kind == "Unigram":
        vocabulary: list[tuple[str, float]] = model.pop("vocab")
        words, scores = [word for word, _ in vocabulary], [score for _, score in vocabulary]
        merges, empty = None, {"vocab": [], "unk_id": None}
    else:
        return None
    added = [{k: v for k, v in each.items() if k != "id"} for each in shell.pop("added_tokens")]
    shell |= {"model": {"type": kind, **empty}, "added_tokens": []}
    return TokenizerParts(
        shell=json.dumps(shell),
        words=_BETWEEN.join(words),
        merges=merges,
        scores=scores,
        settings={name: value for name, value in model.items() if value is not None},
        added=added,
    )


def put_tokenizer_together(
    shell: str,
    words: str,
    merges: str | None,
    scores: list[float],
    settings: dict[str, Any],
    added: list[dict[str, Any]],
) -> Tokenizer:
    """Return a tokenizer of its parts."""
    made = Tokenizer.from_str(shell)
    each = words.split(_BETWEEN) if words else []
    if merges is None:
        made.model = Unigram(list(zip(each, scores, strict=True)), **settings)
    else:
        pieces = merges.split(_BETWEEN) if merges else []
        pairs = list(zip(pieces[::2], pieces[1::2], strict=True))
        made.model = BPE({word: number for number, word in enumerate(each)}, pairs, **settings)
    made.add_tokens([AddedToken(**token) for token in added])
    return made
