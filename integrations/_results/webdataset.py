"""Results files as webdataset reads them: tar files, by webdataset's own writer.

A sample for each item that has a result, in item order. Its webdataset key is the item's number as
text of eight digits: a key of webdataset ends at its first dot, and the items' keys are any text.

    __shmload__/results.json    describes the file, see `description`; webdataset skips it
    00000007.json               {"key": the item's key}
    00000007.safetensors        the item's arrays by name, a whole safetensors file

So every dtype of safetensors reads back as it was. An array's bytes stand in the tar file as they
are. The items and the facts decide every byte.
"""

import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec

from shmload._checkpoints.formats.safetensors import parse_header
from shmload._host.files import plain_only, replacing
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, CheckpointError, ResultsCorrupt
from shmload.integrations._results.description import check_names, describe, read_description
from shmload.integrations._results.errors import AGAIN
from shmload.integrations._results.format import (
    Contents,
    Path,
    ResultsFormat,
    StoredArray,
    StoredItem,
    import_library,
)
from shmload.integrations._results.journal import Head
from shmload.integrations._results.safetensors import SafetensorsFile, as_safetensors

_DESCRIPTION = "__shmload__/results"
# Of an array in a sample. A member of the tar file begins at a multiple of 512.
_ALIGNMENT = 64
# A tar file ends with two empty blocks or more, and fills its last record.
_END_NBYTES = 2 * tarfile.BLOCKSIZE
# The plain kind of tar file has 11 octal digits for the size of a member.
_MAX_SAMPLE_NBYTES = (8 << 30) - (1 << 20)


class WebdatasetFile(SafetensorsFile):
    """An open results file. As in a safetensors file, a place is the offset of an array."""

    def items(self) -> list[StoredItem]:
        """See `ResultsFile`."""
        try:
            with open(self.path, "rb", opener=plain_only) as file:
                return list(self._items(file))
        except (tarfile.TarError, CheckpointError, KeyError, ValueError) as exc:
            raise ResultsCorrupt(self.path, str(exc), AGAIN) from exc

    def _items(self, file: BinaryIO) -> Iterator[StoredItem]:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            contents = _description(archive)
            members = iter(archive.getmembers()[1:])
            for number, key in enumerate(contents.keys, contents.first):
                error = contents.errors.get(number)
                if error is None:
                    _next(members, f"{number:08}.json")
                    arrays = tuple(self._arrays(_next(members, f"{number:08}.safetensors")))
                yield StoredItem(key, error, () if error else arrays)
            if next(members, None):
                raise ValueError("it has more samples than items")
            end, wanted = os.fstat(file.fileno()).st_size, archive.offset
            if end % tarfile.RECORDSIZE or end < wanted + tarfile.BLOCKSIZE:
                raise ValueError("its end is missing")

    def _arrays(self, member: tarfile.TarInfo) -> list[StoredArray]:
        """Return the arrays of a sample, in the order of their names."""
        begin = member.offset_data
        length = int.from_bytes(self.read(begin, 8), "little")
        if 8 + length > member.size:
            raise ValueError(f"{member.name} is not a safetensors file")
        header = parse_header(bytes(self.read(begin + 8, length)), self.path)
        end = header.tensors[-1].end if header.tensors else 0
        if header.data_offset + end != member.size:
            raise ValueError(f"{member.name} has another size than its header says")
        begin += header.data_offset
        return sorted(
            StoredArray(each.name, each.dtype, each.shape, each.nbytes, self, begin + each.begin)
            for each in header.tensors
        )


def _next(members: Iterator[tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    member = next(members, None)
    if member is None or member.name != name:
        raise ValueError(f"it has no {name} where that should be")
    return member


def _check_end(file: BinaryIO) -> None:
    """Raise ValueError if a tar file does not end as one; the members before are not looked at."""
    nbytes = file.seek(0, os.SEEK_END)
    file.seek(max(0, nbytes - _END_NBYTES))
    if nbytes % tarfile.RECORDSIZE or file.read() != bytes(_END_NBYTES):
        raise ValueError("its end is missing")


def _description(archive: tarfile.TarFile) -> Contents:
    first = archive.next()
    content = archive.extractfile(first) if first and first.name.startswith(_DESCRIPTION) else None
    if content is None:
        raise ValueError("it does not begin with the description of a shard")
    return read_description(msgspec.json.decode(content.read(), type=dict[str, str]))


def _write(path: Path, first: int, items: Sequence[StoredItem], facts: Mapping[str, str]) -> None:
    library = import_library("webdataset", "webdataset")
    description = msgspec.json.encode(describe(first, items, facts))
    same = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
    with (
        replacing(path, durable=True) as file,
        library.TarWriter(file, encoder=False, compress=False, **same) as writer,
    ):
        writer.write({"__key__": _DESCRIPTION, "json": description})
        for number, item in enumerate(items, first):
            if item.error is None:
                content = bytearray()
                for part in as_safetensors([(a.name, a) for a in item.arrays], {}, _ALIGNMENT):
                    content += part
                sample = {"json": msgspec.json.encode({"key": item.key}), "safetensors": content}
                writer.write({"__key__": f"{number:08}"} | sample)


def _read_contents(path: Path) -> Contents:
    try:
        with open(path, "rb", opener=plain_only) as file:
            _check_end(file)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                return _description(archive)
    except (tarfile.TarError, KeyError, ValueError) as exc:
        raise ResultsCorrupt(path, str(exc), AGAIN) from exc


def _check_item(head: Head, file_items: int) -> None:
    """Raise ArgumentError if an item's names or arrays cannot stand in a tar file."""
    check_names(head, file_items)
    nbytes = sum(array.nbytes for array in head.arrays)
    if nbytes > _MAX_SAMPLE_NBYTES:
        raise ArgumentError(
            f"item {head.index} has {format_nbytes(nbytes)} of arrays, more than a member of a tar "
            "file can have; use another format"
        )


WEBDATASET = ResultsFormat(
    name="webdataset",
    version="webdataset 1",
    suffix=".tar",
    library="webdataset",
    check_item=_check_item,
    write=_write,
    read_contents=_read_contents,
    open=WebdatasetFile,
)
