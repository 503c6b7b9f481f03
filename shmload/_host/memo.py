"""What this user's processes remember on disk, each value under a digest of what it depends on.

    CACHE/FOLDER/KEY    a digest of KEY and value, then the value in msgpack

Guarantee: what is read was written whole and for this key, and no other user could have written it;
all else counts as not remembered. All of it may be deleted at any time: then it is found out anew.
"""

import contextlib
import functools
import hashlib
import os
from typing import Generic, TypeVar

import msgspec
import xxhash

from shmload._host.files import replacing
from shmload._host.owned import KEY, open_folder, read_own
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
        most: values that are kept of this kind; what was written least recently goes.
    """

    def __init__(self, folder: str, kind: type[_T], facts: object, *, most: int = 4096) -> None:
        known = repr((_VERSION, folder, facts)).encode()
        self.key = hashlib.blake2b(known, digest_size=_DIGEST_NBYTES).hexdigest()
        """The name of its file."""
        self.folder = settings().cache_dir / folder
        self._kind = kind
        self._most = most

    def read(self) -> _T | None:
        """Return the value; None if it is not remembered, or could be another user's."""
        try:
            with open_folder(self.folder) as folder:
                content = read_own(self.key, folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            _say_once("not used", exc)
            return None
        encoded = content[_DIGEST_NBYTES:]
        if content[:_DIGEST_NBYTES] != self._digest(encoded):
            logger.info("%s/%s is damaged", self.folder.name, self.key)
            return None
        try:
            return msgspec.msgpack.decode(encoded, type=self._kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:  # another version's
            logger.info("%s/%s cannot be read: %s", self.folder.name, self.key, exc)
            return None

    def write(self, value: _T) -> bool:
        """Remember a value; return whether that could be done. If not, the log says why, once."""
        encoded = msgspec.msgpack.encode(value)
        try:
            with open_folder(self.folder, make=True) as folder:
                with replacing(f"/proc/self/fd/{folder.fd}/{self.key}", mode=0o600) as file:
                    file.write(self._digest(encoded) + encoded)
                self._remove_old(folder.fd)
        except OSError as exc:
            _say_once("not written", exc)
            return False
        return True

    def forget(self) -> None:
        """Remove the value, if it is there."""
        with contextlib.suppress(OSError), open_folder(self.folder) as folder:
            os.unlink(self.key, dir_fd=folder.fd)

    def _digest(self, encoded: bytes) -> bytes:
        # With the key: a file that another user could once rename is not taken for another's.
        return xxhash.xxh3_128_digest(self.key.encode() + encoded)

    def _remove_old(self, folder: int) -> None:
        keys = [each for each in os.listdir(folder) if KEY.fullmatch(each)]
        if len(keys) <= self._most:
            return
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            keys.sort(key=lambda key: os.stat(key, dir_fd=folder).st_mtime_ns)
            for key in keys[: -self._most]:
                os.unlink(key, dir_fd=folder)


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
