"""The components of a modular repository: each is found where its spec points.

A spec names a repository or a file, and perhaps a subfolder, a variant and a revision. In a copy of
a repository on this machine its own files count before what the spec names, as in diffusers.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.hub import find_cached, find_model, find_source, hub_file_of
from shmload._checkpoints.indexes import listed_specs, read_json
from shmload._checkpoints.library import LIBRARIES
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.resolve import WITHOUT_WEIGHTS, subfolder_of
from shmload._checkpoints.source import Checkpoint, Source, no_component
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._checkpoints.weights import weights_in
from shmload.errors import CheckpointError, ShmloadError


def find_whole_source(wanted: Wanted) -> Source:
    """Find a source; of a modular pipeline the components too, wherever they are.

    Raises:
        SourceNotFound, CheckpointError: as `find_source`, and for a component.
        UnknownComponent: `components` has a name that the pipeline does not list.
    """
    found = find_source(wanted)
    if not found.is_modular:
        return found
    for name in wanted.components or ():
        if name not in found.components:
            raise no_component(name, wanted.source, found.components)
    by_name = {}
    for name, spec in listed_specs(read_json(found.index)):
        source = _source_of(found, spec)
        is_wanted = wanted.components is None or name in wanted.components
        if source and is_wanted and not _class_in(spec)[1].endswith(WITHOUT_WEIGHTS):
            by_name[name] = _find(name, spec, source, wanted)
    return msgspec.structs.replace(
        found,
        checkpoints=tuple(each for each in by_name.values() if each.shards),
        unread=tuple(name for name, each in by_name.items() if not each.shards),
        folders={name: each.folder for name, each in by_name.items()},
    )


def is_foreign(source: str) -> bool:
    """Tell whether a spec names a server that the user has not named, and not the hub."""
    return is_url(source) and hub_file_of(source) is None


def is_absent(source: str, subfolder: str | None, hub: Hub) -> bool:
    """Tell whether a repository on this machine lacks the folder of a component.

    Without a class in its spec, that is a component that the pipeline was saved without.

    Args:
        source: what the spec names.
        subfolder: the component's.
        hub: the hub cache and the revision.
    """
    with contextlib.suppress(ShmloadError):
        root = Path(source) if os.path.exists(source) else find_cached(source, hub)
        return root is not None and not os.path.isdir(root / (subfolder or ""))
    return False


def component_failed(name: str, source: object, cause: object) -> CheckpointError:
    """Return the error for a component that cannot be loaded from where its spec points."""
    return CheckpointError(
        f"component {name} cannot be loaded from {source}: {cause}; to do without it, name the "
        "others in `components`",
        name=name,
        source=source,
    )


def _source_of(found: Source, spec: Mapping[str, Any]) -> str:
    """Return the repository, directory or file of a component; empty if it is not loaded."""
    folder = found.root / (_text(spec, "subfolder") or "")
    if os.path.isdir(found.given) and weights_in(folder):
        return os.fspath(found.given)
    return _text(spec, "pretrained_model_name_or_path") or _text(spec, "repo") or ""


def _find(name: str, spec: Mapping[str, Any], source: str, wanted: Wanted) -> Checkpoint:
    """Return the checkpoint of a component, without shards if shmload reads none.

    Raises:
        CheckpointError: it is nowhere, or its files are damaged.
    """
    if is_foreign(source):  # the library refuses it
        return Checkpoint(component=name, folder=Path(source), shards=())
    library, class_name = _class_in(spec)
    revision = None if source == str(wanted.source) else _text(spec, "revision")
    hub = msgspec.structs.replace(wanted.hub, revision=revision)
    try:
        if is_url(source) or os.path.isfile(source):
            found = find_source(Wanted(source=source, hub=hub))
            return msgspec.structs.replace(found.checkpoints[0], component=name)
        hub = msgspec.structs.replace(hub, subfolder=_text(spec, "subfolder"))
        variant = wanted.variant or _text(spec, "variant")
        own_wanted = Wanted(source=source, variant=variant, hub=hub)
        found = find_model(own_wanted)
        if class_name:
            subfolder_of(own_wanted, found.root)  # raises if there is none
    except ShmloadError as exc:
        raise component_failed(name, source, exc) from exc
    if not found.checkpoints:
        return Checkpoint(component=name, folder=found.root / hub.folder, shards=())
    own = msgspec.structs.replace(found.checkpoints[0], component=name)
    if library in LIBRARIES and not class_name.startswith("Auto"):
        own = msgspec.structs.replace(own, library=library, class_name=class_name)
    return own


def _class_in(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Return the library and the class that a spec names; empty texts if it names none."""
    match spec.get("type_hint"):
        case [str(library), str(class_name)]:
            return library, class_name
    return "", ""


def _text(spec: Mapping[str, Any], name: str) -> str | None:
    value = spec.get(name)
    return value if isinstance(value, str) else None
