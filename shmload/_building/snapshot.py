"""A snapshot: every object that can be reached from a module, and what it held.

Globals, class dictionaries, registries, what functions keep. Compared later, it tells which of them
changed, in words that are the same in every process. What C code keeps to itself is not seen.

Some 150,000 objects are looked at each time. So how an object was reached is put in words only if
it has changed.
"""

import collections
import itertools
import operator
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building.parts import CLOSED, LEAVES, PLAIN, Kind, children, kind_of

# Modules that keep caches of what they were asked, and the machinery that looks on.
_PRIVATE = frozenset(
    {
        "__main__",
        "__mp_main__",
        "_pytest",
        "abc",
        "dis",
        "encodings",
        "gc",
        "importlib",
        "inspect",
        "linecache",
        "multiprocessing",
        "opcode",
        "pytest",
        "re",
        "shmload",
        "threading",
        "tokenize",
        "zipimport",
    }
)
# Torch's private modules keep what they need to compile: what changes in them counts as a memory.
_TORCHS_OWN = "torch._"
_MEMOS = re.compile(r"_cached?(_|\b|')|cache_|__slotnames__|__dynamo_disable|__warningregistry__")
_MAX_DEPTH = 6
ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
"""What differs in each process in the words for an object."""


class Snapshot:
    """The state of all modules; `changes` tells what is no longer as it was, and notes it anew.

    Args:
        modules: where to begin, by name; None for all that are imported.
    """

    def __init__(self, modules: Mapping[str, object] | None = None) -> None:
        # By id: the object, its kind, its content then, and how it was reached first. The content
        # keeps all alive, so that no id is used twice.
        self._known: dict[int, tuple[Any, Kind, list[Any], _Reached]] = {}
        # What was reached by torch's private modules first.
        self._passed: dict[int, Any] = {}
        waiting: collections.deque[_Reached] = collections.deque()
        for name, module in list((sys.modules if modules is None else modules).items()):
            if isinstance(module, types.ModuleType) and name.partition(".")[0] not in _PRIVATE:
                waiting.append(_Reached(vars(module), 0, name))
        self._walk(waiting)

    def changes(self) -> Iterator[str]:
        """Yield a line for each change since the snapshot or the last call."""
        found: collections.deque[_Reached] = collections.deque()
        for number, (known, kind, before, how) in list(self._known.items()):
            if type(known) is not kind.kind:
                kind = kind_of(known)
            after = kind.content(known)
            if len(after) == len(before) and all(map(operator.is_, after, before)):
                continue
            self._known[number] = (known, kind, after, how)
            yield from _differences(self._path(how), known, before, after)
            found.extend(_children(known, after))
        self._walk(found)

    def _walk(self, waiting: collections.deque["_Reached"]) -> None:
        known, passed = self._known, self._passed
        while waiting:
            how = waiting.popleft()
            value, holder, name, _ = how
            number = id(value)
            if number in known or number in passed:
                continue
            kind = kind_of(value)
            if not kind.is_open:
                continue
            home = str(value.__module__ if kind.is_class else "" if holder else name)
            if kind.is_class and home.partition(".")[0] in _PRIVATE:
                continue
            content = kind.content(value)
            if holder in passed or home.startswith(_TORCHS_OWN):
                passed[number] = value
            else:
                known[number] = (value, kind, content, how)
            waiting.extend(_children(value, content))

    def _path(self, how: "_Reached") -> str:
        if not how.holder:
            return str(how.name)
        holder, _, _, above = self._known[how.holder]
        if isinstance(holder, type):
            return f"{holder.__module__}.{holder.__qualname__}.{how.name}"
        if isinstance(holder, dict):
            text = _text(how.value if how.is_key else how.name, 1)
            return self._path(above) + (f"<{text}>" if how.is_key else f"[{text}]")
        name = f"[{how.name}]" if isinstance(how.name, int) else how.name
        return f"{self._path(above)}{name}"


