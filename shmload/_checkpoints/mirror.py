"""Mirrors: directories in the cache that look like a source in a bucket.

    CACHE/remote/ID/blobs/DIGEST       a small file, or the pointer to an object with weights
    CACHE/remote/ID/NAME/...           links to them, by the names that the objects have

Guarantee: after `mirror` has returned, each link leads to the object's content of that moment, or
to a pointer to it. Weights are not fetched. A blob is named by URL, ETag and size, as a hub cache
names its blobs by their content: so an object that is replaced has another blob and other segments.
"""

import contextlib
import hashlib
import os
import posixpath
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shmload._checkpoints.formats.known import is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.objects import describe, fetch, list_below, require_readable_url
from shmload._checkpoints.remote import (
    FetchError,
    ObjectMissing,
    RemoteObject,
    mirror_folder,
    write_pointer,
)
from shmload._host.files import replacing
from shmload.errors import SourceNotFound

# Configurations, tokenizers, code; the largest tokenizers have 35 MB.
_MOST_SMALL_NBYTES = 64 << 20
_MOST_OBJECTS = 10_000
_REQUESTS = 8
# A web server tells no names, so these are asked for.
_NAMES = (
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
    *(
        f"{base}{end}"
        for base in SAFETENSORS.base_names.values()
        for end in (".safetensors", ".safetensors.index.json")
    ),
)
_INDEX = "model_index.json"

Found = dict[str, RemoteObject]
"""Objects by their path below the source."""


def mirror(url: str, *, is_offline: bool) -> Path:
    """Bring the mirror of a source up to date.

    Args:
        url: of a prefix in a bucket, of a folder on a web server, or of one file of weights.
        is_offline: take the mirror as it is.

    Returns:
        The directory, or the file.

    Raises:
        ArgumentError: the URL cannot be read safely.
        LibraryMissing: obstore is not installed.
        SourceNotFound: there is nothing, or it cannot be read.
    """
    require_readable_url(url)
    is_file = url.endswith(SAFETENSORS.suffixes)
    if is_of_weights(url) and not is_file:
        raise SourceNotFound(url, "only safetensors are read from there; download the file first")
    root = mirror_folder(url)
    if is_offline:
        if not root.exists():
            raise SourceNotFound(url, "not in the cache, and local_files_only forbids to ask")
        return root
    try:
        found = {"": describe(url)} if is_file else _find(url.rstrip("/"))
        if not found:
            raise SourceNotFound(url, "no object has a name that begins so")
        _write(root, found)
    except FetchError as exc:
        raise SourceNotFound(url, str(exc)) from exc
    except OSError as exc:
        if isinstance(exc, SourceNotFound):
            raise
        raise SourceNotFound(url, f"its mirror {root} cannot be written: {exc}") from exc
    return root


# Finding ------------------------------------------------------------------------------------------


def _find(url: str) -> Found:
    """Return the objects of a source; those whose names would leave its mirror are left out."""
    if urlsplit(url).scheme in ("http", "https"):
        return _probe(url)
    listed = dict(list_below(url, _MOST_OBJECTS + 1))
    if len(listed) > _MOST_OBJECTS:
        raise FetchError(f"more than {_MOST_OBJECTS} objects; give the model's own prefix")
    return {path: each for path, each in listed.items() if _is_below(path)}


def _is_below(path: str) -> bool:
    parts = path.split("/")
    return not {"", ".", ".."}.intersection(parts) and "\0" not in path


def _probe(url: str) -> Found:
    """Ask a web server for the files that a pipeline or model may have."""
    found = _existing(url, [_INDEX])
    folders = [""]
    if _INDEX in found:
        listed = _content(found[_INDEX])
        folders += [f"{name}/" for name, value in listed.items() if isinstance(value, list)]
        folders = [each for each in folders if not each or _is_below(each[:-1])]
    found |= _existing(url, [f"{folder}{name}" for folder in folders for name in _NAMES])
    indices = [path for path in found if path.endswith(".index.json")]
    shards = {
        posixpath.join(posixpath.dirname(path), str(shard))
        for path in indices
        for shard in dict(_content(found[path]).get("weight_map", {})).values()
    }
    return found | _existing(url, sorted(filter(_is_below, shards)))


def _existing(url: str, paths: list[str]) -> Found:
    def ask(path: str) -> RemoteObject | None:
        try:
            return describe(f"{url}/{path}")
        except ObjectMissing:
            return None

    with ThreadPoolExecutor(_REQUESTS) as pool:
        asked = zip(paths, pool.map(ask, paths), strict=True)
        return {path: each for path, each in asked if each}


def _content(wanted: RemoteObject) -> Mapping[str, Any]:
    """Return the JSON object that a file holds; empty if it holds another thing."""
    try:
        found = msgspec.json.decode(bytes(fetch(wanted, 0, wanted.nbytes)))
    except msgspec.DecodeError as exc:
        raise FetchError(f"{wanted.url}: {exc}") from exc
    return found if isinstance(found, dict) else {}


# Writing ------------------------------------------------------------------------------------------


def _write(root: Path, found: Found) -> None:
    """Write the blobs that are missing, then the links; remove the links of what has gone."""
    blobs = root.parent / "blobs"
    blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {path: each for path, each in found.items() if _is_kept(path or each.url, each)}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        names = dict(
            zip(kept, pool.map(lambda each: _blob(blobs, each), kept.values()), strict=True)
        )
    for path, name in names.items():
        _link(root / path if path else root, blobs / name)
    for link in _links_below(root) if "" not in names else ():
        if os.path.relpath(link, root) not in names:
            link.unlink(missing_ok=True)


def _is_kept(path: str, each: RemoteObject) -> bool:
    if path.endswith(SAFETENSORS.suffixes):
        return True
    return not is_of_weights(path) and each.nbytes <= _MOST_SMALL_NBYTES


def _blob(blobs: Path, wanted: RemoteObject) -> str:
    """Write an object's blob if it is not there; return its name."""
    facts = f"{wanted.url}\n{wanted.tag}\n{wanted.nbytes}"
    name = hashlib.sha256(facts.encode()).hexdigest()
    path = blobs / name
    if path.exists():
        return name
    if wanted.url.endswith(SAFETENSORS.suffixes):
        write_pointer(path, wanted)
    else:
        content = fetch(wanted, 0, wanted.nbytes) if wanted.nbytes else b""
        with replacing(path, mode=0o600) as file:
            file.write(content)
    return name


def _link(path: Path, target: Path) -> None:
    """Make a link, or lead it elsewhere, in one step."""
    with contextlib.suppress(OSError):
        if os.readlink(path) == str(target):
            return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    temporary.symlink_to(target)
    temporary.replace(path)


def _links_below(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)
