"""The mirror of a source in a bucket or on a web server: a directory that looks like the source.

    CACHE/remote/ID/blobs/DIGEST            a small file, or the pointer to an object with weights
    CACHE/remote/ID/trees/DIGEST/NAME/...   links to them, by the names that the objects have
    CACHE/remote/ID/last-KEY                a link to the tree that was made last for some key

Guarantee: after `mirror` has returned, the mirror's links lead to the objects' content of that
moment, or to pointers to them. Weights are not fetched. It takes five times `remote_timeout_s` at
most, and what a single request takes beyond. A tree is complete and never changes, so who reads it
never sees parts of two lists. A blob is named by URL, ETag and size, as a hub cache names its blobs
by their content: so an object that is replaced has another blob and other segments. What no list
has had for a day is removed.
"""

import contextlib
import hashlib
import os
import posixpath
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import msgspec

from shmload._checkpoints.formats.known import (
    READ_REMOTELY,
    format_named,
    format_names,
    is_of_weights,
)
from shmload._checkpoints.objects import describe, fetch, list_below, require_readable_url
from shmload._checkpoints.remote import (
    FRONT,
    MOST_OBJECTS,
    MOST_SMALL_NBYTES,
    REQUESTS,
    FetchError,
    Found,
    RemoteObject,
    is_on_web_server,
    mirror_home,
    plain_url,
    write_pointer,
)
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.web_server import is_below, probe
from shmload._host.files import replacing
from shmload._host.private import is_own, open_private, require_own
from shmload._settings import settings
from shmload._wording import format_nbytes
from shmload.errors import SourceNotFound

