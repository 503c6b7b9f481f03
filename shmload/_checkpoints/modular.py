"""The components of a modular repository: each is found where its spec points.

A spec names a repository or a file, and perhaps a subfolder, a variant and a revision. In a copy of
a repository on this machine its own files count before what the spec names, as in diffusers.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.hub import find_cached, find_model, find_source, hub_file_of
from shmload._checkpoints.indexes import listed_specs, read_json
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.resolve import WITHOUT_WEIGHTS, subfolder_of
from shmload._checkpoints.source import Checkpoint, Source, no_component
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._checkpoints.weights import weights_in
from shmload.errors import CheckpointError, ShmloadError

_LIBRARIES = ("diffusers", "transformers")


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What an index says of one component."""

    name: str
    library: str
    class_name: str
    source: str
    """A repository, a directory or a file; empty for a component that is not loaded."""
    subfolder: str | None
    variant: str | None
    revision: str | None


def find_whole_source(wanted: Wanted) -> Source:
    """Find a source; of a modular pipeline the components too, wherever they are.

    Raises:
        SourceNotFound, CheckpointError: as `find_source`; `CheckpointError` is one.
        UnknownComponent: `components` has a name that the pipeline does not list.
    """
    found = find_source(wanted)
    if not found.is_modular:
        return found
    for name in wanted.components or ():
        if name not in found.components:
            raise no_component(name, wanted.source, found.components)
    sought = [
        spec
        for spec in _specs(found)
        if spec.source and (wanted.components is None or spec.name in wanted.components)
    ]
    by_name = {spec.name: _find(spec, wanted) for spec in sought}
    return msgspec.structs.replace(
        found,
        checkpoints=tuple(each for each in by_name.values() if each.shards),
        unread=tuple(name for name, each in by_name.items() if not each.shards),
        folders={name: each.folder for name, each in by_name.items()},
        variant=wanted.variant,
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


def _specs(source: Source) -> Iterator[Spec]:
    """Yield the specs of models, as the library reads them."""
    for name, spec in listed_specs(read_json(source.index)):
        library, class_name = class_named_by(spec.get("type_hint"))
        found = Spec(
            name=name,
            library=library,
            class_name=class_name,
            source=_text(spec.get("pretrained_model_name_or_path") or spec.get("repo")) or "",
            subfolder=_text(spec.get("subfolder")),
            variant=_text(spec.get("variant")),
            revision=_text(spec.get("revision")),
        )
        is_copied = os.path.isdir(source.given) and weights_in(
            source.root / (found.subfolder or "")
        )
        if is_copied:
            found = msgspec.structs.replace(found, source=os.fspath(source.given), revision=None)
        if not class_name.endswith(WITHOUT_WEIGHTS):
            yield found


def _find(spec: Spec, wanted: Wanted) -> Checkpoint:
    """Return the checkpoint of a component, without shards if shmload reads none.

    Raises:
        CheckpointError: it is nowhere, or its files are damaged.
    """
    try:
        if is_foreign(spec.source):  # the library refuses it
            return Checkpoint(component=spec.name, folder=Path(spec.source), shards=())
        where = msgspec.structs.replace(
            wanted.hub, subfolder=spec.subfolder, revision=spec.revision
        )
        if is_url(spec.source) or os.path.isfile(spec.source):
            hub = msgspec.structs.replace(where, subfolder=None)
            found = find_source(Wanted(source=spec.source, hub=hub))
            return msgspec.structs.replace(found.checkpoints[0], component=spec.name)
        variant = wanted.variant or spec.variant
        own_wanted = Wanted(source=spec.source, variant=variant, hub=where)
        found = find_model(own_wanted)
        folder = (
            subfolder_of(own_wanted, found.root) if spec.class_name else found.root / where.folder
        )
    except ShmloadError as exc:
        raise component_failed(spec.name, spec.source, exc) from exc
    if not found.checkpoints:
        return Checkpoint(component=spec.name, folder=folder, shards=())
    own = found.checkpoints[0]
    is_named = spec.library in _LIBRARIES and not spec.class_name.startswith("Auto")
    return msgspec.structs.replace(
        own,
        component=spec.name,
        library=spec.library if is_named else own.library,
        class_name=spec.class_name if is_named else own.class_name,
    )


def class_named_by(value: Any) -> tuple[str, str]:
    """Return the library and the class that a spec names; empty texts if it names none."""
    match value:
        case [str(library), str(class_name)]:
            return library, class_name
    return "", ""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def component_failed(name: str, source: object, cause: object) -> CheckpointError:
    """Return the error for a component that cannot be loaded from where its spec points."""
    return CheckpointError(
        f"component {name} cannot be loaded from {source}: {cause}; to do without it, name the "
        "others in `components`",
        name=name,
        source=source,
    )
