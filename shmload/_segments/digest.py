"""The digest of a segment: XXH3-128 of the XXH3-128 of each piece of its data.

The process that fills a piece digests it, so no byte is read twice and pieces can be filled in any
order. The digest finds damage, not forgery: a process that can write to this user's memory can also
write a matching digest.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

from shmload._checkpoints.header import Header
from shmload._segments.pieces import piece_ranges

_BLOCK_NBYTES = 1 << 20


def combine_digests(pieces: Iterable[bytes]) -> str:
    """Combine the digests of a segment's pieces into the segment's, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(pieces))


def digest_data(fd: int, header: Header) -> str:
    """Read all data of a segment, on all cores, and return its digest."""
    # Both pread and the hash release the interpreter lock, so threads suffice.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        pieces = piece_ranges(header.data_offset, header.data_nbytes)
        return combine_digests(pool.map(lambda piece: _digest(fd, *piece), pieces))


def _digest(fd: int, offset: int, nbytes: int) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK_NBYTES))
    end = offset + nbytes
    while offset < end:
        got = os.preadv(fd, [buffer[: min(_BLOCK_NBYTES, end - offset)]], offset)
        if got == 0:
            break
        digest.update(buffer[:got])
        offset += got
    return digest.digest()
