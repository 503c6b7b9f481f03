"""Requests to a server: each is made again, with pauses, until its time is spent.

The only module that imports obstore. Errors never hold credentials: obstore sends these in headers,
and the query of a URL, where a server may have put some, is cut out of messages.
"""

import functools
import random
import re
import time
from collections.abc import Callable
from typing import Any

from shmload._checkpoints.remote import FetchError, ObjectMissing
from shmload._wording import count_of
from shmload.errors.libraries import needing

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
        LibraryMissing: it is not installed.
    """
    with needing("obstore", "a source in a bucket", "shmload[cloud]"):
        import obstore as found
    import obstore.exceptions

    return found
