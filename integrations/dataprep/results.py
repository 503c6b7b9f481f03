"""Results of a finished folder, by place or key: a data set for torch's DataLoader."""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from shmload.errors import ResultsError
from shmload.integrations.dataprep.folder import FACTS, INDEX

_OPEN_SHARDS = 64


class Results(Sequence[Any]):
    """The items that have a result, in their order; each is a dict of tensors by name.

    It reads the index when it is made, and of an access the bytes of that item. It pickles as its
    path. Shards of other formats than safetensors are read by their own libraries; of such a folder
    this has the keys and errors.

    Args:
        folder: of a job that has ended.

    Attributes:
        keys: of the items that have a result, in their order.
        errors: why the others have none, by key.

    Raises:
        ResultsError: there is no index; the job has not ended.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.errors: dict[str, str] = {}
        self._shards: dict[str, str] = {}
        try:
            self._format = json.loads((self.folder / FACTS).read_text())["format"]
            with (self.folder / INDEX).open() as lines:
                for line in map(json.loads, lines):
                    if "error" in line:
                        self.errors[line["key"]] = line["error"]
                    else:
                        self._shards[line["key"]] = line["shard"]
        except FileNotFoundError as exc:
            raise ResultsError(
                f"{self.folder} has no index of results; run the job that writes it to its end",
                folder=str(self.folder),
            ) from exc
        self.keys = list(self._shards)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, item: Any) -> Any:
        """Return the tensors of an item by name, on the CPU, each in memory of its own.

        Args:
            item: its key, or its place among those that have a result; or a slice of places.

        Raises:
            KeyError: no item has that key, or it failed.
            IndexError: there is no such place.
            ResultsError: its shard is gone or damaged, or the folder has another format than
                safetensors.
        """
        if isinstance(item, slice):
            return [self[key] for key in self.keys[item]]
        key = item if isinstance(item, str) else self.keys[item]
        if key in self.errors:
            raise KeyError(f"{key!r} failed: {self.errors[key]}")
        path = self.folder / f"{self._shards[key]}.safetensors"
        if self._format != "safetensors":
            raise ResultsError(
                f"{self.folder} has the format {self._format}; read its shards with that library, "
                "as docs/dataprep.md shows",
                folder=str(self.folder),
            )
        try:
            shard, names = _opened(path, path.stat().st_mtime_ns)
            return {name.rpartition("/")[2]: shard.get_tensor(name) for name in names.get(key, ())}
        except Exception as exc:
            raise ResultsError(
                f"{path} cannot be read: {exc}; run the job again: it does what is missing",
                folder=str(self.folder),
            ) from exc

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)


@lru_cache(maxsize=_OPEN_SHARDS)
def _opened(path: Path, version: int) -> tuple[Any, dict[str, list[str]]]:
    """Open a shard; return it, and the names of its tensors by key."""
    from safetensors import safe_open

    shard: Any = safe_open(path, "pt")
    names: dict[str, list[str]] = {}
    for name in list(shard.keys()):
        names.setdefault(name.rpartition("/")[0], []).append(name)
    return shard, names
