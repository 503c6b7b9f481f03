"""What files of weights are called, and which of a folder's files a load takes.

A library finds a model's weights by their names; of adapters, whose names may be anything, the user
chooses. So all is decided from names alone, but for files that shmload may leave to the libraries:
these are looked into.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.known import format_named, is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.header import Format
from shmload._checkpoints.indexes import indexed_shards, leads_outside, read_json
from shmload._checkpoints.wanted import Wanted
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload.errors import CheckpointError, ShardTruncated

# As in `model.fp16.safetensors` and `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`,
# without the suffix. An older shard has its number before the variant.
_VARIANT = re.compile(r"[a-z_]+(?:-\d+-of-\d+)?\.([A-Za-z]\w*)(?:-\d+-of-\d+)?")
# LORA_WEIGHT_NAME and TEXT_INVERSION_NAME of diffusers, and peft's name.
_PEFT = "adapter_model"
ADAPTERS = ("pytorch_lora_weights", "learned_embeds", _PEFT)
"""What files of adapters are called that a library loads by itself, without their suffixes."""
# What a model needs beside its weights.
_SMALL = (".json", ".txt", ".model", ".jinja")
# With these the library reads files of other kinds.
_OTHER_FILES = ("from_flax", "from_tf", "use_flashpack", "use_onnx")


class Choice(msgspec.Struct, frozen=True):
    """Which files of weights a load takes where a folder has several kinds."""

    variant: str | None
    """As for `from_pretrained`; plain files are loaded where the folder lacks it."""
    formats: tuple[Format, ...]
    """Those that may be loaded, the preferred ones first."""


def choose(variant: str | None, use_safetensors: bool | None) -> Choice:
    """Return the choice that arguments of `from_pretrained` make."""
    return Choice(
        variant,
        tuple(
            each
            for each in known.FORMATS
            if each.base_names and use_safetensors in (None, each.use_safetensors)
        ),
    )


# One name -----------------------------------------------------------------------------------------


def is_of_model(name: str) -> bool:
    """Tell whether a file has the name of a model's weights, of any variant, or of their index."""
    bases = (base for each in known.FORMATS for base in each.base_names.values())
    return any(_is_called(name, base) for base in bases)


def _is_called(name: str, base: str) -> bool:
    return name.startswith((f"{base}.", f"{base}-"))


def variant_of(name: str) -> str | None:
    """Return the variant that the name of a file of weights has, or None."""
    match = _VARIANT.fullmatch(name.rpartition(".")[0]) if is_of_weights(name) else None
    return match[1] if match else None


def name_as_safetensors(name: str) -> str:
    """Return what a file of weights, or an index of some, is called as a safetensors file.

    So a library finds a segment that stands in for a file of another format. Other names stay.
    """
    weights, index = name, ""
    if name.endswith(".json"):
        weights, *rest = name.partition(".index.")
        index = "".join(rest)
    named = format_named(weights)
    if named is None:
        return name
    stem = weights.rpartition(".")[0]
    for owner, base in named.base_names.items():
        if _is_called(weights, base):
            stem = SAFETENSORS.base_names.get(owner, base) + stem.removeprefix(base)
            break
    return f"{stem}{SAFETENSORS.suffixes[0]}{index}"


def name_alone_as_safetensors(name: str) -> str:
    """Return what a file of weights, given by its own path, is called as a safetensors file.

    It may have any suffix: what it holds was told by its content.
    """
    renamed, suffix = name_as_safetensors(name), SAFETENSORS.suffixes[0]
    return renamed if renamed.endswith(suffix) else f"{renamed}{suffix}"


# A folder's names ---------------------------------------------------------------------------------


def weights_in(folder: Path) -> list[str]:
    """Return the names of all files of weights in a directory; none if it is no directory."""
    return sorted(filter(is_of_weights, os.listdir(folder))) if os.path.isdir(folder) else []


def has_variant(folder: Path, variant: str) -> bool:
    """Tell whether a component's directory has files of a variant."""
    return os.path.isdir(folder) and _applicable_variant(os.listdir(folder), variant) is not None


def variants_below(root: Path) -> set[str]:
    """Return the variants of all files of weights below a directory."""
    suffixes = {suffix for each in known.FORMATS for suffix in each.suffixes}
    paths = (path for suffix in suffixes for path in root.glob(f"**/*{suffix}"))
    return {variant for path in paths if (variant := variant_of(path.name))}


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


def default_name(names: Collection[str], library: str) -> str:
    """Return what the weights would be called in a directory that has none."""
    preferred = known.FORMATS[0]
    return _base_name(preferred, names, library)[1] + preferred.suffixes[0]


def find_shards(
    folder: Path,
    names: Collection[str],
    library: str,
    choice: Choice,
) -> tuple[Path, ...]:
    """Return the files that a library would load, in the order of their names.

    Args:
        folder: of the model.
        names: of all files in it.
        library: that of the model's class; empty if unknown.
        choice: among files of several kinds.

    Returns:
        Nothing where no format has weights in the folder, or has some that only the library reads.

    Raises:
        IndexMalformed, ShardMissing: as `indexed_shards`.
        ShardTruncated: a file of a format that `may_be_unread` has no end.
    """
    found = _chosen_name(names, library, choice)
    if found is None:
        return ()
    shards: tuple[Path, ...] = (folder / found,)
    if found.endswith(".json"):
        if library == "transformers" and _names_others(folder / found):
            return ()
        shards = indexed_shards(folder / found)
    for shard in shards:
        cause = why_file_is_unread(shard)
        if isinstance(cause, ShardTruncated):  # no library loads it, and says less
            raise cause
        if cause:
            return ()
    return shards


