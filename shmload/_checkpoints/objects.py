"""Objects in buckets and on web servers, read through obstore.

Guarantee: what is returned are the bytes of the object that was described, or an error says why
not. Every request has a time limit. A request that fails is made again, with pauses, until the
budget for it is spent. Errors never hold credentials: obstore sends these in headers, and the query
of a URL, where a server may have put some, is cut out of messages.

The only module that imports obstore.
"""

import functools
import itertools
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from shmload._checkpoints.remote import FetchError, ObjectChanged, ObjectMissing, RemoteObject
from shmload._settings import settings
from shmload._wording import count_of
from shmload.errors import ArgumentError
from shmload.errors.sources import needing

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Of the time for a request: to find out what there is, since a name may be wrong. A single attempt
# has 30 s, and 5 s to connect: obstore's defaults, which its environment variables may change.
_ASKING = 1 / 3
_LEAST_S = 0.1


def require_readable_url(url: str) -> None:
    """Refuse a URL that cannot be read safely.

    Raises:
        ArgumentError: it has a query, or names a password, or is plain http over a network.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.password:
        raise ArgumentError(
            f"{_shown(url)!r} has a query, a fragment or a password; give the plain URL, and "
            "credentials by obstore's environment variables"
        )
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ArgumentError(f"{url} would be read without encryption; give an https URL")


def _shown(url: str) -> str:
    """Return a URL without what may be secret in it."""
    return QUERY.sub("?...", re.sub(r"(?<=://)[^/@]*@", "...@", url))


def describe(url: str, deadline: float = math.inf) -> RemoteObject:
    """Return an object's size and tag.

    Args:
        url: of the object.
        deadline: when it is no longer asked for, by `time.monotonic`; a third of
            `remote_timeout_s` limits it, too.

    Raises:
        FetchError: it cannot be asked for, or has neither ETag nor time of change.
    """
    folder, name = _split(url)
    meta = attempt(lambda: obstore().head(_store(folder), name), url, _end_of(deadline, _ASKING))
    return _described(url, meta)


def list_below(
    url: str, most: int, deadline: float = math.inf
) -> Iterator[tuple[str, RemoteObject]]:
    """Yield the path below a prefix, and the object, of all objects that a bucket has there.

    Args:
        url: of the prefix; a web server has none.
        most: how many objects at most.
        deadline: as for `describe`.

    Raises:
        FetchError: the bucket cannot be listed.
    """

    def list_all() -> list[Any]:
        pages = obstore().list(_store(url))
        return list(itertools.islice(itertools.chain.from_iterable(pages), most))

    for meta in attempt(list_all, url, _end_of(deadline, _ASKING)):
        path = str(meta["path"])
        yield path, _described(f"{url.rstrip('/')}/{path}", meta)


def fetch(wanted: RemoteObject, begin: int, end: int, deadline: float = math.inf) -> Any:
    """Return a range of an object's bytes, as a buffer.

    Blocks for at most `remote_timeout_s`, and what the last attempt takes beyond.

    Args:
        wanted: the object.
        begin: of the range, in bytes.
        end: of the range, in bytes.
        deadline: when it is no longer asked for, by `time.monotonic`.

    Raises:
        ObjectChanged: the object is another one now, or has gone.
        FetchError: it cannot be read.
    """

    def request() -> Any:
        folder, name = _split(wanted.url)
        result = obstore().get(_store(folder), name, options={"range": (begin, end)})
        try:
            _require_same(wanted, result.meta)
            return _require_whole(result.bytes(), end - begin)
        finally:
            del result  # or an error's traceback would keep the connection open

    if begin == end:  # a range has one byte at least
        return b""
    return attempt(request, wanted.url, _end_of(deadline))


async def fetch_async(wanted: RemoteObject, begin: int, end: int) -> Any:
    """Do as `fetch`, in a task: to cancel it ends the request, or the pause before the next one."""
    import asyncio  # 15 ms that all but workers spare

    if begin == end:
        return b""
    deadline = _end_of()
    attempts = Attempts(wanted.url, deadline)
    while True:
        try:
            return await asyncio.wait_for(
                _request(wanted, begin, end), max(_LEAST_S, deadline - time.monotonic())
            )
        except Exception as exc:  # most are raised again
            pause_s = attempts.pause_after(exc)
        await asyncio.sleep(pause_s)


async def _request(wanted: RemoteObject, begin: int, end: int) -> Any:
    folder, name = _split(wanted.url)
    result = await obstore().get_async(_store(folder), name, options={"range": (begin, end)})
    try:
        _require_same(wanted, result.meta)
        return _require_whole(await result.bytes_async(), end - begin)
    finally:
        del result  # as in `fetch`


def _end_of(deadline: float = math.inf, part: float = 1.0) -> float:
    return min(time.monotonic() + part * settings().remote_timeout_s, deadline)


def _require_same(wanted: RemoteObject, meta: Any) -> None:
    if wanted.tag not in _tags(meta):
        raise ObjectChanged(f"{wanted.url} was replaced")


def _require_whole(found: Any, nbytes: int) -> Any:
    if len(found) != nbytes:
        raise ConnectionError(f"{len(found)} bytes came of {nbytes}")
    return found


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
    errors = obstore().exceptions
    try:
        return make(url, retry_config={"max_retries": 0}, **options)
    except (errors.BaseError, ValueError) as exc:
        raise FetchError(reason(exc)) from exc


_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 5.0
QUERY = re.compile(r"\?[^\s\"')]*")
"""The query of a URL, in a text."""
# An answer's text follows, which may repeat what was signed.
_STATUS = re.compile(r"(status code: \d{3} [A-Za-z -]+).*")
_MOST_TEXT = 300
# Of obstore's errors: the answer was the whole object, or the server says that it knows no ranges.
_NO_RANGES = ("non-partial response", "Range request not supported")


def attempt(request: Callable[[], Any], url: str, deadline: float) -> Any:
    """Make a request again until it succeeds, cannot succeed, or its time is spent.

    Args:
        request: the request.
        url: what it is for, for messages.
        deadline: when no other attempt is made, by `time.monotonic`.

    Raises:
        FetchError: it does not succeed.
    """
    attempts = Attempts(url, deadline)
    if time.monotonic() > deadline:
        spent = "the time for the whole is spent; SHMLOAD_REMOTE_TIMEOUT_S sets it"
        raise FetchError(f"{url} was not asked for: {spent}")
    while True:
        try:
            return request()
        except Exception as exc:  # most are raised again
            pause_s = attempts.pause_after(exc)
        time.sleep(pause_s)


class Attempts:
    """Attempts at one request, for those who make them by themselves; as `attempt`."""

    def __init__(self, url: str, deadline: float) -> None:
        self._url = url
        self._deadline = deadline
        self._began_at = time.monotonic()
        self._count = 0
        self._pause_s = _FIRST_PAUSE_S

    def pause_after(self, exc: Exception) -> float:
        """Return how long to wait before the next attempt, in seconds, after one that failed.

        Raises:
            FetchError: another attempt would fail too, or the time is spent.
            Exception: what was given, if it is no error of a request.
        """
        errors = obstore().exceptions
        final = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.InvalidPathError,
            errors.NotSupportedError,
            errors.UnknownConfigurationKeyError,
        )
        if isinstance(exc, errors.NotFoundError | FileNotFoundError):
            raise ObjectMissing(f"{self._url} does not exist") from exc
        if any(text in str(exc) for text in _NO_RANGES):
            raise FetchError(
                f"the server of {self._url} gives whole objects only; use one that answers "
                "requests for ranges"
            ) from exc
        if isinstance(exc, final):
            raise FetchError(reason(exc)) from exc
        if not isinstance(exc, errors.BaseError | OSError):
            raise exc
        self._count += 1
        pause_s = self._pause_s
        if time.monotonic() + pause_s > self._deadline:
            tried = f"{count_of(self._count, 'time')} in {time.monotonic() - self._began_at:.0f} s"
            raise FetchError(
                f"{reason(exc)} (tried {tried}; SHMLOAD_REMOTE_TIMEOUT_S sets for how long)"
            ) from exc
        self._pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        # With jitter: the workers' requests fail together, and should not come back together.
        return pause_s * random.uniform(0.5, 1)


def reason(exc: Exception) -> str:
    """Write an error of obstore in a line, without what a URL may hold."""
    first = next(iter(str(exc).splitlines()), "no answer came")
    first = _STATUS.sub(r"\1", QUERY.sub("?...", first))
    return f"{type(exc).__name__.removesuffix('Error')}: {first}"[:_MOST_TEXT]


@functools.cache
def obstore() -> Any:
    """Import obstore.

    Raises:
        LibraryError: it is not installed.
    """
    with needing("obstore", "a source in a bucket", "shmload[cloud]"):
        import obstore as found
    import obstore.exceptions

    return found
