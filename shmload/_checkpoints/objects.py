"""Objects in buckets and on web servers, read through obstore.

Guarantee: what is returned are the bytes of the object that was described, or an error says why
not. A request that fails is made again for `remote_timeout_s`, and no longer. Errors never hold
credentials: obstore sends these in headers, and the query of a URL, where a server may have put
some, is cut out of messages.

obstore answers by threads of its own, which a forked child lacks: there every request is refused,
as it would never end.

The only module that imports obstore.
"""

import functools
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from shmload._checkpoints.formats.safetensors import SAFETENSORS, read_front
from shmload._checkpoints.header import Format, Header
from shmload._checkpoints.remote import (
    MAGIC,
    FetchError,
    ObjectChanged,
    ObjectMissing,
    RemoteObject,
    mirrors_folder,
    pointed_object,
)
from shmload._host.files import unreadable
from shmload._host.memo import Memo
from shmload._host.private import require_own
from shmload._settings import settings
from shmload.errors import ArgumentError, ShardChanged, ShardMalformed, needing

REQUESTS = 8
"""Requests for small things that are made at a time."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_QUERY = re.compile(r"\?[^\s\"')]*")
# An answer's text follows, which may repeat what was signed.
_STATUS = re.compile(r"(status code: \d{3} [A-Za-z -]+).*")
_MOST_TEXT = 300

_T = TypeVar("_T")
_R = TypeVar("_R")

# Whether this process was forked when obstore, which starts its threads at its first request, was
# imported.
_is_without_threads = False


def _note_threads() -> None:
    global _is_without_threads
    _is_without_threads = "obstore" in sys.modules


os.register_at_fork(after_in_child=_note_threads)


def require_readable_url(url: str) -> None:
    """Refuse a URL that cannot be read safely.

    Raises:
        ArgumentError: it has a query, or names a password, or is plain http over a network.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.password:
        raise ArgumentError(
            "the URL has a query, a fragment or a password; give the plain URL, and "
            "credentials by obstore's environment variables"
        )
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ArgumentError(f"{url} would be read without encryption; give an https URL")


def describe(url: str) -> RemoteObject:
    """Return an object's size and tag.

    Raises:
        ObjectMissing: there is no such object.
        FetchError: it cannot be asked for, or has neither ETag nor time of change.
    """
    folder, _, name = url.rpartition("/")
    return _described(url, _request(url, lambda: _obstore().head(_store(folder), name)))


def list_below(url: str, most: int) -> dict[str, RemoteObject]:
    """Return the objects that a bucket has below a prefix, by the path below it.

    Args:
        url: of the prefix; a web server has none.
        most: how many objects at most.

    Raises:
        FetchError: the bucket cannot be listed.
    """

    def list_all() -> list[Any]:
        pages = _obstore().list(_store(url))
        return list(itertools.islice(itertools.chain.from_iterable(pages), most))

    listed = _request(url, list_all)
    return {each["path"]: _described(f"{url}/{each['path']}", each) for each in listed}


def fetch(remote: RemoteObject, begin: int, end: int) -> Any:
    """Return a range of an object's bytes, as a buffer.

    Args:
        remote: the object.
        begin: of the range, in bytes.
        end: of the range, in bytes.

    Raises:
        ObjectMissing, ObjectChanged: the object has gone, or is another one now.
        FetchError: it cannot be read.
    """
    folder, _, name = remote.url.rpartition("/")

    def get() -> Any:
        result = _obstore().get(_store(folder), name, options={"range": (begin, end)})
        try:
            if remote.tag not in _tags(result.meta):
                raise ObjectChanged(f"{remote.url} was replaced")
            found = result.bytes()
        finally:
            del result  # or an error's traceback would keep the connection open
        if len(found) != end - begin:
            raise FetchError(f"{len(found)} bytes of {remote.url} came of {end - begin}")
        return found

    return _request(remote.url, get) if begin < end else b""  # a range has one byte at least


