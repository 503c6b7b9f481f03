"""The journal of an unfinished results file: a record for each item, in order of arrival.

    journal   "shmload journal 1 ", the kernel's boot id padded to 36 bytes, a line feed; records
    record    size of the head (4 bytes, little-endian), size of the body (8 bytes), digest, head,
              body; the digest is XXH3-128 of both sizes and the head
    head      `Head` as msgpack, with a digest of each array
    body      the arrays' bytes, one after the other

An item that is overtaken by one behind it has a second record before its own, a note of its key:
if the run is killed between the two, the next one still knows which item has this number.

A record survives kill -9 of the process once `append` has returned: the kernel has it. A record
that was cut off is recognised by its head or its size, and is removed when the journal is next
opened. After a loss of power any byte may be missing: if the boot id is another one, the arrays
are compared with their digests first.
"""

import contextlib
import itertools
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import xxhash

from shmload._host.files import plain_only
from shmload._host.procfs import boot_id

Buffer = bytes | bytearray | memoryview

_MAGIC = "shmload journal 1"
_FIRST_NBYTES = len(_MAGIC) + 1 + 36 + 1
_SIZES = struct.Struct("<IQ")
_DIGEST_NBYTES = 16
_PREFIX_NBYTES = _SIZES.size + _DIGEST_NBYTES
_MAX_BUFFERS = 1024  # IOV_MAX
_BLOCK_NBYTES = 1 << 20


class ArrayHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a record says of one array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: bytes
    """XXH3-128 of its bytes."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a record says of one item."""

    index: int
    key: str
    error: str | None
    """Why the item failed, or None; a record with an error has no arrays."""
    arrays: tuple[ArrayHead, ...]
    is_begun: bool = False
    """It is a note: the item was begun, and had neither result nor error when one behind it was
    stored. It says the item's key alone."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Head)


class Journal:
    """A journal on disk. It is opened when needed; `release` closes it until then.

    Args:
        path: made if it does not exist.
        found: called with the offset and the head of each record that is there already.

    Raises:
        OSError: it cannot be opened, read or cut.
    """

    def __init__(
        self, path: str | os.PathLike[str], found: Callable[[int, Head], None] | None = None
    ) -> None:
        self.path = path
        self._fd: int | None = None
        self._end = 0
        try:
            self._recover(found or (lambda offset, head: None))
        except BaseException:
            self.release()
            raise

    def append(self, head: Head, contents: Sequence[Buffer]) -> int:
        """Write a record and return its offset; an error leaves no part of it.

        Args:
            head: has one array for each of the contents.
            contents: the arrays' bytes.

        Raises:
            OSError: it cannot be written.
        """
        raw = _ENCODER.encode(head)
        sizes = _SIZES.pack(len(raw), sum(map(len, contents)))
        prefix = sizes + xxhash.xxh3_128_digest(sizes + raw)
        try:
            nbytes = _write(self._open(), (prefix, raw, *contents), self._end)
        except OSError:
            # The next record would overwrite it; this only frees the room.
            with contextlib.suppress(OSError):
                os.ftruncate(self._open(), self._end)
            raise
        offset = self._end
        self._end += nbytes
        return offset

    def read(self, offset: int) -> tuple[Head, int] | None:
        """Return a record's head and its body's offset; None if there is no whole record."""
        return _read_record(self._open(), offset)

    def blocks(self, place: int, nbytes: int) -> Iterator[memoryview]:
        """Yield a range of the file from an offset, or as much as there is.

        Each block is valid until the next.
        """
        return read_blocks(self._open(), place, nbytes)

    def release(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _open(self) -> int:
        """Return the descriptor, opened again after `release`."""
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        return self._fd

    def _recover(self, found: Callable[[int, Head], None]) -> None:
        """Find the records, and cut off everything after the last whole one."""
        boot = boot_id()
        first = f"{_MAGIC} {boot:36}\n".encode()
        there = os.pread(self._open(), len(first), 0)
        self._end = len(first)
        if there.startswith(f"{_MAGIC} ".encode()) and there.endswith(b"\n"):
            is_sure = there == first and boot != ""
            while (record := self.read(self._end)) and (is_sure or self._is_whole(*record)):
                head, body = record
                found(self._end, head)
                self._end = body + sum(array.nbytes for array in head.arrays)
        if os.fstat(self._open()).st_size > self._end:
            os.ftruncate(self._open(), self._end)
        if there != first:
            _write(self._open(), (first,), 0)

    def _is_whole(self, head: Head, body: int) -> bool:
        for array in head.arrays:
            digest = xxhash.xxh3_128()
            for block in self.blocks(body, array.nbytes):
                digest.update(block)
            if digest.digest() != array.digest:
                return False
            body += array.nbytes
        return True


def read_heads(path: str | os.PathLike[str]) -> Iterator[Head]:
    """Yield what a journal says of its items; change nothing, and compare no array.

    A process may write to it meanwhile.

    Raises:
        OSError: it cannot be opened or read.
    """
    with open(path, "rb", opener=plain_only) as file:
        offset = len(file.readline(_FIRST_NBYTES))
        while record := _read_record(file.fileno(), offset):
            head, body = record
            yield head
            offset = body + sum(array.nbytes for array in head.arrays)


def _read_record(fd: int, offset: int) -> tuple[Head, int] | None:
    """Return a record's head and its body's offset; None if there is no whole record."""
    prefix = os.pread(fd, _PREFIX_NBYTES, offset)
    if len(prefix) < _PREFIX_NBYTES:
        return None
    head_nbytes, body_nbytes = _SIZES.unpack_from(prefix)
    body = offset + _PREFIX_NBYTES + head_nbytes
    if body + body_nbytes > os.fstat(fd).st_size:
        return None
    raw = os.pread(fd, head_nbytes, offset + _PREFIX_NBYTES)
    if xxhash.xxh3_128_digest(prefix[: _SIZES.size] + raw) != prefix[_SIZES.size :]:
        return None
    return _DECODER.decode(raw), body


def read_blocks(fd: int, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of a file, or as much as there is; each block is valid until the next."""
    buffer = memoryview(bytearray(min(nbytes, _BLOCK_NBYTES)))
    end = offset + nbytes
    while offset < end:
        got = os.preadv(fd, [buffer[: min(_BLOCK_NBYTES, end - offset)]], offset)
        if got == 0:
            return
        yield buffer[:got]
        offset += got


def _write(fd: int, buffers: Iterable[Buffer], offset: int) -> int:
    """Write all of the buffers, one after the other, and return their size in bytes."""
    waiting = deque(memoryview(buffer) for buffer in buffers if buffer)
    begin = offset
    while waiting:
        done = os.pwritev(fd, list(itertools.islice(waiting, _MAX_BUFFERS)), offset)
        offset += done
        while waiting and done >= len(waiting[0]):
            done -= len(waiting.popleft())
        if done:
            waiting[0] = waiting[0][done:]
    return offset - begin