# Times the limit for one: to ask for all objects, and to fetch the small ones.
_REQUESTS = 5
_READ = format_names(READ_REMOTELY)


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
        IndexMalformed: an index on a web server breaks its format.
    """
    given = str(wanted.source)
    require_readable_url(given)
    url = plain_url(given)
    if is_of_weights(url) and not _is_read(url):
        raise SourceNotFound(given, f"only {_READ} are read from there; download the file first")
    # A bucket's list has everything, whatever is wanted of it.
    of = wanted if is_on_web_server(url) else Wanted(source=url)
    sought = {
        "subfolder": of.hub.folder,
        "variant": of.variant,
        "weight_names": of.hub.weight_names,
    }
    key = hashlib.sha256(msgspec.json.encode(sought)).hexdigest()[:20]
    home, name = mirror_home(url), posixpath.basename(url)
    try:
        remove_foreign(home)
    except OSError as exc:
        raise SourceNotFound(
            given, f"its mirror {home} is not used: {exc}; set SHMLOAD_CACHE_DIR"
        ) from exc
    if wanted.hub.local_files_only:
        root = last_tree(home, key, name)
        if not root.exists():
            raise SourceNotFound(given, "not in the cache, and local_files_only forbids to ask")
        return root
    deadline = time.monotonic() + _REQUESTS * settings().remote_timeout_s
    try:
        objects = _find(url, wanted, deadline)
        return write_tree(home, key, name, objects, deadline)
    except FetchError as exc:
        raise SourceNotFound(given, str(exc)) from exc
    except OSError as exc:
        raise SourceNotFound(
            given, f"its mirror {home} cannot be written: {exc}; set SHMLOAD_CACHE_DIR"
        ) from exc


def _find(url: str, wanted: Wanted, deadline: float) -> Found:
    """Return the objects of a source that its mirror has.

    Raises:
        FetchError: there are none.
    """
    if _is_read(url):
        return {"": describe(url, deadline)}
    if is_on_web_server(url):
        found = probe(url, wanted, deadline)
        nothing = (
            "none of the names that diffusers, transformers and peft give to files is there; for "
            "another one give its URL, or its name as weight_name"
        )
    else:
        found = dict(list_below(url, MOST_OBJECTS + 1, deadline))
        nothing = "no object has a name that begins so"
    if len(found) > MOST_OBJECTS:
        raise FetchError(f"more than {MOST_OBJECTS} objects; give the model's own prefix")
    if not found:
        raise FetchError(nothing)
    folders = {str(folder) for path in found for folder in PurePosixPath(path).parents}
    kept = {
        path: each
        for path, each in found.items()
        # Some programs write objects for folders, too.
        if path not in folders and is_below(path) and _is_kept(path, each)
    }
    if not kept:
        raise FetchError(
            f"of its {len(found)} objects, such as {next(iter(found))!r}, none is read: only "
            f"{_READ} are, and other files of up to {format_nbytes(MOST_SMALL_NBYTES)}"
        )
    return kept


def _is_read(url: str) -> bool:
    return format_named(url) in READ_REMOTELY


def _is_kept(path: str, each: RemoteObject) -> bool:
    """Tell whether an object is in the mirror.

    Weights in formats that are not read from there are, too: as pointers, which say so when a load
    chooses them.
    """
    if format_named(path):
        return True
    return not is_of_weights(path) and each.nbytes <= MOST_SMALL_NBYTES


# Longer than any load: one that began before a list changed goes on with its tree.
_KEPT_S = 24 * 3600.0


def last_tree(home: Path, key: str, name: str) -> Path:
    """Return the root of the tree that was written last, whether there is one or not."""
    with contextlib.suppress(OSError):
        return home / "trees" / os.path.basename(os.readlink(home / f"last-{key}")) / name
    return home / "trees" / "none" / name


def remove_foreign(home: Path) -> None:
    """Remove a source's trees and blobs if other users could have written there.

    Raises:
        OSError: they cannot be removed.
    """
    try:
        for folder in (home, home / "blobs", home / "trees"):
            require_own(os.lstat(folder), folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        removed = home.with_name(f".{home.name}.{os.urandom(4).hex()}")
        home.rename(removed)  # what is another user's, only they may remove
        shutil.rmtree(removed, ignore_errors=True)


def write_tree(home: Path, key: str, name: str, objects: Found, deadline: float) -> Path:
    """Write the tree of some objects, with the blobs that are missing; fetch no weights.

    Args:
        home: the directory of the source's trees.
        key: under which `last_tree` finds it.
        name: of the root.
        objects: by their paths below the root; an empty path if the root is a file.
        deadline: when nothing more is fetched, by `time.monotonic`.

    Returns:
        The root.

    Raises:
        FetchError: an object cannot be read.
        OSError: the tree cannot be written.
    """
    blobs, trees = home / "blobs", home / "trees"
    for folder in (home.parent, home, blobs, trees):
        os.close(open_private(folder, make=True))
    with ThreadPoolExecutor(REQUESTS) as pool:
        written = pool.map(lambda each: _blob(blobs, each, deadline), objects.values())
        links = dict(zip(objects, written, strict=True))
    facts = msgspec.json.encode(sorted(links.items()))
    tree = trees / hashlib.sha256(facts).hexdigest()
    if not _touch(tree):
        _build(tree, name, {path: blobs / blob for path, blob in links.items()})
    if _lead(home / f"last-{key}", tree):
        _clean(home)
    return tree / name


def _blob(blobs: Path, wanted: RemoteObject, deadline: float) -> str:
    """Write an object's blob if it is not there; return its name."""
    facts = f"{wanted.url}\n{wanted.tag}\n{wanted.nbytes}"
    name = hashlib.sha256(facts.encode()).hexdigest()
    path = blobs / name
    if is_own(path, wanted.nbytes) and _touch(path):
        return name
    if format_named(wanted.url):
        write_pointer(path, wanted)
    else:
        content = fetch(wanted, 0, wanted.nbytes, deadline)
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


def _lead(link: Path, tree: Path) -> bool:
    """Lead a link to a tree in one step; tell whether it led elsewhere, or nowhere, before."""
    target = os.path.join(tree.parent.name, tree.name)
    with contextlib.suppress(OSError):
        before = os.readlink(link)
        if before == target:
            return False
        _touch(link.parent / before)  # its readers have a day from now
    temporary = link.with_name(f".{link.name}.{os.urandom(4).hex()}")
    temporary.symlink_to(target)
    temporary.replace(link)
    return True


# Removing -----------------------------------------------------------------------------------------


def _touch(path: Path) -> bool:
    """Have a file or directory count as new; tell whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _clean(home: Path) -> None:
    """Remove old trees that no link leads to, and old blobs that are in no tree."""
    last = {os.path.basename(os.readlink(each)) for each in home.glob("last-*")}
    for tree in (home / "trees").iterdir():
        if tree.name not in last and _is_old(tree):
            shutil.rmtree(tree, ignore_errors=True)  # another process may be at it, too
    used = {os.path.basename(target) for target in _targets_below(home / "trees")}
    for blob in (home / "blobs").iterdir():
        if blob.name.removesuffix(FRONT) not in used and _is_old(blob):
            blob.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _KEPT_S
    return False


def _targets_below(folder: Path) -> Iterator[str]:
    for each, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.readlink(os.path.join(each, name))
