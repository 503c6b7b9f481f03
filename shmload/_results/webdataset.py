"""Results files as webdataset reads them: tar files, by webdataset's own writer.

A sample for each item that has a result, in item order. Its webdataset key is the item's number as
text of eight digits: a key of webdataset ends at its first dot, and the items' keys are any text.

    __shmload__/results.json    describes the file, see `describe`; webdataset skips it
    00000007.json               {"key": the item's key}
    00000007.safetensors        the item's arrays by name, a whole safetensors file

So every dtype of safetensors reads back as it was. An array's bytes stand in the tar file as they
are. The items and the facts decide every byte.
"""

import contextlib
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec

from shmload._checkpoints.formats.safetensors import parse_header
from shmload._host.files import plain_only, replacing
from shmload._results.format import (
    AGAIN,
    Contents,
    Item,
    Path,
    Place,
    ResultsFormat,
    Stored,
    describe,
    import_library,
    read_at,
    read_description,
)
from shmload._results.safetensors import SafetensorsFile, as_safetensors
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, CheckpointError, ResultsCorrupt

_DESCRIPTION = "__shmload__/results"
# Of an array in a sample. A member of the tar file begins at a multiple of 512.
_ALIGNMENT = 64
# A tar file ends with two empty blocks or more, and fills its last record.
_END_NBYTES = 2 * tarfile.BLOCKSIZE
# The plain kind of tar file has 11 octal digits for the size of a member.
_MAX_SAMPLE_NBYTES = (8 << 30) - (1 << 20)


class WebdatasetFile(SafetensorsFile):
    """An open results file. As in a safetensors file, a place has the offset of an array."""

    def contents(self) -> Contents:
        """See `ResultsFile`."""
        with self._reading() as file:
            nbytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, nbytes - _END_NBYTES))
            if nbytes % tarfile.RECORDSIZE or file.read() != bytes(_END_NBYTES):
                raise ValueError("its end is missing")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                return _description(archive)

    def items(self) -> list[Item]:
        """See `ResultsFile`."""
        with self._reading() as file, tarfile.open(fileobj=file, mode="r:") as archive:
            contents = _description(archive)
            members = iter(archive.getmembers()[1:])
            found = []
            for number, key in enumerate(contents.keys, contents.first):
                if number in contents.errors:
                    found.append(Item(key, error=contents.errors[number]))
                    continue
                _next(members, f"{number:08}.json")
                sample = _next(members, f"{number:08}.safetensors")
                found.append(Item(key, arrays=self._places(sample)))
            if next(members, None):
                raise ValueError("it has more samples than items")
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes % tarfile.RECORDSIZE or nbytes < archive.offset + tarfile.BLOCKSIZE:
                raise ValueError("its end is missing")
        return found

    @contextlib.contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        """Open the file for `tarfile`, and raise what that says of it as `ResultsCorrupt`."""
        try:
            with open(self.path, "rb", opener=plain_only) as file:
                yield file
        except (tarfile.TarError, CheckpointError, KeyError, ValueError) as exc:
            raise ResultsCorrupt(self.path, str(exc), AGAIN) from exc

    def _places(self, member: tarfile.TarInfo) -> dict[str, Place]:
        """Return where the arrays of a sample are, in the order of their names."""
        begin = member.offset_data
        length = int.from_bytes(read_at(self._fd, self.path, begin, 8), "little")
        if 8 + length > member.size:
            raise ValueError(f"{member.name} is not a safetensors file")
        header = parse_header(bytes(read_at(self._fd, self.path, begin + 8, length)), self.path)
        end = header.tensors[-1].end if header.tensors else 0
        if header.data_offset + end != member.size:
            raise ValueError(f"{member.name} has another size than its header says")
        begin += header.data_offset
        return {
            spec.name: Place(spec.dtype, spec.shape, begin + spec.begin)
            for spec in sorted(header.tensors, key=lambda spec: spec.name)
        }


def _next(members: Iterator[tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    member = next(members, None)
    if member is None or member.name != name:
        raise ValueError(f"it has no {name} where that should be")
    return member


def _description(archive: tarfile.TarFile) -> Contents:
    first = archive.next()
    content = archive.extractfile(first) if first and first.name.startswith(_DESCRIPTION) else None
    if content is None:
        raise ValueError("it does not begin with the description of a shard")
    return read_description(msgspec.json.decode(content.read(), type=dict[str, str]))


def _write(path: Path, first: int, stored: Sequence[Stored], facts: Mapping[str, str]) -> None:
    library = import_library("webdataset", "webdataset")
    description = msgspec.json.encode(describe(first, [item for item, _ in stored], facts))
    same = {"mtime": 0, "user": "", "group": "", "mode": 0o644}
    with (
        replacing(path, durable=True) as file,
        library.TarWriter(file, encoder=False, compress=False, **same) as writer,
    ):
        writer.write({"__key__": _DESCRIPTION, "json": description})
        for number, (item, source) in enumerate(stored, first):
            if item.error is None:
                named = [(name, place, source) for name, place in (item.arrays or {}).items()]
                content = bytearray()
                for part in as_safetensors(named, {}, _ALIGNMENT):
                    content += part
                sample = {"json": msgspec.json.encode({"key": item.key}), "safetensors": content}
                writer.write({"__key__": f"{number:08}"} | sample)


def _check_item(index: int, item: Item) -> None:
    """Raise ArgumentError if an item's arrays cannot stand in a tar file."""
    nbytes = sum(place.nbytes for place in (item.arrays or {}).values())
    if nbytes > _MAX_SAMPLE_NBYTES:
        raise ArgumentError(
            f"item {index} has {format_nbytes(nbytes)} of arrays, more than a member of a tar "
            "file can have; use another format"
        )


WEBDATASET = ResultsFormat(
    name="webdataset",
    version="webdataset 1",
    suffix=".tar",
    library="webdataset",
    check_item=_check_item,
    write=_write,
    open=WebdatasetFile,
)
