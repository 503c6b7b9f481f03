"""What this user's processes remember on disk, each value under a digest of what it depends on.

    CACHE/FOLDER/KEY    a digest of KEY and value, then the value in msgpack

Guarantee: what is read was written whole, for this key, and by this user or by root; all else
counts as not remembered. All of it may be deleted at any time: then it is found out anew.
"""

import contextlib
import functools
import hashlib
import os
import stat
from typing import Generic, TypeVar

import msgspec
import xxhash

from shmload._host.files import replacing
from shmload._host.private import require_own
from shmload._settings import settings
from shmload._wording import logger_of

logger = logger_of(__name__)

_T = TypeVar("_T")

# To be increased when values are written in another way.
_VERSION = 1
_DIGEST_NBYTES = 16


class Memo(Generic[_T]):
    """One remembered value.

    Args:
        folder: the name of its kind.
        kind: its type, which msgspec can encode.
        facts: what it depends on, with a version of how it is found out. Facts are the same if
            their `repr` is.

    Attributes:
        path: of its file.
    """

    def __init__(self, folder: str, kind: type[_T], facts: object) -> None:
        known = repr((_VERSION, folder, facts)).encode()
        key = hashlib.blake2b(known, digest_size=_DIGEST_NBYTES).hexdigest()
        self.path = settings().cache_dir / folder / key
        self._kind = kind

    def read(self) -> _T | None:
        """Return the value; None if it is not remembered, or could be another user's."""
        try:
            content = self._content()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            _say_once("not used", exc)
            return None
        encoded = content[_DIGEST_NBYTES:]
        try:
            if content[:_DIGEST_NBYTES] == self._digest(encoded):
                return msgspec.msgpack.decode(encoded, type=self._kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:  # another version's
            logger.info("%s cannot be read: %s", self.path, exc)
        return None

    def _content(self) -> bytes:
        """Read the file.

        Raises:
            PermissionError: another user can have written it.
            OSError: it is missing, is a link, or cannot be read.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self.path, flags), "rb") as file:
            found = os.fstat(file.fileno())
            require_own(found, self.path)
            return file.read() if stat.S_ISREG(found.st_mode) else b""

    def write(self, value: _T) -> None:
        """Remember a value; if that cannot be done, the log says why, once."""
        encoded = msgspec.msgpack.encode(value)
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with replacing(self.path, mode=0o600) as file:
                file.write(self._digest(encoded) + encoded)
        except OSError as exc:
            _say_once("not written", exc)

    def forget(self) -> None:
        """Remove the value, if it is there."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _digest(self, encoded: bytes) -> bytes:
        # With the key: where others can rename files, one key's value is not taken for another's.
        return xxhash.xxh3_128_digest(self.path.name.encode() + encoded)


def _say_once(what: str, exc: OSError) -> None:
    _say(str(settings().cache_dir), what, exc.strerror or str(exc))


@functools.cache
def _say(folder: str, what: str, why: str) -> None:
    logger.info(
        "what is remembered in %s is %s: %s; another place can be chosen with SHMLOAD_CACHE_DIR",
        folder,
        what,
        why,
    )
