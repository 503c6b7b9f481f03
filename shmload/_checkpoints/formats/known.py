"""The table of formats that shmload reads, and what files of weights are called.

A library finds a model's weights by their names. So most is decided from names alone.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from shmload._checkpoints.formats.gguf import GGUF
from shmload._checkpoints.formats.pytorch import PYTORCH
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.header import Format, Header, read_head
from shmload._checkpoints.objects import POINTER

FORMATS = (SAFETENSORS, PYTORCH, GGUF)
"""In the order in which they are preferred where a model has weights in several."""
OF_SEGMENTS = SAFETENSORS
"""The format of what stands in for a file of any format."""

# Weights that are left to the libraries.
_OTHER_SUFFIXES = (".h5", ".msgpack", ".npz", ".onnx")
# LORA_WEIGHT_NAME and TEXT_INVERSION_NAME of diffusers, and peft's name.
PEFT = "adapter_model"
ADAPTERS = ("pytorch_lora_weights", "learned_embeds", PEFT)
"""What files of adapters are called that a library loads by itself, without their suffixes."""
# As in `model.fp16.safetensors` and `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`,
# without the suffix. An older shard has its number before the variant.
_VARIANT = re.compile(r"[a-z_]+(?:-\d+-of-\d+)?\.([A-Za-z]\w*)(?:-\d+-of-\d+)?")


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file in any of the formats.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call the file.

    Raises:
        ShardMalformed: the header breaks the format.
        ShardTruncated: the file is shorter than its header says.
        ShardUnreadable: the kernel reports an error.
    """
    return detect_format(fd, path).read_header(fd, path)


def detect_format(fd: int, path: str | os.PathLike[str]) -> Format:
    """Return the format of an open file.

    Raises:
        ShardUnreadable: the kernel reports an error.
    """
    return format_of(path, read_head(fd, path))


def format_of(path: str | os.PathLike[str], head: bytes) -> Format:
    """Return the format that a file's content has, or else the one that its name has.

    Args:
        path: of the file.
        head: its first `HEAD_NBYTES` bytes.

    Returns:
        The first of `FORMATS` if neither is known; its reader then says what is wrong.
    """
    by_content = (known for known in (POINTER, *FORMATS) if known.recognises(head))
    return next(by_content, None) or format_named(os.fspath(path)) or FORMATS[0]


def dequantiser(kind: str, path: str | os.PathLike[str]) -> Callable[[Any], Any]:
    """Return what makes float32 of a row of blocks of a kind; see `Quants`."""
    of_kind = (each.quants for each in FORMATS if each.quants and kind in each.quants.kinds)
    return next(of_kind).dequantiser(kind, path)


def format_names() -> str:
    """Return the names of all formats, for messages."""
    return " or ".join(known.name for known in FORMATS)


def formats_asked(use_safetensors: bool | None) -> tuple[Format, ...]:
    """Return the formats of models that an argument of `from_pretrained` asks for."""
    return tuple(
        known
        for known in FORMATS
        if known.base_names and use_safetensors in (None, known.use_safetensors)
    )


# One name -----------------------------------------------------------------------------------------


def format_named(name: str) -> Format | None:
    """Return the format that the name of a file says; None if it is none that shmload reads."""
    return next((known for known in FORMATS if name.endswith(known.suffixes)), None)


def is_of_weights(name: str) -> bool:
    """Tell whether a file is called like weights, in a format that shmload reads or in another."""
    return format_named(name) is not None or name.endswith(_OTHER_SUFFIXES)


def is_of_model(name: str) -> bool:
    """Tell whether a file has the name of a model's weights, of any variant, or of their index."""
    return any(_owner(known, [name]) for known in FORMATS)


def variant_of(name: str) -> str | None:
    """Return the variant that the name of a file of weights has, or None."""
    match = _VARIANT.fullmatch(name.rpartition(".")[0]) if is_of_weights(name) else None
    return match[1] if match else None


def name_in_view(name: str) -> str:
    """Return what a file of weights, or an index of some, is called in a view.

    There a library finds a segment, which has the format `OF_SEGMENTS`. Other names stay.
    """
    weights, index = name, ""
    if name.endswith(".json"):
        weights, *rest = name.partition(".index.")
        index = "".join(rest)
    named = format_named(weights)
    if named is None:
        return name
    stem = weights.rpartition(".")[0]
    if owner := _owner(named, [weights]):
        base = named.base_names[owner]
        stem = OF_SEGMENTS.base_names.get(owner, base) + stem.removeprefix(base)
    return f"{stem}{OF_SEGMENTS.suffixes[0]}{index}"


def name_alone_in_view(name: str) -> str:
    """Return what a file of weights, given by its own path, is called in a view.

    It may have any suffix: what it holds was told by its content.
    """
    renamed, suffix = name_in_view(name), OF_SEGMENTS.suffixes[0]
    return renamed if renamed.endswith(suffix) else f"{renamed}{suffix}"


# A model's names ----------------------------------------------------------------------------------


def model_names(base: str, suffix: str, variant: str | None) -> tuple[str, str]:
    """Return what a model's only file of weights is called, and the index of several.

    Args:
        base: as a library begins the name.
        suffix: of the format.
        variant: as for `from_pretrained`.
    """
    if variant:
        return f"{base}.{variant}{suffix}", f"{base}{suffix}.index.{variant}.json"
    return f"{base}{suffix}", f"{base}{suffix}.index.json"


def chosen_name(
    names: Collection[str], library: str, variant: str | None, formats: Iterable[Format]
) -> str | None:
    """Return the file of weights, or the index of some, that a library would load of a folder.

    Args:
        names: of all files in the folder.
        library: that of the model's class; empty if unknown.
        variant: which the folder has, or None.
        formats: those that may be loaded, the preferred ones first.
    """
    for known in formats:
        owner = _owner(known, names, library)
        only, index = model_names(known.base_names[owner], known.suffixes[0], variant)
        # diffusers looks for an index first, transformers for the single file.
        for name in (index, only) if owner == "diffusers" else (only, index):
            if name in names:
                return name
    return None


def default_name(library: str) -> str:
    """Return what the weights would be called in a directory that has none."""
    base_names = OF_SEGMENTS.base_names
    return base_names.get(library, base_names["transformers"]) + OF_SEGMENTS.suffixes[0]


def _owner(known: Format, names: Collection[str], library: str | None = None) -> str:
    """Return the library whose models have weights with such names.

    Args:
        known: the format.
        names: of files.
        library: what to return if no name tells; if that library has no models in this format,
            another is returned. None: return an empty name then.
    """
    by_library = known.base_names
    for owner, base in by_library.items():
        if any(name.startswith((f"{base}.", f"{base}-")) for name in names):
            return owner
    if library is None:
        return ""
    return library if library in by_library else [*by_library][-1]
