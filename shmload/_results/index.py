"""The index of a folder of results: a line for each item, in item order, that says where it is.

With it an item is read without a search, and without the header of its results file. The index is
removed before anything else in the folder changes. So it is right for as long as it is there,
unless something else than a job has changed it: a job compares it with the results files, and a
reader at least its length.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shmload._host.files import plain_only, replacing
from shmload._results.format import Item, accessing
from shmload._results.names import INDEX_NAME, digest_key, format_of

_ENCODER = msgspec.json.Encoder()
LINES = msgspec.json.Decoder(Item)


def write_index(folder: Path, files: Sequence[str]) -> None:
    """Write the index of a folder.

    Args:
        folder: of the results.
        files: names of all its results files, in their order.

    Raises:
        ResultsCorrupt: a results file is not what was written.
        ResultsInaccessible: the index cannot be written, or a results file not be read.
    """
    path = folder / INDEX_NAME
    with accessing(path), replacing(path, durable=True) as index:
        for name in files:
            with format_of(name).open(folder / name) as file:
                items = file.items()
            index.writelines(_line(item, name) for item in items)


def _line(item: Item, shard: str) -> bytes:
    if item.error is None:
        item = msgspec.structs.replace(item, shard=shard)
    return _ENCODER.encode(item) + b"\n"


def is_index_of(folder: Path, items: Iterable[tuple[str, int, bool]]) -> bool:
    """Tell whether the index of a folder has a whole line for each item, and no other line.

    Offsets, dtypes and shapes are not compared: no results file is read.

    Args:
        folder: of the results.
        items: name of the results file, digest of the key and whether it failed, in item order.

    Raises:
        ResultsInaccessible: the index cannot be read.
    """
    path = folder / INDEX_NAME
    with accessing(path), open(path, "rb", opener=plain_only) as index:
        try:
            return all(_is_line_of(*pair) for pair in zip(index, items, strict=True))
        except ValueError:  # of `zip`; msgspec's errors are among them
            return False


def _is_line_of(raw: bytes, item: tuple[str, int, bool]) -> bool:
    line = LINES.decode(raw)
    found = ("" if line.error is not None else line.shard, digest_key(line.key))
    file, digest, has_failed = item
    return raw.endswith(b"\n") and found == ("" if has_failed else file, digest)
