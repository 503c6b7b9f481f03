"""The mirror of a source in a bucket or on a web server: a directory that looks like the source.

    CACHE/remote/ID/blobs/DIGEST             a small file, or the pointer to an object with weights
    CACHE/remote/ID/trees/KEY-DIGEST/NAME/.. links to them, by the names that the objects have

Guarantee: after `mirror` has returned, the mirror's links lead to the objects' content of that
moment, or to pointers to them. Weights are not fetched. A tree is complete and never changes, so
a reader never sees parts of two lists. A blob is named by URL, ETag and size, as a hub cache
names its blobs by their content: so an object that is replaced has another blob and other segments.

A bucket lists what it has. A server is asked by the names that a pipeline, a model or an adapter
may have.
"""

import hashlib
import os
import posixpath
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import (
    ADAPTERS,
    OF_SEGMENTS,
    format_named,
    is_of_weights,
    model_names,
)
from shmload._checkpoints.objects import (
    describe,
    fetch,
    in_parallel,
    list_below,
    require_readable_url,
)
from shmload._checkpoints.remote import (
    FetchError,
    ObjectMissing,
    RemoteObject,
    is_on_web_server,
    mirror_home,
    plain_url,
    write_pointer,
)
from shmload._checkpoints.source import INDEX
from shmload._checkpoints.wanted import Wanted
from shmload._host.collector import resumed_gc
from shmload._host.files import replacing
from shmload._host.private import is_own, open_private, require_own
from shmload._wording import format_nbytes
from shmload.errors import SourceNotFound

Found = dict[str, RemoteObject]
"""Objects by their path below a source."""

MOST_OBJECTS = 10_000
"""Objects of a source."""
# The largest tokenizers have 35 MB.
_MOST_SMALL_NBYTES = 64 << 20
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


@resumed_gc()
def mirror(wanted: Wanted) -> Path:
    """Bring the mirror of a source up to date, or take it as it is for `local_files_only`.

    Args:
        wanted: its source is the URL of a prefix in a bucket, of a folder on a web server, or of
            one file of weights.

    Returns:
        The directory, or the file.

    Raises:
        ArgumentError: the URL cannot be read safely.
        LibraryError: obstore is not installed.
        SourceNotFound: there is nothing, or it cannot be read.
    """
    given = str(wanted.source)
    require_readable_url(given)
    url = plain_url(given)
    if is_of_weights(url) and format_named(url) is not OF_SEGMENTS:
        raise SourceNotFound(
            f"{given}: only {OF_SEGMENTS.name} are read from there; download the file first"
        )
    home, name = mirror_home(url), posixpath.basename(url)
    sought = (wanted.hub.folder, wanted.variant, wanted.hub.weight_names)
    key = _digest(msgspec.json.encode(sought))[:8]
    try:
        for folder in (home.parent, home, home / "blobs", home / "trees"):
            os.close(open_private(folder, make=not wanted.hub.local_files_only))
        if wanted.hub.local_files_only:
            trees = [each for each in (home / "trees").glob(f"{key}-*") if is_own(each, 0)]
            return max(trees, key=os.path.getmtime) / name
        return _write_tree(home, key, name, find_objects(url, wanted))
    except FetchError as exc:
        raise SourceNotFound(f"{given}: {exc}") from exc
    except (OSError, ValueError) as exc:
        if wanted.hub.local_files_only:
            reason = "not in the cache, and local_files_only forbids to ask"
            raise SourceNotFound(f"{given}: {reason}") from exc
        reason = f"its mirror {home} cannot be written: {exc}; set SHMLOAD_CACHE_DIR"
        raise SourceNotFound(f"{given}: {reason}") from exc


def _write_tree(home: Path, key: str, name: str, objects: Found) -> Path:
    """Write the tree of some objects, with the blobs that are missing; return its root."""
    blobs = home / "blobs"
    links = dict(
        zip(objects, in_parallel(lambda e: _blob(blobs, e), objects.values()), strict=True)
    )
    tree = home / "trees" / f"{key}-{_digest(msgspec.json.encode(sorted(links.items())))}"
    if is_own(tree, 0):
        os.utime(tree)  # it is the last one now
    else:
        _build(tree, name, {path: blobs / blob for path, blob in links.items()})
        require_own(os.lstat(tree), tree)
    return tree / name


def _blob(blobs: Path, remote: RemoteObject) -> str:
    """Write an object's blob if it is not there; return its name."""
    name = _digest(f"{remote.url}\n{remote.tag}\n{remote.nbytes}".encode())
    path = blobs / name
    if is_own(path, remote.nbytes):
        return name
    if format_named(remote.url):
        write_pointer(path, remote)
    else:
        content = fetch(remote, 0, remote.nbytes)
        with replacing(path, mode=0o600) as file:
            file.write(content)
    return name


def _build(tree: Path, name: str, links: Mapping[str, Path]) -> None:
    """Make a tree of links; it gets its name when it is complete."""
    temporary = tree.with_name(f".{tree.name}.{os.urandom(4).hex()}")
    temporary.mkdir(mode=0o700)
    try:
        for path, target in links.items():
            link = temporary / name / path if path else temporary / name
            link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link.symlink_to(target)
        try:
            temporary.rename(tree)
        except OSError:
            if not tree.is_dir():  # else another process has made the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _digest(content: bytes) -> str:
    """Return a name of 32 digits."""
    return hashlib.sha256(content).hexdigest()[:32]


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

    ask([INDEX])
    listed = [name for name, value in _json_of(found.get(INDEX)).items() if isinstance(value, list)]
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
