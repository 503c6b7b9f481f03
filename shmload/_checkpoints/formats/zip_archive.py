"""Where the members of a zip archive lie, read strictly and without a member's bytes.

The layout is that of PKWARE's APPNOTE.TXT 6.3: the end record (4.3.16), its zip64 form (4.3.14,
4.3.15), the central directory (4.3.12) and the local headers (4.3.7).
"""

import os
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA = struct.Struct("<2H")
_ZIP64_EXTRA = 1
_IN_ZIP64 = 0xFFFFFFFF
_STORED = 0
_ENCRYPTED = 1
# Of the external attributes: MS-DOS's.
_FOLDER = 0x10
# 100,000 members with names of 100 letters have 15 MB.
_MAX_DIRECTORY_NBYTES = 256 << 20


class BadArchive(Exception):
    """The archive breaks the format, or uses a part of it that is not read here."""


class CutShort(BadArchive):
    """The archive has a beginning and no end."""


class Member(msgspec.Struct, frozen=True, gc=False):
    """One stored file of an archive."""

    begin: int
    """Offset of its first byte from the start of the archive, in bytes."""
    nbytes: int


def read_members(fd: int, nbytes: int) -> dict[str, Member]:
    """Return all members of an archive, by name.

    Args:
        fd: the open file; its position is not moved.
        nbytes: its size.

    Raises:
        CutShort: it has a beginning and no end.
        BadArchive: it is damaged, encrypted or compressed, names a member twice (in letters of
            either case), or has anything behind its directory.
        OSError: it cannot be read.
    """
    begin, size, count = _find_directory(fd, nbytes)
    directory = os.pread(fd, size, begin)
    found: dict[str, Member] = {}
    lowered = set()  # torch looks members up without regard to case
    for name, offset, member_nbytes in _entries(directory, count):
        if name.lower() in lowered:
            raise BadArchive(f"it has {name!r} twice")
        lowered.add(name.lower())
        found[name] = _locate(fd, name, offset, member_nbytes, begin)
    return found


def _find_directory(fd: int, nbytes: int) -> tuple[int, int, int]:
    """Return the central directory's offset, its size in bytes, and its number of entries."""
    end = _read(fd, _END, nbytes - _END.size)
    if end[0] != b"PK\5\6":
        if _is_cut_short(fd, nbytes):
            raise CutShort("it is cut short")
        raise BadArchive("it does not end with a zip archive's directory")
    if end[1] or end[2]:
        raise BadArchive("it has several parts")
    count, size, begin = end[4:7]
    behind = nbytes - _END.size
    locator_at = behind - _END64_LOCATOR.size
    locator = _read(fd, _END64_LOCATOR, locator_at) if locator_at > 0 else (b"",)
    if locator[0] == b"PK\6\7":
        record = _read(fd, _END64, locator[2])
        if record[0] != b"PK\6\6":
            raise BadArchive("its directory is not where its end says")
        if locator[1] or locator[3] != 1 or record[4] or record[5]:
            raise BadArchive("it has several parts")
        count, size, begin = record[7:10]
        behind = locator[2]
    if size > _MAX_DIRECTORY_NBYTES or begin + size != behind or count > size // _ENTRY.size:
        raise BadArchive("its directory does not lie where its end says")
    return begin, size, count


def _is_cut_short(fd: int, nbytes: int) -> bool:
    """Tell whether an archive has no end, which a comment of 64 KiB may follow."""
    behind = _END.size + (1 << 16)
    return os.pread(fd, 4, 0) == b"PK\3\4" and b"PK\5\6" not in os.pread(
        fd, behind, max(0, nbytes - behind)
    )


def _entries(directory: bytes, count: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset of the local header, and size in bytes, of each entry."""
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > len(directory):
            raise BadArchive("its directory is cut short")
        magic, _, _, flags, method, *rest = _ENTRY.unpack_from(directory, position)
        _, _, _, packed, nbytes, *rest = rest
        name_nbytes, extra_nbytes, comment_nbytes, part, _, attributes, offset = rest
        if magic != b"PK\1\2":
            raise BadArchive("its directory is damaged")
        position += _ENTRY.size
        raw = directory[position : position + name_nbytes]
        extra = directory[position + name_nbytes : position + name_nbytes + extra_nbytes]
        position += name_nbytes + extra_nbytes + comment_nbytes
        nbytes, packed, offset = _widen(extra, nbytes, packed, offset)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            raise BadArchive("it has a member whose name is no text") from None
        if flags & _ENCRYPTED or method != _STORED or packed != nbytes:
            raise BadArchive(f"its {name!r} is compressed or encrypted")
        if part:
            raise BadArchive(f"its {name!r} is in another part")
        if attributes & _FOLDER:  # torch reads nothing of it
            raise BadArchive(f"its {name!r} is a folder")
        yield name, offset, nbytes
    if position != len(directory):
        raise BadArchive("its directory has another size than its entries")


def _widen(extra: bytes, *fields: int) -> list[int]:
    """Return sizes and offset; what does not fit 32 bits is in the zip64 field."""
    values = list(fields)
    if _IN_ZIP64 not in values:
        return values
    position = 0
    while position + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, position)
        position += _EXTRA.size
        if kind == _ZIP64_EXTRA:
            wide = extra[position : position + size]
            for index, value in enumerate(values):
                if value == _IN_ZIP64:
                    values[index] = int.from_bytes(wide[:8], "little")
                    if len(wide) < 8:
                        break
                    wide = wide[8:]
            else:
                return values
        position += size
    raise BadArchive("its directory lacks the size of a large member")


def _locate(fd: int, name: str, offset: int, nbytes: int, limit: int) -> Member:
    local = _read(fd, _LOCAL, offset)
    if local[0] != b"PK\3\4":
        raise BadArchive(f"its {name!r} is not where the directory says")
    begin = offset + _LOCAL.size + local[9] + local[10]
    if begin + nbytes > limit:
        raise BadArchive(f"its {name!r} does not lie inside the file")
    return Member(begin, nbytes)


def _read(fd: int, what: struct.Struct, offset: int) -> tuple[Any, ...]:
    raw = os.pread(fd, what.size, offset) if 0 <= offset < 1 << 62 else b""
    if len(raw) != what.size:
        raise BadArchive("it is cut short")
    return what.unpack(raw)
