"""From what a user names to the files that hold its weights.

Follows what diffusers 0.35 to 0.42 and transformers 4.57 to 5.23 do with a local directory. A file
overlooked here is only slower (the library reads it itself), a file too many only wasted work.
"""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._host.linux import open_source
from shmload.errors import (
    IndexMalformed,
    ShardMissing,
    ShmloadError,
    SourceNotFound,
    UnknownComponent,
)

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index"
# The name of the weights in each library (diffusers.utils.SAFETENSORS_WEIGHTS_NAME, transformers').
_DIFFUSERS_BASE = "diffusion_pytorch_model"
_TRANSFORMERS_BASE = "model"
# Many times what the largest indexes have; a link to /dev/zero has no end.
_MAX_JSON_NBYTES = 64 << 20
_WEIGHTS = (_SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".onnx")
# Classes whose directories hold JSON files only.
_WITHOUT_WEIGHTS = (
    "Tokenizer",
    "TokenizerFast",
    "Processor",
    "ProcessorFast",
    "Scheduler",
    "Config",
)


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The weight files of one component, or of one file or directory given by itself."""

    component: str
    """Its name in the pipeline; empty where there is no pipeline."""
    folder: Path
    """The directory whose files stand beside the weights."""
    library: str
    """`diffusers`, `transformers`, a module of diffusers' pipelines, or empty if unknown."""
    class_name: str
    """Of the model, or empty if unknown."""
    config: dict[str, Any]
    """Its `config.json`, or empty."""
    shards: tuple[Path, ...]
    """In the order of their names."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline, one component, or one file, on the local disk."""

    given: str | os.PathLike[str]
    """What the user named."""
    root: Path
    """The directory, or the file."""
    class_name: str
    """Of the pipeline; empty if the source is not one, or brings its own code."""
    components: tuple[str, ...]
    """All components that the pipeline lists, with weights or without."""
    checkpoints: tuple[Checkpoint, ...]
    """Those whose weights are safetensors files."""
    is_complete: bool = True
    """Whether every component that is wanted has a directory, and some file is of the variant."""

    @property
    def is_pipeline(self) -> bool:
        """Whether there is a `model_index.json`."""
        return bool(self.components)


def resolve(
    given: str | os.PathLike[str],
    root: Path,
    *,
    variant: str | None = None,
    components: Collection[str] | None = None,
    passed: Collection[str] = (),
) -> Source:
    """Find the weight files of a source.

    Args:
        given: what the user named, for messages.
        root: the directory or file it stands for.
        variant: as for `from_pretrained`, such as `fp16`.
        components: only these, or all if None.
        passed: components that the caller brings along, as built objects or None.

    Raises:
        SourceNotFound: `root` does not exist or holds no weights.
        IndexMalformed: an index cannot be read, or names a file outside its directory.
        ShardMissing: an index names a file that is not there.
        UnknownComponent: `components` has a name that the pipeline does not list.
    """
    try:
        return _resolve(given, root, variant, components, passed)
    except ShmloadError:
        raise
    except OSError as exc:  # a name too long, a directory that may not be entered
        raise SourceNotFound(given, exc.strerror or str(exc)) from exc


def _resolve(
    given: str | os.PathLike[str],
    root: Path,
    variant: str | None,
    components: Collection[str] | None,
    passed: Collection[str],
) -> Source:
    if root.is_file():
        alone = Checkpoint(
            component="", folder=root.parent, library="", class_name="", config={}, shards=(root,)
        )
        return Source(given=given, root=root, class_name="", components=(), checkpoints=(alone,))
    if not root.is_dir():
        raise SourceNotFound(given, "neither a file, a directory nor a model in the hub cache")
    if (root / "model_index.json").is_file():
        return _resolve_pipeline(given, root, variant, components, passed)
    return _resolve_component(given, root, variant)


def components_with_weights(source: Source) -> set[str]:
    """Return the components of a pipeline that have weights, in whatever format."""
    folders = ((name, source.root / name) for name in source.components)
    return {
        name
        for name, folder in folders
        if os.path.isdir(folder) and any(file.endswith(_WEIGHTS) for file in os.listdir(folder))
    }


def files_of(source: Source, components: Collection[str] | None = None) -> list[Path]:
    """Return the files that a pipeline is made of: code, weights, configurations, tokenizers.

    Args:
        source: a pipeline, resolved with the same components.
        components: of those with weights, only these; None for all.
    """
    found = [source.root / "model_index.json", *sorted(source.root.glob("*.py"))]
    left_out = components_with_weights(source) if components is not None else set()
    with_shards = {checkpoint.component for checkpoint in source.checkpoints}
    for name in sorted(set(source.components).difference(left_out.difference(components or ()))):
        folder = source.root / name
        if os.path.isdir(folder):
            names = [each for each in sorted(os.listdir(folder)) if not each.startswith(".")]
            if name in with_shards:  # beside which others may lie that nobody reads
                names = [each for each in names if not _is_of_weights(each)]
            found += (folder / each for each in names)
    shards = (shard for checkpoint in source.checkpoints for shard in checkpoint.shards)
    return [*filter(os.path.isfile, found), *shards]