def _names_others(index_path: Path) -> bool:
    """Tell whether an index of transformers, which takes any path, names files elsewhere."""
    weight_map = read_json(index_path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return any(isinstance(name, str) and leads_outside(name) for name in names)


def why_file_is_unread(path: Path) -> CheckpointError | None:
    """Return why a file is left to the libraries; None if shmload reads it.

    Only files of formats that `may_be_unread` are. A damaged file of another format is not: reading
    it says what is wrong.
    """
    named = format_named(path.name)
    if named is None or not named.may_be_unread:
        return None
    try:
        with Descriptor(open_source(path)) as shard:
            file_format = known.detect_format(shard.fd, path)
            if file_format.may_be_unread:
                file_format.read_header(shard.fd, path)
    except CheckpointError as exc:
        return exc
    return None


def find_adapters(folder: Path, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the files of weights in a folder that no model's weights are in.

    Files that only the libraries read are not among them.

    Args:
        folder: that may have adapters.
        names: of all files in it.

    Returns:
        Those that a library loads without being told a name; and all that it loads by name, if
        nothing there belongs to a model. Where there are safetensors, no others are: these may be
        anything, such as the state of an optimizer.
    """
    for each in choose(None, None).formats:
        there = sorted(name for name in names if name.endswith(each.suffixes))
        read = [name for name in there if not why_file_is_unread(folder / name)]
        if read:
            adapters = [name for name in read if name.rpartition(".")[0] in ADAPTERS]
            return adapters, [] if any(map(is_of_model, names)) else read
    return [], []


def _chosen_name(names: Collection[str], library: str, choice: Choice) -> str | None:
    """Return the file of weights, or the index of some, that a library would load of a folder."""
    applicable = _applicable_variant(names, choice.variant)
    for each in choice.formats:
        owner, base = _base_name(each, names, library)
        single, index = model_names(base, each.suffixes[0], applicable)
        # diffusers looks for an index first, transformers for the single file.
        for name in (index, single) if owner == "diffusers" else (single, index):
            if name in names:
                return name
    return None


def _base_name(file_format: Format, names: Iterable[str], library: str) -> tuple[str, str]:
    """Return the library that names a folder's weights, and what it calls them, without suffix."""
    by_library = file_format.base_names
    for owner, base in by_library.items():
        if any(_is_called(name, base) for name in names):
            return owner, base
    owner = library if library in by_library else [*by_library][-1]
    return owner, by_library[owner]


def _applicable_variant(names: Iterable[str], variant: str | None) -> str | None:
    """Return the variant where the component has it: else its plain files are loaded.

    The test is that of diffusers (`_identify_model_variants`).
    """
    parts = (name.split(".") for name in names)
    is_there = variant and any(len(part) > 1 and part[1].startswith(variant) for part in parts)
    return variant if is_there else None


# A repository's names -----------------------------------------------------------------------------


def files_of_model(names: Collection[str], wanted: Wanted, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the files that one model, or an adapter, is made of.

    Args:
        names: all files of the repository.
        wanted: the model. If it names no files of weights, the library's choice counts.
        kwargs: other arguments of `from_pretrained`.

    Returns:
        The files of weights, in the format that the library prefers, and the small files that may
        belong to them: configurations, code, tokenizers.
    """
    folder = wanted.hub.folder
    inside = {os.path.basename(name): name for name in names if os.path.dirname(name) == folder}
    weights = [name for name in sorted(inside) if is_of_weights(name)]
    chosen = wanted.hub.weight_names or _chosen_weights(weights, wanted.variant, kwargs)
    small = [name for name in inside if name.endswith(_SMALL)]
    # The root has a pipeline's index; code may import other code of its repository.
    shared = (n for n in names if n.endswith(".py") or (n.endswith(".json") and "/" not in n))
    return sorted({*(inside[name] for name in (*chosen, *small) if name in inside), *shared})


def _chosen_weights(
    names: Collection[str], variant: str | None, kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the files of weights in a folder that the library would load; all in doubt."""
    use_safetensors = kwargs.get("use_safetensors")
    if any(map(kwargs.get, _OTHER_FILES)):
        return list(names)
    if kwargs.get("gguf_file"):
        return [kwargs["gguf_file"]]
    for each in choose(variant, use_safetensors).formats:
        there = [name for name in names if name.endswith(each.suffixes)]
        models = [name for name in there if is_of_model(name) or name.startswith(_PEFT)]
        # Of adapters, which have names of any kind, the user chooses.
        if chosen := [name for name in models if variant_of(name) == variant] if models else there:
            return chosen
    return [] if variant or use_safetensors is not None else list(names)


def are_in_format(folders: Iterable[Path], use_safetensors: bool | None) -> bool:
    """Tell whether each folder with weights has some in the format that was asked for.

    Args:
        folders: of models; one may be missing.
        use_safetensors: as for `from_pretrained`; None for any format.
    """
    wanted = choose(None, use_safetensors).formats[0]
    return use_safetensors is None or all(
        any(name.endswith(wanted.suffixes) for name in names)
        for names in map(weights_in, folders)
        if names
    )
