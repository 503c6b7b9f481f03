"""The mirror of a source in a bucket or on a web server: a directory that looks like the source.

Guarantee: after `mirror` has returned, the mirror's links lead to the objects' content of that
moment, or to pointers to them. Weights are not fetched. It takes five times `remote_timeout_s` at
most, and what a single request takes beyond.
"""

import hashlib
import posixpath
import time
from pathlib import Path, PurePosixPath

import msgspec

from shmload._checkpoints.formats.known import has_known_suffix, is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.objects import describe, list_below, require_readable_url
from shmload._checkpoints.remote import (
    MOST_OBJECTS,
    MOST_SMALL_NBYTES,
    FetchError,
    Found,
    RemoteObject,
    is_on_web_server,
    mirror_home,
    plain_url,
)
from shmload._checkpoints.trees import last_tree, remove_foreign, write_tree
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.web_server import Sought, is_below, probe
from shmload._settings import settings
from shmload._wording import format_nbytes
from shmload.errors import SourceNotFound

# Times the limit for one: to ask for all objects, and to fetch the small ones.
_REQUESTS = 5


def mirror(wanted: Wanted) -> Path:
    """Bring the mirror of a source up to date, or take it as it is for `local_files_only`.

    Args:
        wanted: its source is the URL of a prefix in a bucket, of a folder on a web server, or of
            one file of weights.

    Returns:
        The directory, or the file.

    Raises:
        ArgumentError: the URL cannot be read safely.
        LibraryMissing: obstore is not installed.
        SourceNotFound: there is nothing, or it cannot be read.
        IndexMalformed: an index on a web server breaks its format.
    """
    given = str(wanted.source)
    require_readable_url(given)
    url = plain_url(given)
    if is_of_weights(url) and not url.endswith(SAFETENSORS.suffixes):
        raise SourceNotFound(given, "only safetensors are read from there; download the file first")
    # A bucket's list has everything, whatever is wanted of it.
    sought = Sought.of(wanted) if is_on_web_server(url) else Sought()
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
        objects = _find(url, sought, deadline)
        return write_tree(home, key, name, objects, deadline)
    except FetchError as exc:
        raise SourceNotFound(given, str(exc)) from exc
    except OSError as exc:
        raise SourceNotFound(
            given, f"its mirror {home} cannot be written: {exc}; set SHMLOAD_CACHE_DIR"
        ) from exc


def _find(url: str, sought: Sought, deadline: float) -> Found:
    """Return the objects of a source that its mirror has.

    Raises:
        FetchError: there are none.
    """
    if url.endswith(SAFETENSORS.suffixes):
        return {"": describe(url, deadline)}
    if is_on_web_server(url):
        found = probe(url, sought, deadline)
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
            f"safetensors are, and other files of up to {format_nbytes(MOST_SMALL_NBYTES)}"
        )
    return kept


def _is_kept(path: str, each: RemoteObject) -> bool:
    """Tell whether an object is in the mirror.

    Weights in formats that are not read from there are, too: as pointers, which say so when a load
    chooses them.
    """
    if has_known_suffix(path):
        return True
    return not is_of_weights(path) and each.nbytes <= MOST_SMALL_NBYTES
