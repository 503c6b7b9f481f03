"""What files of weights are called, and which files of a directory the libraries load."""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.format import Format
from shmload._checkpoints.formats.pytorch import PYTORCH
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.indexes import indexed_shards, leads_outside, read_json
from shmload._host.descriptors import Descriptor
from shmload._host.linux import open_source
from shmload.errors import CheckpointError, ShardTruncated

# As in `model.fp16.safetensors` and `diffusion_pytorch_model.fp16-00001-of-00002.safetensors`,
# without the suffix.
_VARIANT = re.compile(r"[a-z_]+\.([A-Za-z]\w*)(?:-\d+-of-\d+)?")

# A model's weights of any variant, and their index.
_MODELS = re.compile(
    "|".join(
        rf"{re.escape(base)}[.-]"
        for base in dict.fromkeys(
            (*SAFETENSORS.base_names.values(), *PYTORCH.base_names.values()),
        )
    )
)
# Of formats some of whose files are left to the libraries.
_IN_DOUBT = tuple(
    suffix for each in known.FORMATS if each.may_be_unread for suffix in each.suffixes
)
# LORA_WEIGHT_NAME and TEXT_INVERSION_NAME of diffusers, and peft's name.
ADAPTERS = ("pytorch_lora_weights", "learned_embeds", "adapter_model")
"""What files of adapters are called that a library loads by itself, without their suffixes."""
# In the order in which the libraries look for them.
_OF_ADAPTERS = (SAFETENSORS.suffixes, PYTORCH.suffixes)


class Choice(msgspec.Struct, frozen=True):
    """Which files of weights a load takes where a folder has several kinds."""

    variant: str | None
    """As for `from_pretrained`; plain files are loaded where the folder lacks it."""
    formats: tuple[Format, ...]
    """Those that may be loaded, the preferred ones first."""


def choose(variant: str | None, use_safetensors: bool | None) -> Choice:
    """Return the choice that arguments of `from_pretrained` make."""
    if use_safetensors is None:
        return Choice(variant, known.FORMATS)
    return Choice(variant, (SAFETENSORS,) if use_safetensors else (PYTORCH,))


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


def _chosen_name(names: Collection[str], library: str, choice: Choice) -> str | None:
    """Return the file of weights, or the index of some, that a library would load of a folder."""
    applicable = _applicable_variant(names, choice.variant)
    candidates = (
        name
        for file_format in choice.formats
        if file_format.base_names
        for name in _preferred_names(file_format, names, library, applicable)
    )
    return next((name for name in candidates if name in names), None)


def why_file_is_unread(path: Path) -> CheckpointError | None:
    """Return why a file is left to the libraries; None if shmload reads it.

    Only files of formats that `may_be_unread` are. A damaged file of another format is not: reading
    it says what is wrong.
    """
    if not path.name.endswith(_IN_DOUBT):
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
    for suffixes in _OF_ADAPTERS:
        there = sorted(name for name in names if name.endswith(suffixes))
        known = [name for name in there if not why_file_is_unread(folder / name)]
        if known:
            adapters = [name for name in known if name.rpartition(".")[0] in ADAPTERS]
            return adapters, [] if any(map(_MODELS.match, names)) else known
    return [], []


def is_of_model(name: str) -> bool:
    """Tell whether a file has the name of a model's weights, of any variant, or of their index."""
    return _MODELS.match(name) is not None


def default_name(names: Collection[str], library: str) -> str:
    """Return what the weights would be called in a directory that has none."""
    preferred = known.FORMATS[0]
    return _base_name(preferred, names, library)[1] + preferred.suffixes[0]


def has_variant(folder: Path, variant: str) -> bool:
    """Tell whether a component's directory has files of a variant."""
    return os.path.isdir(folder) and _applicable_variant(os.listdir(folder), variant) is not None


def variant_of(path: Path) -> str | None:
    """Return the variant that the name of a file of weights has, or None."""
    for file_format in known.FORMATS:
        for suffix in file_format.suffixes:
            stem = path.name.removesuffix(suffix)
            if stem != path.name and (match := _VARIANT.fullmatch(stem)):
                return match[1]
    return None


def name_as_safetensors(name: str) -> str:
    """Return what a file of weights, or an index of some, is called as a safetensors file.

    So a library finds a segment that stands in for a file of another format. Other names stay.
    """
    for file_format in known.FORMATS:
        suffixes = "|".join(map(re.escape, file_format.suffixes))
        match = re.fullmatch(rf"(.+)(?:{suffixes})(\.index(?:\..+)?\.json)?", name)
        if match:
            stem, index = match.groups("")
            return f"{_rename_base(stem, file_format)}{SAFETENSORS.suffixes[0]}{index}"
    return name


def name_alone_as_safetensors(name: str) -> str:
    """Return what a file of weights, given by its own path, is called as a safetensors file.

    It may have any suffix: what it holds was told by its content.
    """
    renamed, suffix = name_as_safetensors(name), SAFETENSORS.suffixes[0]
    return renamed if renamed.endswith(suffix) else f"{renamed}{suffix}"


def variants_below(root: Path) -> set[str]:
    """Return the variants of all files of weights below a directory."""
    suffixes = {suffix for file_format in known.FORMATS for suffix in file_format.suffixes}
    paths = (path for suffix in suffixes for path in root.glob(f"**/*{suffix}"))
    return {variant for variant in map(variant_of, paths) if variant is not None}


def _preferred_names(
    file_format: Format, names: Iterable[str], library: str, variant: str | None
) -> tuple[str, str]:
    """Return the names of a model's single file and its index, the preferred one first."""
    owner, base = _base_name(file_format, names, library)
    suffix = file_format.suffixes[0]
    single = f"{base}.{variant}{suffix}" if variant else f"{base}{suffix}"
    index = f"{base}{suffix}.index.{variant}.json" if variant else f"{base}{suffix}.index.json"
    # diffusers looks for an index first, transformers for the single file.
    return (index, single) if owner == "diffusers" else (single, index)


def _rename_base(stem: str, file_format: Format) -> str:
    """Replace the base name of a model's weights by that of its library's safetensors."""
    for owner, base in file_format.base_names.items():
        if stem == base or stem.startswith((f"{base}.", f"{base}-")):
            return SAFETENSORS.base_names.get(owner, base) + stem.removeprefix(base)
    return stem


def _base_name(file_format: Format, names: Iterable[str], library: str) -> tuple[str, str]:
    """Return the library that names a folder's weights, and what it calls them, without suffix."""
    by_library = file_format.base_names
    for owner, base in by_library.items():
        if any(name.startswith((f"{base}.", f"{base}-")) for name in names):
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
