"""Find the files that hold the weights of a directory or file.

Follows what diffusers and transformers do with a local directory, in the releases of
`_version.TESTED`. If a file is overlooked here, the library reads it itself, which is slower; an
extra file is decoded for nothing. The model is right either way.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import (
    OF_SEGMENTS,
    default_name,
    format_names,
    formats_asked,
    is_of_weights,
    name_in_view,
)
from shmload._checkpoints.header import Format
from shmload._checkpoints.indexes import (
    indexed_shards,
    listed_components,
    listed_specs,
    read_json,
    require_beside,
)
from shmload._checkpoints.source import INDEX, MODULAR_INDEX, Checkpoint, Source, no_component
from shmload._checkpoints.wanted import Wanted, not_found
from shmload._checkpoints.weights import (
    ask_for,
    find_adapters,
    find_shards,
    has_variant,
    is_left,
    weights_in,
)
from shmload._wording import nearest, nearest_name
from shmload.errors import (
    ArgumentError,
    ShardMissing,
    ShmloadError,
    SourceNotFound,
)

_NOWHERE = "neither a file, a directory nor a model in the hub cache"
# Classes whose directories hold JSON files only.
WITHOUT_WEIGHTS = (
    "Tokenizer",
    "TokenizerFast",
    "Processor",
    "ProcessorFast",
    "Scheduler",
    "Config",
)


def resolve(wanted: Wanted, root: Path, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find the weight files of a source.

    Args:
        wanted: what to find; its dtype is not used.
        root: the directory or file that its source stands for.
        kwargs: other arguments of `from_pretrained`. Components among them are not looked for.
            `use_safetensors=True` leaves other formats to the libraries; False leaves all to them
            if a component has weights in another format than is asked for so.

    Raises:
        SourceNotFound: `root` or its subfolder does not exist, or holds no weights.
        IndexMalformed: an index cannot be read, or names a file outside its directory.
        ShardMissing: an index or `weight_name` has a file that is not there.
        ArgumentError: `weight_name` is given for a pipeline or file, or leaves the directory;
            `subfolder` is given for a file.
        UnknownComponent: `components` has a name that the pipeline does not list.
    """
    kwargs = kwargs or {}
    use_safetensors = kwargs.get("use_safetensors")
    try:
        folder = subfolder_of(wanted, root)
        if wanted.hub.weight_names:
            return _resolve_named(wanted, folder)
        found = _resolve(wanted, folder, formats_asked(use_safetensors), kwargs)
        if use_safetensors is False and (
            any(weights_in(folder / name) for name in found.unread) or _has_rivals(found.shards)
        ):
            # The library looks for no safetensors then, and so for no segment: all is left to it.
            found = _resolve(wanted, folder, (), kwargs)
        return msgspec.structs.replace(found, variant=wanted.variant)
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(f"{wanted.source}: {exc.strerror or str(exc)}") from exc


def subfolder_of(wanted: Wanted, root: Path) -> Path:
    """Return the directory of a component alone, or the root.

    Raises:
        SourceNotFound: the root has no such subfolder.
        ArgumentError: the root is a file.
    """
    name = wanted.hub.subfolder
    if not name:
        return root
    if root.is_file():
        raise ArgumentError(f"subfolder is for directories, and {wanted.source} is a file")
    if root.is_dir() and not (root / name).is_dir():
        folders = sorted(each.name for each in root.iterdir() if each.is_dir())
        near = nearest(name, folders)
        raise SourceNotFound(f"{wanted.source}: it has no subfolder {name!r}{near}")
    return root / name


def _has_rivals(shards: Collection[Path]) -> bool:
    """Tell whether there are safetensors that a library may prefer to segments of PyTorch's files.

    A view has segments under the names of safetensors, and so hides only files of these names.
    """
    hidden = {shard.parent / name_in_view(shard.name) for shard in shards}
    return any(
        OF_SEGMENTS.suffixes[0] in name and folder / name not in hidden
        for folder in {shard.parent for shard in shards}
        for name in os.listdir(folder)
    )


