"""Keys of items as numbers: 8 bytes each, however long the keys and however many there are."""

from array import array
from bisect import bisect_left

import xxhash

from shmload.errors import ArgumentError

_BUCKET_BITS = 10


def digest_key(key: str) -> int:
    """Return the number of a key: above 0 and below 2**64.

    With 3 million keys, the chance that two have the same number is 1 in 4 million.

    Raises:
        ArgumentError: the key is not text, or UTF-8 cannot encode it.
    """
    if not isinstance(key, str):
        raise ArgumentError(f"the key {key!r} is a {type(key).__name__}; give text")
    try:
        return int(xxhash.xxh3_64_intdigest(key.encode())) or 1
    except UnicodeEncodeError as exc:
        reason = f"the key {key!r} is not text that UTF-8 can encode"
        raise ArgumentError(f"{reason}; give the item another one") from exc


def plain(text: str) -> str:
    """Return text as a `str` itself: msgspec takes no subclass of it, such as numpy's."""
    return str(text) if isinstance(text, str) else text


class KeyDigests:
    """A set of such numbers, in sorted buckets: a tenth of the memory of a Python set."""

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(1 << _BUCKET_BITS)]

    def add(self, digest: int) -> bool:
        """Add a number, and return whether it is new."""
        bucket = self._buckets[digest >> (64 - _BUCKET_BITS)]
        place = bisect_left(bucket, digest)
        if place < len(bucket) and bucket[place] == digest:
            return False
        bucket.insert(place, digest)
        return True
