"""The journal of an unfinished results file: a record for each item, in order of arrival.

    record    size of the head (4 bytes, little-endian), size of the body (8 bytes), digest, head,
              body; the digest is XXH3-128 of all but itself
    head      the item's number and the `Item`, as msgpack; offsets count from the body's begin
    body      the arrays' bytes, one after the other

An item that is overtaken by one behind it has a second record before its own, a note of its key:
if the run is killed between the two, the next one still knows which item has this number.

A record survives kill -9 of the process once `append` has returned: the kernel has it. One that was
cut off, or lost a byte with the machine's power, does not have its digest: it and all behind it are
removed when the journal is next opened.
"""

import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from shmload._checkpoints.dtypes import NBITS
from shmload._results.format import Item, Path, Place, read_at
from shmload.errors import ArgumentError

Buffer = bytes | bytearray | memoryview

_SIZES = struct.Struct("<IQ")
_DIGEST_NBYTES = 16
_PREFIX_NBYTES = _SIZES.size + _DIGEST_NBYTES
_BLOCK_NBYTES = 1 << 20
# The limit of shmload's reader of safetensors files.
_MAX_RANK = 64

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, Item])


class Array(NamedTuple):
    """One array of a result."""

    dtype: str
    """Safetensors name, such as `BF16`."""
    shape: tuple[int, ...]
    content: Buffer
    """Its bytes, C-contiguous and little-endian, in any object with a buffer."""


def flat(given: Array, what: str) -> Buffer:
    """Return an array's bytes as a flat buffer.

    Args:
        given: the array.
        what: names it in the error.

    Raises:
        ArgumentError: its dtype is unknown, or it has not as many bytes as that and its shape say.
    """
    nbits = NBITS.get(given.dtype)
    if nbits is None:
        raise ArgumentError(f"{what}: unknown dtype {given.dtype!r}")
    for size in given.shape:
        nbits *= size
    view = memoryview(given.content)
    is_shape = min(given.shape, default=0) >= 0 and len(given.shape) <= _MAX_RANK
    if not is_shape or nbits != 8 * view.nbytes or not view.c_contiguous:
        raise ArgumentError(
            f"{what}: {given.dtype} of shape {list(given.shape)} does not have the {view.nbytes} "
            "bytes that were given, or they are not in a row"
        )
    return view.cast("B") if view.nbytes else b""


class Journal:
    """A journal on disk. It is opened when needed; `release` closes it until then.

    Args:
        path: made if it does not exist.

    Raises:
        OSError: it cannot be opened, read or cut.
    """

    def __init__(self, path: Path) -> None:
        self.items: dict[int, Item] = {}
        """The items that have a result or an error here, by number."""
        self._path = path
        self._fd = -1
        self._end = 0
        try:
            for index, item, end in read_records(self._open()):
                self._note(index, item)
                self._end = end
            if os.fstat(self._fd).st_size > self._end:
                os.ftruncate(self._fd, self._end)
        except BaseException:
            self.release()
            raise

    def append(self, index: int, item: Item, contents: Sequence[Buffer]) -> None:
        """Write a record; an error leaves no part of it.

        Args:
            index: the item's number.
            item: offsets of its arrays count from the first one's begin.
            contents: the arrays' bytes.

        Raises:
            OSError: it cannot be written.
        """
        head = _ENCODER.encode((index, item))
        sizes = _SIZES.pack(len(head), sum(map(len, contents)))
        digest = xxhash.xxh3_128(sizes + head)
        for content in contents:
            digest.update(content)
        fd, end = self._open(), self._end
        try:
            for buffer in (sizes + digest.digest() + head, *contents):
                view = memoryview(buffer)
                while view:
                    done = os.pwrite(fd, view, end)
                    view, end = view[done:], end + done
        except OSError:
            # The next record would overwrite it; this only frees the room.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, self._end)
            raise
        self._note(index, _moved(item, self._end + _PREFIX_NBYTES + len(head)))
        self._end = end

    def read(self, place: Place) -> bytearray:
        """See `Source`."""
        return read_at(self._open(), self._path, place.offset, place.nbytes)

    def release(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open(self) -> int:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        return self._fd

    def _note(self, index: int, item: Item) -> None:
        if not item.is_begun:
            self.items[index] = item


def read_records(fd: int) -> Iterator[tuple[int, Item, int]]:
    """Yield each whole record of a journal: number, item, and the offset behind the record.

    A process may write to it meanwhile.

    Raises:
        OSError: it cannot be read.
    """
    begin, nbytes = 0, os.fstat(fd).st_size
    while begin + _PREFIX_NBYTES <= nbytes:
        prefix = os.pread(fd, _PREFIX_NBYTES, begin)
        head_nbytes, body_nbytes = _SIZES.unpack_from(prefix)
        head, body = begin + _PREFIX_NBYTES, begin + _PREFIX_NBYTES + head_nbytes
        end = body + body_nbytes
        if end > nbytes:
            return
        digest = xxhash.xxh3_128(prefix[: _SIZES.size])
        for offset in range(head, end, _BLOCK_NBYTES):
            digest.update(os.pread(fd, min(_BLOCK_NBYTES, end - offset), offset))
        if digest.digest() != prefix[_SIZES.size :]:
            return
        index, item = _DECODER.decode(os.pread(fd, head_nbytes, head))
        yield index, _moved(item, body), end
        begin = end


def _moved(item: Item, offset: int) -> Item:
    """Return an item whose arrays' offsets count from the begin of the file."""
    if not item.arrays:
        return item
    arrays = {
        name: Place(place.dtype, place.shape, offset + place.offset)
        for name, place in item.arrays.items()
    }
    return msgspec.structs.replace(item, arrays=arrays)