def _is_of_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) or ".index." in name


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        IndexMalformed: the file is not one.
    """
    try:
        with open(open_source(path), "rb") as file:
            content = file.read(_MAX_JSON_NBYTES + 1)
        if len(content) > _MAX_JSON_NBYTES:
            raise ValueError(f"it has more than {_MAX_JSON_NBYTES} bytes")
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as exc:
        raise IndexMalformed(path, f"it cannot be read as JSON ({exc})") from exc
    if not isinstance(found, dict):
        raise IndexMalformed(path, "it is not a JSON object")
    return found


def _require_beside(name: str, index_path: Path) -> None:
    """Refuse a name in an index that leads elsewhere: it would read files that nobody named."""
    if name in ("", ".", "..") or name != os.path.basename(name):
        raise IndexMalformed(index_path, f"it names {name!r}, outside its own directory")


def _listed_components(index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, library and class of every component in a `model_index.json`."""
    for name, entry in index.items():
        is_pair = isinstance(entry, list) and len(entry) == 2
        if is_pair and not name.startswith("_") and all(isinstance(e, str) for e in entry):
            yield name, (entry[0], entry[1])
        elif is_pair and not name.startswith("_") and entry == [None, None]:
            yield name, ("", "")


def _resolve_pipeline(
    given: str | os.PathLike[str],
    root: Path,
    variant: str | None,
    components: Collection[str] | None,
    passed: Collection[str],
) -> Source:
    index_path = root / "model_index.json"
    index = read_json(index_path)
    listed = dict(_listed_components(index))
    for name in listed:
        _require_beside(name, index_path)
    for name in components or ():
        if name not in listed:
            raise UnknownComponent(name, given, listed)
    wanted = [
        name
        for name, (library, _) in listed.items()
        if library and name not in passed and (components is None or name in components)
    ]
    found = (_checkpoint(root / name, variant, name, *listed[name]) for name in wanted)
    pipeline_class = index.get("_class_name")
    return Source(
        given=given,
        root=root,
        # A list names a class in a Python file of the repository: the library must find it.
        class_name=pipeline_class if isinstance(pipeline_class, str) else "",
        components=tuple(listed),
        checkpoints=tuple(checkpoint for checkpoint in found if checkpoint),
        is_complete=all(os.path.isdir(root / name) for name in wanted)
        and (variant is None or any(_has_variant(root / name, variant) for name in wanted)),
    )


def _resolve_component(given: str | os.PathLike[str], root: Path, variant: str | None) -> Source:
    config_path = root / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    # diffusers writes its class here, transformers a list of them.
    match config:
        case {"_class_name": str(class_name)}:
            library = "diffusers"
        case {"architectures": [str(class_name), *_]}:
            library = "transformers"
        case _:
            library = class_name = ""
    checkpoint = _checkpoint(root, variant, "", library, class_name)
    if checkpoint is None:
        raise SourceNotFound(given, "a directory without model_index.json or safetensors weights")
    return Source(given=given, root=root, class_name="", components=(), checkpoints=(checkpoint,))


def _checkpoint(
    folder: Path, variant: str | None, component: str, library: str, class_name: str
) -> Checkpoint | None:
    if not os.path.isdir(folder):  # and not Path's: it raises for a name that is too long
        return None
    names = os.listdir(folder)
    base = _base_name(names) or _default_base(library)
    shards = _find_shards(folder, names, base, _applicable_variant(names, variant))
    if not shards:
        _require_weights(folder, names, base, library, class_name)
        return None
    config_path = folder / "config.json"
    return Checkpoint(
        component=component,
        folder=folder,
        library=library,
        class_name=class_name,
        config=read_json(config_path) if config_path.is_file() else {},
        shards=shards,
    )


def _base_name(names: Iterable[str]) -> str | None:
    for base in (_DIFFUSERS_BASE, _TRANSFORMERS_BASE):
        if any(name.startswith(f"{base}.") or name.startswith(f"{base}-") for name in names):
            return base
    return None


def _default_base(library: str) -> str:
    return _DIFFUSERS_BASE if library == "diffusers" else _TRANSFORMERS_BASE


def _require_weights(
    folder: Path, names: Collection[str], base: str, library: str, class_name: str
) -> None:
    """Refuse a model's directory that holds a configuration and nothing else."""
    is_model = library and "config.json" in names and not class_name.endswith(_WITHOUT_WEIGHTS)
    if is_model and all(name.endswith(".json") for name in names):
        raise ShardMissing(folder / f"{base}{_SUFFIX}", folder / "config.json")


def _applicable_variant(names: Iterable[str], variant: str | None) -> str | None:
    """Return the variant where the component has it: else its plain files are loaded.

    The test is that of diffusers (`_identify_model_variants`).
    """
    parts = (name.split(".") for name in names)
    has_variant = variant and any(len(part) > 1 and part[1].startswith(variant) for part in parts)
    return variant if has_variant else None


def _has_variant(folder: Path, variant: str) -> bool:
    return os.path.isdir(folder) and _applicable_variant(os.listdir(folder), variant) is not None


def _find_shards(
    folder: Path, names: Collection[str], base: str, variant: str | None
) -> tuple[Path, ...]:
    """Return what the libraries would load, in their order of preference."""
    single = f"{base}.{variant}{_SUFFIX}" if variant else f"{base}{_SUFFIX}"
    index = f"{base}{_INDEX}.{variant}.json" if variant else f"{base}{_INDEX}.json"
    # diffusers looks for an index first, transformers for the single file.
    order = (index, single) if base == _DIFFUSERS_BASE else (single, index)
    for name in order:
        if name in names:
            return _indexed_shards(folder / name) if name == index else (folder / name,)
    return ()


def _indexed_shards(index_path: Path) -> tuple[Path, ...]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise IndexMalformed(index_path, "it has no weight_map")
    shards = []
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise IndexMalformed(index_path, "its weight_map names something that is no file")
    for name in sorted(set(weight_map.values())):
        _require_beside(name, index_path)
        shard = index_path.parent / name
        if not os.path.exists(shard):  # nor Path's here
            raise ShardMissing(shard, index_path)
        shards.append(shard)
    return tuple(shards)
