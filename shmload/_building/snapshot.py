"""A snapshot: every object that can be reached from a module, and what it held.

Globals, class dictionaries, registries, what functions keep. Compared later, it tells which of them
changed, in words that are the same in every process. What C code keeps to itself is not seen.

Some 150,000 objects are looked at each time. So how an object was reached is put in words only if
it has changed.
"""

import collections
import itertools
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building.parts import LEAVES, PLAIN, Held, Kind, children, kind_of

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
_MAX_ITEMS = 200
ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
"""What differs in each process in the words for an object."""


class _Reached(NamedTuple):
    """An object, and how it was reached."""

    value: Any
    holder: int
    """Id of the object that holds it; 0 for the globals of a module."""
    name: Any
    """Its key, number or attribute there."""
    is_key: bool = False
    """Whether it is itself a key."""


class _Known(NamedTuple):
    """An object, and what it held; that keeps all alive, so that no id is used twice."""

    how: _Reached
    kind: Kind
    held: Held


class Snapshot:
    """The state of all modules; `changes` tells what is no longer as it was, and notes it anew.

    Args:
        modules: where to begin, by name; None for all that are imported.
    """

    def __init__(self, modules: Mapping[str, object] | None = None) -> None:
        self._known: dict[int, _Known] = {}
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
        for number, (how, kind, before) in list(self._known.items()):
            if type(how.value) is not kind.kind:
                kind = kind_of(how.value)
            after = kind.read(how.value)
            if after.is_same(before):
                continue
            self._known[number] = _Known(how, kind, after)
            yield from _differences(self._path(how), before, after)
            found.extend(_reached(how.value, after))
        self._walk(found)

    def _walk(self, waiting: collections.deque[_Reached]) -> None:
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
            held = kind.read(value)
            if holder in passed or home.startswith(_TORCHS_OWN):
                passed[number] = value
            else:
                known[number] = _Known(how, kind, held)
            waiting.extend(_reached(value, held))

    def _path(self, how: _Reached) -> str:
        if isinstance(how.value, type):
            return _text(how.value)
        if not how.holder:
            return str(how.name)
        above = self._known[how.holder].how
        name = _text(how.value if how.is_key else how.name, 1)
        return self._path(above) + (f"<{name}>" if how.is_key else f"[{name}]")


def _reached(value: Any, held: Held) -> Iterator[_Reached]:
    """Yield what an object holds, other than values that hold nothing."""
    number = id(value)
    if issubclass(type(value), dict):
        for key in held.names:
            if type(key) not in LEAVES and not isinstance(key, PLAIN):
                yield _Reached(key, number, None, is_key=True)
    for name, each in zip(held.names or itertools.count(), held.values, strict=False):
        if type(each) not in LEAVES:
            yield _Reached(each, number, name)


def _differences(path: str, before: Held, after: Held) -> Iterator[str]:
    if before.names or after.names:
        old, new = (
            dict(zip(map(_Same, held.names), held.values, strict=True)) for held in (before, after)
        )
        for key in old.keys() - new.keys():
            yield f"{path}[{_text(key.value, 1)}] was removed"
        for key in new:
            if key not in old or not _is_equal(old[key], new[key]):
                yield f"{path}[{_text(key.value, 1)}] = {_text(new[key])}"
        return
    if len(before.values) == len(after.values) and all(map(_is_equal, before.values, after.values)):
        return
    lost = max(len(before.values) - len(after.values), 0)
    yield f"{path} has {len(after.values)} items, {lost} fewer: {_text(after.values[-3:])}"


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
    if isinstance(value, torch.Tensor):
        return f"{kind} of {tuple(value.shape)}, {value.dtype}"
    if depth >= _MAX_DEPTH:
        return kind
    held = children(value)
    texts = [_text(each, depth + 1) for _, each in held[:_MAX_ITEMS]]
    if isinstance(value, (set, frozenset)):
        texts.sort()
    elif not isinstance(value, (list, tuple, collections.deque)):
        names = (_text(name, depth + 1) for name, _ in held)
        texts = [f"{name}: {text}" for name, text in zip(names, texts, strict=False)]
    return f"{kind}({', '.join(texts)}) of {len(held)}"


def is_memo(change: str) -> bool:
    """Tell whether a change is what a library keeps to be quicker the next time.

    Such a memory fills when it is first needed, after a skeleton as well.
    """
    return bool(_MEMOS.search(change.partition(" = ")[0])) or change.startswith(_TORCHS_OWN)
