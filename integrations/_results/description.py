"""How a results file describes itself, in every format: texts by name.

They say which items the file holds, which of them failed, and what the results depend on.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shmload.errors import ArgumentError
from shmload.integrations._results.format import Contents, StoredItem
from shmload.integrations._results.journal import Head

_VERSION = "1"
# Bytes for all items' names, out of the 100 MB that a header of safetensors may have.
_NAMES_NBYTES = 80_000_000
# Header bytes besides the names: per array, and per dimension.
_ENTRY_NBYTES = 100
_SIZE_NBYTES = 20


def describe(first: int, items: Sequence[StoredItem], facts: Mapping[str, str]) -> dict[str, str]:
    """Return the description of a results file.

    Args:
        first: the number of its first item.
        items: all of them, in their order.
        facts: what the results depend on.
    """
    texts = {
        "shmload.results": _VERSION,
        "shmload.first": str(first),
        "shmload.keys": _as_json([item.key for item in items]),
        "shmload.facts": _as_json(dict(sorted(facts.items()))),
    }
    errors = {first + place: item.error for place, item in enumerate(items) if item.error}
    if errors:
        texts["shmload.errors"] = _as_json(errors)
    return texts


def read_description(texts: Mapping[str, str]) -> Contents:
    """Return which items a file with this description holds.

    Raises:
        KeyError, ValueError: it is no description.
    """
    return Contents(
        first=int(texts["shmload.first"]),
        keys=msgspec.json.decode(texts["shmload.keys"], type=list[str]),
        errors=msgspec.json.decode(texts.get("shmload.errors", "{}"), type=dict[int, str]),
    )


def check_names(head: Head, file_items: int) -> None:
    """Check that the names of an item fit into the header of its file.

    Args:
        head: of the item.
        file_items: how many items the file has.

    Raises:
        ArgumentError: they are too long, or not text that UTF-8 can encode.
    """
    try:
        # The list of keys is JSON within JSON.
        nbytes = len(msgspec.json.encode(msgspec.json.encode(head.key).decode()))
        for array in head.arrays:
            nbytes += len(msgspec.json.encode(f"{head.key}/{array.name}"))
            nbytes += _ENTRY_NBYTES + _SIZE_NBYTES * len(array.shape)
    except UnicodeEncodeError as exc:
        raise ArgumentError(
            f"the key of item {head.index}, {head.key!r}, or the name of an array is not text that "
            "UTF-8 can encode; give it another one"
        ) from exc
    if nbytes > _NAMES_NBYTES // file_items:
        raise ArgumentError(
            f"the names in item {head.index} take {nbytes} bytes, too many for a file of "
            f"{file_items} items; give shorter ones, or fewer shard_items"
        )


def _as_json(value: object) -> str:
    return msgspec.json.encode(value).decode()
