"""What a source in a bucket or on a web server has: a bucket lists it, a server is asked by names.

The names are those that a pipeline, a model or an adapter may have.
"""

import posixpath
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import (
    ADAPTERS,
    OF_SEGMENTS,
    format_named,
    is_of_weights,
    model_names,
)
from shmload._checkpoints.objects import describe, fetch, in_parallel, list_below
from shmload._checkpoints.remote import FetchError, ObjectMissing, RemoteObject, is_on_web_server
from shmload._checkpoints.wanted import Wanted
from shmload._wording import format_nbytes

Found = dict[str, RemoteObject]
"""Objects by their path below a source."""

MOST_OBJECTS = 10_000
"""Objects of a source."""
# The largest tokenizers have 35 MB.
_MOST_SMALL_NBYTES = 64 << 20
_INDEX = "model_index.json"
_SMALL = (
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "scheduler_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def find_objects(url: str, wanted: Wanted) -> Found:
    """Return the objects of a source: the weights, and other files that are small.

    Args:
        url: of a prefix, of a server's folder, or of a file of weights, which has an empty path.
        wanted: what is wanted of it.

    Raises:
        FetchError: there are none, or too many, or the server does not answer.
    """
    if is_of_weights(url):
        return {"": describe(url)}
    found = _ask(url, wanted) if is_on_web_server(url) else list_below(url, MOST_OBJECTS + 1)
    if len(found) > MOST_OBJECTS:
        raise FetchError(f"more than {MOST_OBJECTS} objects; give the model's own prefix")
    # Some programs write objects for folders, too.
    folders = {str(folder) for path in found for folder in PurePosixPath(path).parents}
    kept = {
        path: each
        for path, each in found.items()
        if path not in folders and _is_below(path) and _is_kept(path, each)
    }
    if not kept:
        most = format_nbytes(_MOST_SMALL_NBYTES)
        raise FetchError(
            f"nothing is there that is read: neither weights in {OF_SEGMENTS.name}, by a name that "
            f"the libraries know, nor other files of up to {most}"
        )
    return kept


def _is_below(path: str) -> bool:
    """Tell whether an object's path stays below its source in a file system."""
    return not {"", ".", ".."}.intersection(path.split("/")) and "\0" not in path


def _is_kept(path: str, each: RemoteObject) -> bool:
    if format_named(path):
        return True
    return not is_of_weights(path) and each.nbytes <= _MOST_SMALL_NBYTES


def _ask(url: str, wanted: Wanted) -> Found:
    """Ask a web server, which has no list, for the files that are wanted of a folder."""
    found: Found = {}

    def ask(paths: Iterable[str]) -> None:
        asked = sorted({path for path in paths if _is_below(path)} - found.keys())
        if len(asked) > MOST_OBJECTS:
            raise FetchError(f"its indexes name more than {MOST_OBJECTS} files")
        answers = in_parallel(lambda path: _describe(f"{url}/{path}"), asked)
        found.update((path, each) for path, each in zip(asked, answers, strict=True) if each)

    ask([_INDEX])
    listed = [
        name for name, value in _json_of(found.get(_INDEX)).items() if isinstance(value, list)
    ]
    folders = [wanted.hub.folder] if wanted.hub.folder else ["", *listed]
    names = [*_SMALL, *_names_of_weights(wanted.variant), *wanted.hub.weight_names]
    ask(posixpath.join(folder, name) for folder in folders for name in names)
    for path in [each for each in found if ".index." in each]:
        shards = _json_of(found[path]).get("weight_map", {})
        names = [*shards.values()] if isinstance(shards, dict) else []
        folder = posixpath.dirname(path)
        ask(posixpath.join(folder, name) for name in names if isinstance(name, str))
    return found


def _names_of_weights(variant: str | None) -> Iterator[str]:
    """Yield what weights of models and adapters are called, and indexes of some."""
    suffix = OF_SEGMENTS.suffixes[0]
    for base in ADAPTERS:
        yield f"{base}{suffix}"
    for base in OF_SEGMENTS.base_names.values():
        for each in {None, variant}:
            yield from model_names(base, suffix, each)


def _describe(url: str) -> RemoteObject | None:
    try:
        return describe(url)
    except ObjectMissing:
        return None


def _json_of(index: RemoteObject | None) -> dict[str, Any]:
    """Return what an index says; nothing if it is damaged, which its reader finds, too."""
    if index is None or index.nbytes > _MOST_SMALL_NBYTES:
        return {}
    try:
        return msgspec.json.decode(fetch(index, 0, index.nbytes), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