def in_parallel(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Return a function's results for some items, of `REQUESTS` threads; the first error ends it.

    Raises:
        Exception: what the function raises. What was not begun by then is not asked for.
    """
    pool = ThreadPoolExecutor(REQUESTS)
    try:
        return list(pool.map(function, items))
    finally:
        pool.shutdown(cancel_futures=True)


def _described(url: str, meta: Any) -> RemoteObject:
    tags = _tags(meta)
    if not tags:
        raise FetchError(f"{url} has neither an ETag nor a time of change")
    return RemoteObject(url=url, nbytes=int(meta["size"]), tag=tags[0])


def _tags(meta: Any) -> list[str]:
    """Return what tells an object from its successors; a list may lack what an answer has."""
    found = []
    if tag := meta.get("e_tag"):
        # Azure writes it with quotes in headers, and without them in lists.
        found.append(str(tag).removeprefix("W/").strip('"'))
    changed = meta.get("last_modified")
    if isinstance(changed, datetime) and changed.timestamp():
        found.append(changed.isoformat())
    return found


def _store(url: str) -> Any:
    """Return what reads below a URL; it finds its credentials in the environment."""
    return _make_store(url, settings().remote_timeout_s)


@functools.lru_cache(maxsize=64)
def _make_store(url: str, timeout_s: float) -> Any:
    from obstore.store import from_url

    make: Any = from_url  # its overloads name every option of every store
    require_readable_url(url)
    is_plain = urlsplit(url).scheme == "http"
    options = {"client_options": {"allow_http": True}} if is_plain else {}
    # With obstore's own pauses in between, which grow.
    retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=timeout_s)}
    return make(url, retry_config=retry, **options)


def _request(url: str, request: Callable[[], _R]) -> _R:
    """Return what a request returns.

    Raises:
        ObjectMissing, FetchError: it fails.
    """
    if _is_without_threads:
        raise FetchError(
            "this process was forked from one that had used obstore, whose threads it lacks; start "
            "processes by `spawn` or `forkserver`, or load from buckets only after the fork"
        )
    errors = _obstore().exceptions
    try:
        return request()
    except (errors.NotFoundError, FileNotFoundError) as exc:
        raise ObjectMissing(f"{url} does not exist") from exc
    except (errors.BaseError, OSError, ValueError) as exc:
        # In a line, without what a URL may hold.
        first = next(iter(str(exc).splitlines()), "no answer came")
        said = _STATUS.sub(r"\1", _QUERY.sub("?...", first))[:_MOST_TEXT]
        kind = type(exc).__name__.removesuffix("Error")
        limit = "SHMLOAD_REMOTE_TIMEOUT_S sets for how long it is tried"
        raise FetchError(f"{kind}: {said} ({limit})") from exc


@functools.cache
def _obstore() -> Any:
    """Import obstore.

    Raises:
        LibraryError: it is not installed.
    """
    with needing("obstore", "a source in a bucket", "shmload[cloud]"):
        import obstore as found
    import obstore.exceptions

    return found


# The files that point to objects ------------------------------------------------------------------
#
# A pointer holds only an object's URL, size and tag. It lies in the cache, under the name of the
# weights that it stands for. So a source in a bucket looks like a directory, and only what reads
# weights has to know the difference. No library takes a pointer for weights: it does not begin like
# a file of any other format.

# One request gets the header of almost every file.
_FIRST_NBYTES = 512 << 10


def _read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read the header of the object; it is fetched once and remembered."""
    try:
        remote = pointed_object(fd)
    except msgspec.DecodeError as exc:
        raise ShardMalformed(
            f"{path} is a damaged pointer: {exc}; load its URL again", path=path
        ) from exc
    assert remote is not None
    if not remote.url.endswith(SAFETENSORS.suffixes):
        raise ShardMalformed(
            f"{remote.url}: of the files in a bucket or on a web server shmload reads "
            f"{SAFETENSORS.name}; download it first",
            path=remote.url,
        )
    real = Path(os.path.realpath(path))
    # It may have come with somebody else's model, and would use this user's credentials.
    try:
        _require_in_cache(real, fd)
    except OSError as exc:
        raise ShardMalformed(f"{path} points to an object: {exc}; give the URL", path=path) from exc
    memo = Memo("headers", bytes, (remote.url, remote.tag, remote.nbytes))
    kept = memo.read() or b""

    def read(nbytes: int, begin: int) -> bytes:
        nonlocal kept
        if begin + nbytes > len(kept):
            end = min(max(begin + nbytes, _FIRST_NBYTES), remote.nbytes)
            kept += bytes(fetch(remote, len(kept), end))
        return kept[begin : begin + nbytes]

    try:
        header = read_front(read, remote.nbytes, remote.url)
    except ObjectChanged as exc:
        raise ShardChanged(
            f"{remote.url} changed while it was read; load again when no process writes to it",
            path=remote.url,
        ) from exc
    except FetchError as exc:
        raise unreadable(remote.url, str(exc)) from exc
    memo.write(kept[: header.data_offset])
    return header


def _require_in_cache(path: Path, fd: int) -> None:
    """Refuse an open pointer that is not this user's own.

    Raises:
        OSError: it is outside the cache, was replaced, or other users can have written it.
    """
    mirrors = mirrors_folder()
    if not path.is_relative_to(os.path.realpath(mirrors)):
        raise PermissionError("it is not in shmload's cache")
    if not os.path.samestat(os.lstat(path), os.fstat(fd)):
        raise PermissionError("it was replaced")
    for each in (path, path.parent, path.parent.parent, mirrors):
        require_own(os.lstat(each), each)


POINTER = Format(
    name="pointer",
    suffixes=(),
    base_names={},
    can_be_linked=False,
    recognises=lambda head: head.startswith(MAGIC),
    read_header=_read_header,
)
