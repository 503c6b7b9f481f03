"""What a folder on a web server has, found out by asking for each name.

Such a server has no list. So the names are those that a pipeline, a model or an adapter may have.

Guarantee: no more than `MOST_OBJECTS` names are asked for, and none after the deadline.
"""

import posixpath
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from shmload._checkpoints.formats import known
from shmload._checkpoints.formats.known import ADAPTERS, model_names
from shmload._checkpoints.header import Format
from shmload._checkpoints.objects import describe, fetch
from shmload._checkpoints.remote import (
    MOST_OBJECTS,
    MOST_SMALL_NBYTES,
    REQUESTS,
    FetchError,
    Found,
    ObjectMissing,
    RemoteObject,
)
from shmload._checkpoints.wanted import Wanted
from shmload.errors import IndexMalformed

_INDEX = "model_index.json"
_SMALL = (
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "scheduler_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

_T = TypeVar("_T")


class _ShardIndex(msgspec.Struct):
    """An index of a sharded checkpoint."""

    weight_map: dict[str, str]


def is_below(path: str) -> bool:
    """Tell whether an object's path stays below its source in a file system."""
    parts = path.split("/")
    return not {"", ".", ".."}.intersection(parts) and "\0" not in path


def probe(url: str, wanted: Wanted, deadline: float) -> Found:
    """Ask a web server for the files that are wanted of a source.

    Args:
        url: of the folder.
        wanted: what is wanted of it.
        deadline: when no more is asked for, by `time.monotonic`.

    Raises:
        FetchError: the server does not answer in time, or there are too many names.
        IndexMalformed: an index breaks its format.
    """
    asking = _Asking(url, deadline)
    asking.ask([_INDEX])
    folders = [wanted.hub.folder] if wanted.hub.folder else ["", *asking.components()]
    names = [*_SMALL, *_weights(wanted.variant, is_read=True), *wanted.hub.weight_names]
    asking.ask(posixpath.join(folder, name) for folder in folders for name in names)
    asking.ask_for_shards()
    # That there are others is asked for where there are none of those, for a useful error.
    has_weights = {
        posixpath.dirname(path)
        for path in asking.found
        if any(each.suffixes[0] in path for each in _formats(is_read=True))
    }
    others = _weights(wanted.variant, is_read=False)
    asking.ask(
        posixpath.join(folder, name)
        for folder in folders
        if folder not in has_weights and f"{folder}/config.json".lstrip("/") in asking.found
        for name in others
    )
    return asking.found


def _formats(*, is_read: bool) -> list[Format]:
    return [
        each
        for each in known.FORMATS
        if each.base_names and (each in known.READ_REMOTELY) == is_read
    ]


def _weights(variant: str | None, *, is_read: bool) -> list[str]:
    """Return what weights of models and adapters are called, and indexes of some.

    Args:
        variant: names of this variant, too.
        is_read: in the formats that are read from a server, or in the others.
    """
    names = []
    for each in _formats(is_read=is_read):
        suffix = each.suffixes[0]
        names += [f"{base}{suffix}" for base in ADAPTERS]
        for base in each.base_names.values():
            for wanted in {None, variant}:
                names += model_names(base, suffix, wanted)
    return names


class _Asking:
    """Questions to one server, and what it has by their answers."""

    def __init__(self, url: str, deadline: float) -> None:
        self.found: Found = {}
        self._url = url
        self._deadline = deadline
        self._asked: set[str] = set()

    def ask(self, paths: Collection[str] | Iterator[str]) -> None:
        """Ask for files that were not asked for yet; leave out names outside the folder."""
        fresh = sorted({each for each in paths if is_below(each)} - self._asked)
        self._asked.update(fresh)
        if len(self._asked) > MOST_OBJECTS:
            raise FetchError(f"its indexes name more than {MOST_OBJECTS} files")
        with ThreadPoolExecutor(REQUESTS) as pool:
            for path, each in zip(fresh, pool.map(self._describe, fresh), strict=True):
                if each:
                    self.found[path] = each

    def components(self) -> list[str]:
        """Return the folders that the pipeline's index names; none without one."""
        if _INDEX not in self.found:
            return []
        listed = self._read(_INDEX, dict[str, Any])
        return [name for name, value in listed.items() if isinstance(value, list)]

    def ask_for_shards(self) -> None:
        """Ask for the files that the indexes of checkpoints name."""
        ends = [f"{each.suffixes[0]}.index." for each in _formats(is_read=True)]
        indexes = [path for path in self.found if any(end in path for end in ends)]
        self.ask(
            posixpath.join(posixpath.dirname(path), shard)
            for path in indexes
            for shard in self._read(path, _ShardIndex).weight_map.values()
        )

    def _describe(self, path: str) -> RemoteObject | None:
        try:
            return describe(f"{self._url}/{path}", self._deadline)
        except ObjectMissing:
            return None

    def _read(self, path: str, kind: type[_T]) -> _T:
        wanted = self.found[path]
        if wanted.nbytes > MOST_SMALL_NBYTES:
            raise IndexMalformed(wanted.url, f"it has more than {MOST_SMALL_NBYTES} bytes")
        content = fetch(wanted, 0, wanted.nbytes, self._deadline)
        try:
            return msgspec.json.decode(bytes(content), type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IndexMalformed(wanted.url, f"it cannot be read as JSON ({exc})") from exc