class _Reached(NamedTuple):
    """An object, and how it was reached."""

    value: Any
    holder: int
    """Id of the object that holds it; 0 for the globals of a module."""
    name: Any
    """Its key, number or attribute there."""
    is_key: bool = False
    """Whether it is itself a key."""


def _children(value: Any, content: list[Any]) -> Iterator[_Reached]:
    """Yield what an object holds, other than values that hold nothing."""
    number, kind = id(value), type(value)
    if issubclass(kind, dict):
        half = len(content) // 2
        for key, each in zip(content[:half], content[half:], strict=True):
            if type(key) not in LEAVES and not isinstance(key, PLAIN):
                yield _Reached(key, number, None, is_key=True)
            if type(each) not in LEAVES:
                yield _Reached(each, number, key)
        return
    held: Iterable[tuple[Any, Any]]
    if issubclass(kind, type):
        held = zip(content[: len(content) // 2], content[len(content) // 2 :], strict=True)
    else:
        held = children(value)
    for name, each in held:
        if type(each) not in LEAVES:
            yield _Reached(each, number, name)


def _differences(path: str, known: Any, before: list[Any], after: list[Any]) -> Iterator[str]:
    if isinstance(known, (dict, type)):
        old, new = (
            dict(zip(map(_Same, half[: len(half) // 2]), half[len(half) // 2 :], strict=True))
            for half in (before, after)
        )
        where = f"{known.__module__}.{known.__qualname__}" if isinstance(known, type) else path
        for key in new.keys() - old.keys():
            yield f"{where}[{_text(key.value, 1)}] = {_text(new[key])}"
        for key in old.keys() - new.keys():
            yield f"{where}[{_text(key.value, 1)}] was removed"
        for key in old.keys() & new.keys():
            if old[key] is not new[key] and not _is_equal(old[key], new[key]):
                yield f"{where}[{_text(key.value, 1)}] = {_text(new[key])}"
        return
    if len(before) == len(after) and all(map(_is_equal, before, after)):
        return
    if isinstance(known, types.FunctionType) and before[3] is None and after[3] is not None:
        yield from _differences(f"{path}.dict", {}, [], kind_of(after[3]).content(after[3]))
        before = [*before[:3], after[3], *before[4:]]
        yield from _differences(path, known, before, after)
        return
    lost = len(before) - len(after)
    yield f"{path} has {len(after)} items, {max(lost, 0)} fewer: {_text(after[-3:])}"


class _Same:
    """A key of a dict: plain ones by value, others by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = value if isinstance(value, PLAIN) else id(value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and bool(self._key == other._key)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, PLAIN) and bool(one == other)


def _text(value: Any, depth: int = 0) -> str:
    """Describe a value in words that are the same in every process."""
    if isinstance(value, PLAIN):
        return ADDRESS.sub("0x", repr(value)[:400])
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth >= _MAX_DEPTH or isinstance(value, CLOSED):
        return kind
    if isinstance(value, dict):
        items = itertools.islice(dict.items(value), 200)
        inner = (f"{_text(k, depth + 1)}: {_text(v, depth + 1)}" for k, v in items)
        return f"{kind}{{{', '.join(inner)}}} of {len(value)}"
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        texts = [_text(each, depth + 1) for each in itertools.islice(value, 200)]
        texts = sorted(texts) if isinstance(value, (set, frozenset)) else texts
        return f"{kind}({', '.join(texts)}) of {len(value)}"
    if isinstance(value, torch.Tensor):
        return f"{kind} of {tuple(value.shape)}, {value.dtype}"
    held = ", ".join(f"{k}{_text(v, depth + 1)}" for k, v in kind_of(value).attributes(value))
    return f"{kind}({held})"


def is_memo(change: str) -> bool:
    """Tell whether a change is what a library keeps to be quicker the next time.

    Such a memory fills when it is first needed, after a skeleton as well.
    """
    return bool(_MEMOS.search(change.partition(" = ")[0])) or change.startswith(_TORCHS_OWN)
