"""Objects in buckets and on web servers, read through obstore; the only module that imports it.

Guarantee: what is returned are the bytes of the object that was described, or an error says why
not. Every request has a time limit. A request that fails is made again, with pauses, until the
budget for it is spent. Errors never hold credentials: obstore sends these in headers, and the query
of a URL, where a server may have put some, is cut out of messages.
"""

import asyncio
import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from shmload._checkpoints.remote import FetchError, ObjectChanged, ObjectMissing, RemoteObject
from shmload.errors import ArgumentError, LibraryMissing

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# For all attempts at one request together: for a range, and to find out what there is. A single one
# has 30 s, and 5 s to connect: obstore's defaults, which its environment variables may change.
_BUDGET_S = 120.0
_ASKING_BUDGET_S = 20.0
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 5.0
_QUERY = re.compile(r"\?[^\s\"')]*")
# An answer's text follows, which may repeat what was signed.
_STATUS = re.compile(r"(status code: \d{3} [A-Za-z -]+).*")
_MOST_TEXT = 300
# Of obstore's error.
_NO_RANGES = "non-partial response"


def require_readable_url(url: str) -> None:
    """Refuse a URL that cannot be read safely.

    Raises:
        ArgumentError: it has a query, or names a password, or is plain http over a network.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.password:
        raise ArgumentError(
            f"{_QUERY.sub('?...', url)!r} has a query, a fragment or a password; give the plain "
            "URL, and credentials by obstore's environment variables"
        )
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ArgumentError(f"{url} would be read without encryption; give an https URL")


def describe(url: str) -> RemoteObject:
    """Return an object's size and tag.

    Raises:
        FetchError: it cannot be asked for, or has neither ETag nor time of change.
    """
    folder, name = _split(url)
    meta = _attempt(lambda: _obstore().head(_store(folder), name), url, _ASKING_BUDGET_S)
    return _described(url, meta)


def list_below(url: str, most: int) -> Iterator[tuple[str, RemoteObject]]:
    """Yield the path below a prefix, and the object, of all objects that a bucket has there.

    Args:
        url: of the prefix; a web server has none.
        most: how many objects at most.

    Raises:
        FetchError: the bucket cannot be listed.
    """

    def list_all() -> list[Any]:
        pages = _obstore().list(_store(url))
        return list(itertools.islice(itertools.chain.from_iterable(pages), most))

    for meta in _attempt(list_all, url, _ASKING_BUDGET_S):
        path = str(meta["path"])
        yield path, _described(f"{url.rstrip('/')}/{path}", meta)


def fetch(wanted: RemoteObject, begin: int, end: int) -> Any:
    """Return a range of an object's bytes, as a buffer; blocks for at most two minutes.

    Args:
        wanted: the object.
        begin: of the range, in bytes.
        end: of the range, in bytes.

    Raises:
        ObjectChanged: the object is another one now, or has gone.
        FetchError: it cannot be read.
    """

    def request() -> Any:
        folder, name = _split(wanted.url)
        result = _obstore().get(_store(folder), name, options={"range": (begin, end)})
        _require_same(wanted, result.meta)
        return _require_whole(result.bytes(), end - begin)

    if begin == end:  # a range has one byte at least
        return b""
    return _attempt(request, wanted.url, _BUDGET_S)


async def fetch_async(wanted: RemoteObject, begin: int, end: int) -> Any:
    """Do as `fetch`, in a task: to cancel it ends the request, or the pause before the next one."""
    if begin == end:
        return b""
    attempts = _Attempts(wanted.url, _BUDGET_S)
    folder, name = _split(wanted.url)
    while True:
        try:
            result = await _obstore().get_async(
                _store(folder), name, options={"range": (begin, end)}
            )
            _require_same(wanted, result.meta)
            return _require_whole(await result.bytes_async(), end - begin)
        except Exception as exc:  # most are raised again
            pause_s = attempts.pause_after(exc)
        await asyncio.sleep(pause_s)


def _require_same(wanted: RemoteObject, meta: Any) -> None:
    if wanted.tag not in _tags(meta):
        raise ObjectChanged(f"{wanted.url} was replaced")


def _require_whole(found: Any, nbytes: int) -> Any:
    if len(found) != nbytes:
        raise ConnectionError(f"{len(found)} bytes came of {nbytes}")
    return found


def _attempt(request: Callable[[], Any], url: str, budget_s: float) -> Any:
    """Make a request again until it succeeds, cannot succeed, or its budget is spent."""
    attempts = _Attempts(url, budget_s)
    while True:
        try:
            return request()
        except Exception as exc:  # most are raised again
            pause_s = attempts.pause_after(exc)
        time.sleep(pause_s)


class _Attempts:
    """Attempts at one request, which end with its budget."""

    def __init__(self, url: str, budget_s: float) -> None:
        self._url = url
        self._deadline = time.monotonic() + budget_s
        self._pause_s = _FIRST_PAUSE_S

    def pause_after(self, exc: Exception) -> float:
        """Return how long to wait before the next attempt, in seconds, after one that failed.

        Raises:
            FetchError: another attempt would fail too, or the budget is spent.
            Exception: what was given, if it is no error of a request.
        """
        errors = _obstore().exceptions
        final = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.InvalidPathError,
            errors.NotSupportedError,
            errors.UnknownConfigurationKeyError,
        )
        if isinstance(exc, errors.NotFoundError | FileNotFoundError):
            raise ObjectMissing(f"{self._url} does not exist") from exc
        if isinstance(exc, final):
            raise FetchError(_reason(exc)) from exc
        if not isinstance(exc, errors.BaseError | OSError):
            raise exc
        if _NO_RANGES in str(exc):
            raise FetchError(f"the server of {self._url} gives whole objects only") from exc
        pause_s = self._pause_s
        if time.monotonic() + pause_s > self._deadline:
            raise FetchError(_reason(exc)) from exc
        self._pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        # With jitter: the workers' requests fail together, and should not come back together.
        return pause_s * random.uniform(0.5, 1)


def _reason(exc: Exception) -> str:
    """Write an error of obstore in a line, without what a URL may hold."""
    first = next(iter(str(exc).splitlines()), "")
    first = _STATUS.sub(r"\1", _QUERY.sub("?...", first))
    return f"{type(exc).__name__.removesuffix('Error')}: {first}"[:_MOST_TEXT]


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


def _split(url: str) -> tuple[str, str]:
    """Return the URL of an object's folder, and its name."""
    folder, _, name = url.rpartition("/")
    return folder, name


@functools.lru_cache(maxsize=64)
def _store(url: str) -> Any:
    """Return what reads below a URL; it finds its credentials in the environment."""
    from obstore.store import from_url

    make: Any = from_url  # its overloads name every option of every store
    require_readable_url(url)
    is_plain = urlsplit(url).scheme == "http"
    options = {"client_options": {"allow_http": True}} if is_plain else {}
    errors = _obstore().exceptions
    try:
        return make(url, retry_config={"max_retries": 0}, **options)
    except (errors.BaseError, ValueError) as exc:
        raise FetchError(_reason(exc)) from exc


@functools.cache
def _obstore() -> Any:
    """Import obstore.

    Raises:
        LibraryMissing: it is not installed.
    """
    try:
        import obstore
        import obstore.exceptions
    except ImportError as exc:
        raise LibraryMissing("a source in a bucket", ["shmload[cloud]"]) from exc
    return obstore
