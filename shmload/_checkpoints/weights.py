"""Which of a folder's files of weights a load takes.

All is decided from names, but for files that shmload may leave to the libraries: these are looked
into.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.known import (
    ADAPTERS,
    PEFT,
    chosen_name,
    detect_format,
    format_named,
    formats_asked,
    is_of_model,
    is_of_weights,
    variant_of,
)
from shmload._checkpoints.header import Format
from shmload._checkpoints.indexes import indexed_shards
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.wanted import Wanted
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload.errors import CheckpointError, ShardTruncated

# What a model needs beside its weights.
_SMALL = (".json", ".txt", ".model", ".jinja")
# With these the library reads files of other kinds.
_OTHER_FILES = ("from_flax", "from_tf", "use_flashpack", "use_onnx")


def weights_in(folder: Path) -> list[str]:
    """Return the names of all files of weights in a directory; none if it is no directory."""
    return sorted(filter(is_of_weights, os.listdir(folder))) if os.path.isdir(folder) else []


def plain_weights_in(folder: Path) -> list[Path]:
    """Return the files of a model's weights in a directory that are of no variant."""
    names = filter(is_of_model, weights_in(folder))
    return [folder / name for name in names if variant_of(name) is None]


def has_variant(folder: Path, variant: str) -> bool:
    """Tell whether a component's directory has files of a variant."""
    return os.path.isdir(folder) and _applicable_variant(os.listdir(folder), variant) is not None


def find_shards(
    folder: Path,
    names: Collection[str],
    library: str,
    variant: str | None,
    formats: Sequence[Format],
) -> tuple[Path, ...]:
    """Return the files that a library would load, in the order of their names; perhaps none.

    Args:
        folder: of the model.
        names: of all files in it.
        library: that of the model's class; empty if unknown.
        variant: as for `from_pretrained`; plain files are loaded where the folder lacks it.
        formats: those that may be loaded, the preferred ones first.

    Raises:
        IndexMalformed, ShardMissing: as `indexed_shards`.
    """
    found = chosen_name(names, library, _applicable_variant(names, variant), formats)
    if found is None:
        return ()
    return indexed_shards(folder / found) if found.endswith(".json") else (folder / found,)


def ask_for(shards: Iterable[Path]) -> None:
    """Have libraries describe all of some files that they may have to, in one process each."""
    for each in known.FORMATS:
        asked = [shard for shard in shards if shard.name.endswith(each.suffixes)]
        if each.ask_for and asked:
            each.ask_for(asked)


def is_left(shards: Collection[Path]) -> bool:
    """Tell whether a model is left to its library, because of a file that only that reads.

    Raises:
        ShardTruncated: a file of a format that `may_be_unread` has no end.
    """
    ask_for(shards)
    causes = [why_unread(shard) for shard in shards]
    for cause in causes:
        if isinstance(cause, ShardTruncated):  # no library loads it, and says less
            raise cause
    return any(causes)


def why_unread(path: Path) -> CheckpointError | None:
    """Return why a file is left to the libraries; None if shmload reads it.

    Only files of formats that `may_be_unread` are. A damaged file of another format is not: reading
    it says what is wrong.
    """
    named = format_named(path.name)
    if named is None or not named.may_be_unread:
        return None
    try:
        with Descriptor(open_source(path)) as shard:
            file_format = detect_format(shard.fd, path)
            if file_format.may_be_unread:
                file_format.read_header(shard.fd, path)
    except CheckpointError as exc:
        return exc
    return None


def is_single_file(source: str | os.PathLike[str]) -> bool:
    """Tell whether a source is a file, and not a directory or a hub id.

    What a file on this machine holds is told by its content, and not by its name.
    """
    if is_url(source):
        return format_named(urlsplit(str(source)).path) is not None
    return os.path.isfile(source)


def format_with_quants(path: str | os.PathLike[str]) -> Format | None:
    """Return the format of a file that may have quantised blocks, by its content; else None.

    Raises:
        ShardUnreadable: it cannot be opened or read.
    """
    if is_url(path):
        return None
    with Descriptor(open_source(Path(path))) as file:
        found = detect_format(file.fd, path)
    return found if found.quants else None


def find_adapters(folder: Path, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the files of weights in a folder that no model's weights are in.

    Files that only the libraries read are not among them.

    Args:
        folder: that may have adapters.
        names: of all files in it.

    Returns:
        Those that a library loads without being told a name; and all that it loads by name, if
        nothing there belongs to a model. Where there are files of a preferred format, no others
        are: these may be anything, such as the state of an optimizer.
    """
    for each in formats_asked(None):
        there = sorted(name for name in names if name.endswith(each.suffixes))
        read = [name for name in there if not why_unread(folder / name)]
        if read:
            adapters = [name for name in read if name.rpartition(".")[0] in ADAPTERS]
            return adapters, [] if any(map(is_of_model, names)) else read
    return [], []


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
    if named := [kwargs[each.argument] for each in known.FORMATS if kwargs.get(each.argument)]:
        return named
    for each in formats_asked(use_safetensors):
        there = [name for name in names if name.endswith(each.suffixes)]
        models = [name for name in there if is_of_model(name) or name.startswith(PEFT)]
        # Adapters may have any name, so the user chooses among them.
        if chosen := [name for name in models if variant_of(name) == variant] if models else there:
            return chosen
    return [] if variant or use_safetensors is not None else list(names)
