"""JSON files that name other files: a pipeline's index, and the index of a sharded checkpoint.

Guarantee: a file that an index of shards names lies beside it, or in a folder below.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shmload._host.files import open_source
from shmload.errors import IndexMalformed, ShardMissing

_MOVE = "move its shards into its directory, and name them in it by their file names alone"

# Many times the size of the largest indexes. There must be a limit: /dev/zero has no end.
_MAX_JSON_NBYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        IndexMalformed: the file cannot be read, or is not a JSON object.
    """
    try:
        with open(open_source(path), "rb") as file:
            content = file.read(_MAX_JSON_NBYTES + 1)
        if len(content) > _MAX_JSON_NBYTES:
            raise ValueError(f"it has more than {_MAX_JSON_NBYTES} bytes")
        found = json.loads(content)
    except (OSError, ValueError, RecursionError) as exc:
        raise _malformed(path, f"it cannot be read as JSON ({exc})") from exc
    if not isinstance(found, dict):
        raise _malformed(path, "it is not a JSON object")
    return found


def listed_components(index: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, library and class of every component in a `model_index.json`.

    Library and class are empty for a component that the index sets to null.
    """
    for name, entry in index.items():
        is_pair = isinstance(entry, list) and len(entry) == 2
        if is_pair and not name.startswith("_") and all(isinstance(e, str) for e in entry):
            yield name, (entry[0], entry[1])
        elif is_pair and not name.startswith("_") and entry == [None, None]:
            yield name, ("", "")


def listed_specs(index: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and spec of every component in a `modular_model_index.json`."""
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict):
            yield name, entry[2]


def indexed_shards(index_path: Path) -> tuple[Path, ...]:
    """Return the shard files that an index names: each once, sorted by name; perhaps none.

    Raises:
        IndexMalformed: it cannot be read, has no `weight_map`, or names a file outside its
            directory.
        ShardMissing: it names a file that does not exist.
    """
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise _malformed(index_path, "it has no weight_map with names of files")
    names = sorted(set(weight_map.values()))
    for name in names:
        is_file = os.path.basename(name) not in ("", ".", "..")
        if os.path.isabs(name) or ".." in name.split("/") or not is_file:
            raise _malformed(index_path, f"it names {name!r}, outside its own directory", _MOVE)
    shards = tuple(index_path.parent / name for name in names)
    for shard in shards:
        if not os.path.exists(shard):  # Path.exists raises if the name is too long
            raise ShardMissing(
                f"{shard}, named by {index_path}, does not exist; download the checkpoint again",
                path=shard,
            )
    return shards


def renamed_index(index_path: Path, rename: Callable[[str], str]) -> bytes:
    """Return the content of a checkpoint's index, with other names of its shards."""
    index = read_json(index_path)
    index["weight_map"] = {
        tensor: os.path.join(os.path.dirname(shard), rename(os.path.basename(shard)))
        for tensor, shard in index["weight_map"].items()
    }
    return json.dumps(index).encode()


def _malformed(
    path: str | os.PathLike[str], reason: str, remedy: str = "download the checkpoint again"
) -> IndexMalformed:
    return IndexMalformed(f"{path}: {reason}; {remedy}", path=path)