def _resolve(
    wanted: Wanted, root: Path, formats: Sequence[Format], passed: Collection[str]
) -> Source:
    if root.is_file():
        return _without_class(wanted, root, root.parent, (root,))
    if not root.is_dir():
        raise not_found(wanted.source, _NOWHERE)
    if (root / INDEX).is_file():
        return _resolve_pipeline(wanted, root, formats, passed)
    if (root / MODULAR_INDEX).is_file():
        return _resolve_modular(wanted, root)
    return _resolve_component(wanted, root, formats)


def _without_class(
    wanted: Wanted, root: Path, folder: Path, shards: tuple[Path, ...], **others: Any
) -> Source:
    """Return a source that is some files of weights, of which no class is known."""
    found = Checkpoint(folder=folder, shards=shards)
    return Source(given=wanted.source, root=root, checkpoints=(found,), **others)


def resolve_model(wanted: Wanted, root: Path, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find the weight files of one model, alone or in a pipeline.

    Where the library would find none, or finds them in another way, no checkpoint is returned: the
    library loads the model from its own files, or says what is wrong.

    Args:
        wanted: the model's repository or directory, its subfolder and variant.
        root: the directory or file that its source stands for.
        kwargs: other arguments of `from_pretrained`. `use_safetensors=True` leaves other formats to
            the library, False all but the one that it means.

    Raises:
        SourceNotFound: `root` does not exist.
        IndexMalformed, ShardMissing: as `resolve`.
    """
    if not os.path.exists(root):
        raise SourceNotFound(f"{wanted.source}: {_NOWHERE}")
    variant, use_safetensors = wanted.variant, (kwargs or {}).get("use_safetensors")
    folder = root / (wanted.hub.subfolder or "")
    is_below = folder.is_relative_to(root) and ".." not in folder.parts[len(root.parts) :]
    names = os.listdir(folder) if is_below and os.path.isdir(folder) else []
    library, class_name, config = _describe(folder) if names else ("", "", {})
    # A single model's variant is there, or the library refuses.
    is_there = variant is None or has_variant(folder, variant)
    shards: tuple[Path, ...] = ()
    if names and is_there:
        shards = find_shards(folder, names, library, variant, formats_asked(use_safetensors))
        if is_left(shards) or (use_safetensors is False and _has_rivals(shards)):
            shards = ()
    found = Checkpoint(
        folder=folder, library=library, class_name=class_name, config=config, shards=shards
    )
    return Source(
        given=os.fspath(wanted.source),
        root=root,
        checkpoints=(found,) if shards else (),
        variant=variant,
        is_complete=any(map(is_of_weights, names)) and is_there,
    )


def _resolve_named(wanted: Wanted, root: Path) -> Source:
    if not root.is_dir():
        raise ArgumentError(f"weight_name is for a directory, and {root} is none")
    names = sorted(set(wanted.hub.weight_names))
    for name in names:
        if name in ("", ".", "..") or name != os.path.basename(name):
            raise ArgumentError(
                f"weight_name is {name!r}; give a name, and its folder as subfolder"
            )
        if not os.path.exists(root / name):
            there = weights_in(root)
            by_stem = {os.path.splitext(each)[0]: each for each in there}  # endings are all alike
            near = nearest_name(os.path.splitext(name)[0], list(by_stem))
            hint = f"; did you mean {by_stem[near]!r}?" if near else ""
            raise ShardMissing(
                f"{root / name}, named by weight_name, does not exist; there are "
                f"{', '.join(there) or 'none'}{hint}",
                path=root / name,
            )
    return _without_class(wanted, root, root, tuple(root / name for name in names))


def _resolve_pipeline(
    wanted: Wanted, root: Path, formats: Sequence[Format], passed: Collection[str]
) -> Source:
    index_path = root / INDEX
    index = read_json(index_path)
    listed = dict(listed_components(index))
    for name in listed:
        require_beside(name, index_path)
    for name in wanted.components or ():
        if name not in listed:
            offered = [each for each in listed if weights_in(root / each)] or listed
            raise no_component(name, wanted.source, offered)
    sought = [
        name
        for name, (library, _) in listed.items()
        if library
        and name not in passed
        and (wanted.components is None or name in wanted.components)
    ]
    found = [
        _checkpoint(root / name, wanted.variant, formats, name, *listed[name]) for name in sought
    ]
    ask_for([shard for each in found if each for shard in each.shards])
    found = [None if each and is_left(each.shards) else each for each in found]
    pipeline_class = index.get("_class_name")
    return Source(
        given=wanted.source,
        root=root,
        # A list names a class in the repository's own Python file; only the library can find it.
        class_name=pipeline_class if isinstance(pipeline_class, str) else "",
        components=tuple(listed),
        checkpoints=tuple(checkpoint for checkpoint in found if checkpoint),
        is_complete=all(os.path.isdir(root / name) for name in sought)
        and (
            wanted.variant is None
            or any(has_variant(root / name, wanted.variant) for name in sought)
        ),
        unread=tuple(name for name, each in zip(sought, found, strict=True) if each is None),
    )


def _resolve_modular(wanted: Wanted, root: Path) -> Source:
    """Return a modular pipeline by its index alone: its components are found by `modular`."""
    index = read_json(root / MODULAR_INDEX)
    return Source(
        given=wanted.source,
        root=root,
        class_name=str(index.get("_class_name", "")),
        components=tuple(name for name, _ in listed_specs(index)),
        is_modular=True,
    )


def _describe(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Return library, class and configuration of a model's directory; empty where unknown."""
    config = config_of(folder)
    # diffusers writes its class here, transformers a list of them.
    match config:
        case {"_class_name": str(class_name)}:
            return "diffusers", class_name, config
        case {"architectures": [str(class_name), *_]}:
            return "transformers", class_name, config
    return "", "", config


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a model's directory; empty if it has none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _resolve_component(wanted: Wanted, root: Path, formats: Sequence[Format]) -> Source:
    library, class_name, _ = _describe(root)
    checkpoint = _checkpoint(root, wanted.variant, formats, "", library, class_name)
    if checkpoint and not is_left(checkpoint.shards):
        return Source(given=wanted.source, root=root, checkpoints=(checkpoint,))
    names = os.listdir(root)
    adapters, others = find_adapters(root, names)
    if adapters:
        return _without_class(wanted, root, root, tuple(root / name for name in adapters))
    if len(others) == 1:  # so do the libraries' loaders of adapters
        return _without_class(wanted, root, root, (root / others[0],), is_complete=False)
    if not weights_in(root):
        for name in sorted(each for each in names if ".index." in each):
            indexed_shards(root / name)  # raises: its shards lie elsewhere
        reason = f"a directory without model_index.json or {format_names()} weights"
        raise SourceNotFound(f"{wanted.source}: {reason}")
    return Source(
        given=wanted.source, root=root, is_complete=False, unread=("",), choices=tuple(others)
    )


def _checkpoint(
    folder: Path,
    variant: str | None,
    formats: Sequence[Format],
    component: str,
    library: str,
    class_name: str,
) -> Checkpoint | None:
    if not os.path.isdir(folder):  # Path.is_dir raises if the name is too long
        return None
    names = os.listdir(folder)
    shards = find_shards(folder, names, library, variant, formats)
    if not shards:
        _require_weights(folder, names, library, class_name)
        return None
    return Checkpoint(
        component=component,
        folder=folder,
        library=library,
        class_name=class_name,
        config=config_of(folder),
        shards=shards,
    )


def _require_weights(folder: Path, names: Collection[str], library: str, class_name: str) -> None:
    """Raise ShardMissing if a model's directory has a configuration but no weights."""
    is_model = library and "config.json" in names and not class_name.endswith(WITHOUT_WEIGHTS)
    has_index = any(".index." in name for name in names)  # its shards may lie elsewhere
    if is_model and not has_index and all(name.endswith(".json") for name in names):
        missing = folder / default_name(names, library)
        raise ShardMissing(
            f"{missing}, named by {folder / 'config.json'}, does not exist; download the "
            "checkpoint again",
            path=missing,
        )
