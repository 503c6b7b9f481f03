"""Find the files that hold the weights of a directory or file.

Follows what diffusers and transformers do with a local directory, in the releases of
`_compat.TESTED`. If a file is overlooked here, the library reads it itself, which is slower; an
extra file is decoded for nothing. The model is right either way.
"""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shmload._checkpoints.formats.known import default_name, format_names, formats_asked
from shmload._checkpoints.indexes import (
    indexed_shards,
    listed_components,
    listed_specs,
    read_json,
)
from shmload._checkpoints.source import INDEX, MODULAR_INDEX, Checkpoint, Source, no_component
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.weights import (
    ask_for,
    find_adapters,
    find_shards,
    has_variant,
    is_left,
    weights_in,
)
from shmload._wording import nearest
from shmload.errors import (
    ArgumentError,
    IndexMalformed,
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
            `use_safetensors=True` leaves other formats to the libraries, False leaves all.

    Raises:
        SourceNotFound: `root` or its subfolder does not exist, or holds no weights.
        IndexMalformed: an index cannot be read, or names a file outside its directory.
        ShardMissing: an index or `weight_name` has a file that is not there.
        ArgumentError: `weight_name` is given for a pipeline or file, or leaves the directory;
            `subfolder` is given for a file.
        UnknownComponent: `components` has a name that the pipeline does not list.
    """
    kwargs = kwargs or {}
    try:
        folder = subfolder_of(wanted, root)
        if wanted.hub.weight_names:
            return _resolve_named(wanted, folder)
        if folder.is_file():
            return _without_class(wanted, folder, [folder])
        if (folder / INDEX).is_file():
            return _resolve_pipeline(wanted, folder, kwargs)
        if (folder / MODULAR_INDEX).is_file():
            return _resolve_modular(wanted, folder)
        if folder.is_dir():
            return _resolve_folder(wanted, folder, kwargs)
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(f"{wanted.source}: {exc.strerror or str(exc)}") from exc
    raise SourceNotFound(f"{wanted.source}: {_NOWHERE}")


def resolve_model(wanted: Wanted, root: Path, kwargs: Mapping[str, Any] | None = None) -> Source:
    """Find the weight files of one model, alone or in a pipeline.

    Where the library would find none, or finds them in another way, no checkpoint is returned: the
    library loads the model from its own files, or says what is wrong.

    Args:
        wanted: the model's repository or directory, its subfolder and variant.
        root: the directory or file that its source stands for.
        kwargs: as for `resolve`.

    Raises:
        SourceNotFound: `root` does not exist.
        ShardMissing: as `resolve`.
    """
    if not os.path.exists(root):
        raise SourceNotFound(f"{wanted.source}: {_NOWHERE}")
    folder = root / (wanted.hub.subfolder or "")
    is_below = folder.is_relative_to(root) and ".." not in folder.parts[len(root.parts) :]
    # A single model's variant is there, or the library refuses.
    is_there = wanted.variant is None or has_variant(folder, wanted.variant)
    found = None
    if is_below and is_there:
        with contextlib.suppress(IndexMalformed):  # transformers takes any path in an index
            found = _checkpoint(wanted, folder, kwargs or {})
    is_read = found is not None and found.shards and not is_left(found.shards)
    return _source(
        wanted,
        root,
        given=os.fspath(wanted.source),
        checkpoints=(found,) if found and is_read else (),
        folders={"": folder},
        is_complete=is_below and is_there and bool(weights_in(folder)),
    )


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
        near = nearest(name, sorted(each.name for each in root.iterdir() if each.is_dir()))
        raise SourceNotFound(f"{wanted.source}: it has no subfolder {name!r}{near}")
    return root / name


def config_of(folder: Path) -> dict[str, Any]:
    """Return the configuration of a model's directory; empty if it has none."""
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _without_class(wanted: Wanted, root: Path, shards: Collection[Path], **others: Any) -> Source:
    """Return a source that is some files of weights, of which no class is known."""
    folder = root if root.is_dir() else root.parent
    found = Checkpoint(folder=folder, shards=tuple(shards))
    return _source(wanted, root, checkpoints=(found,), **others)


def _source(wanted: Wanted, root: Path, **others: Any) -> Source:
    others.setdefault("given", wanted.source)
    return Source(root=root, variant=wanted.variant, **others)


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
            there = ", ".join(weights_in(root)) or "none"
            raise ShardMissing(
                f"{root / name}, named by weight_name, does not exist; there are {there}",
                path=root / name,
            )
    return _without_class(wanted, root, [root / name for name in names])


def _resolve_pipeline(wanted: Wanted, root: Path, kwargs: Mapping[str, Any]) -> Source:
    index = read_json(root / INDEX)
    listed = dict(listed_components(index))
    for name in listed:
        if name in (".", "..") or name != os.path.basename(name):
            raise IndexMalformed(
                f"{root / INDEX}: it names {name!r}, outside its own directory; download the "
                "checkpoint again",
                path=root / INDEX,
            )
    for name in wanted.components or ():
        if name not in listed:
            offered = [each for each in listed if weights_in(root / each)] or listed
            raise no_component(name, wanted.source, offered)
    sought = [
        name
        for name, (library, _) in listed.items()
        if library
        and name not in kwargs
        and (wanted.components is None or name in wanted.components)
    ]
    found = [_checkpoint(wanted, root / name, kwargs, name, *listed[name]) for name in sought]
    ask_for([shard for each in found for shard in each.shards])
    read = [each for each in found if each.shards and not is_left(each.shards)]
    class_name, variant = index.get("_class_name"), wanted.variant
    return _source(
        wanted,
        root,
        # A list names a class in the repository's own Python file; only the library can find it.
        class_name=class_name if isinstance(class_name, str) else "",
        components=tuple(listed),
        checkpoints=tuple(read),
        is_complete=all(os.path.isdir(root / name) for name in sought)
        and (variant is None or any(has_variant(root / name, variant) for name in sought)),
        unread=tuple(each.component for each in found if each not in read),
    )


def _resolve_modular(wanted: Wanted, root: Path) -> Source:
    """Return a modular pipeline by its index alone: its components are found by `modular`."""
    index = read_json(root / MODULAR_INDEX)
    return _source(
        wanted,
        root,
        class_name=str(index.get("_class_name", "")),
        components=tuple(name for name, _ in listed_specs(index)),
        is_modular=True,
    )


def _resolve_folder(wanted: Wanted, root: Path, kwargs: Mapping[str, Any]) -> Source:
    """Return a model's directory, or one of adapters."""
    found = _checkpoint(wanted, root, kwargs)
    if found.shards and not is_left(found.shards):
        return _source(wanted, root, checkpoints=(found,))
    names = os.listdir(root)
    adapters, others = find_adapters(root, names)
    if adapters:
        return _without_class(wanted, root, [root / name for name in adapters])
    if len(others) == 1:  # so do the libraries' loaders of adapters
        return _without_class(wanted, root, [root / others[0]], is_complete=False)
    if not weights_in(root):
        for name in sorted(each for each in names if ".index." in each):
            indexed_shards(root / name)  # raises: its shards lie elsewhere
        reason = f"a directory without model_index.json or {format_names()} weights"
        raise SourceNotFound(f"{wanted.source}: {reason}")
    return _source(wanted, root, is_complete=False, unread=("",), choices=tuple(others))


def _checkpoint(
    wanted: Wanted,
    folder: Path,
    kwargs: Mapping[str, Any],
    component: str = "",
    library: str = "",
    class_name: str = "",
) -> Checkpoint:
    """Return a model with the files that its library would load; without any if it has none.

    Raises:
        ShardMissing: it has a configuration and no weights, or an index names a file that is not
            there.
    """
    # Path.is_dir raises if the name is too long.
    names = os.listdir(folder) if os.path.isdir(folder) else []
    config = config_of(folder) if names else {}
    if not component:
        library, class_name = _class_in(config)
    use_safetensors = kwargs.get("use_safetensors")
    formats = () if use_safetensors is False else formats_asked(use_safetensors)
    shards = find_shards(folder, names, library, wanted.variant, formats)
    is_model = component and config and not class_name.endswith(WITHOUT_WEIGHTS)
    if is_model and all(name.endswith(".json") and ".index." not in name for name in names):
        missing = folder / default_name(library)
        raise ShardMissing(
            f"{missing}, named by {folder / 'config.json'}, does not exist; download the "
            "checkpoint again",
            path=missing,
        )
    return Checkpoint(
        component=component,
        folder=folder,
        library=library,
        class_name=class_name,
        config=config,
        shards=shards,
    )


def _class_in(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return library and class that a configuration names; empty where unknown."""
    # diffusers writes its class here, transformers a list of them.
    match config:
        case {"_class_name": str(class_name)}:
            return "diffusers", class_name
        case {"architectures": [str(class_name), *_]}:
            return "transformers", class_name
    return "", ""
