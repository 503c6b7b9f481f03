"""Effects: what a piece of code leaves in this process beside what it returns.

A `Snapshot` notes every object that can be reached from a module: globals, class dictionaries,
registries, what functions keep. Compared later, it tells which of them changed, in words that are
the same in every process. Random states, the environment, modes of torch, messages, and what was
done to files are noted beside it.

Not seen is what C code keeps to itself, other than what is asked for here.
"""

import atexit
import collections
import functools
import importlib
import itertools
import logging
import operator
import os
import random
import re
import signal
import sys
import threading
import types
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

import msgspec
import numpy as np
import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(Ellipsis), torch.dtype)
# What holds nothing that a program could register in, or changes by itself.
_CLOSED = (
    types.CodeType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.FrameType,
    types.TracebackType,
    functools._lru_cache_wrapper,
    re.Pattern,
    np.ndarray,
    np.generic,
    weakref.ReferenceType,
    threading.Thread,
)
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
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that read only, or that any code causes.
_READING = (
    "builtins.id",
    "code.__new__",
    "compile",
    "ctypes.",
    "exec",
    "fcntl.",
    "gc.",
    "glob.",
    "import",
    "marshal.",
    "mmap.",
    "object.__",
    "os.listdir",
    "os.scandir",
    "os.walk",
    "pickle.",
    "resource.",
    "socket.gethostname",
    "sys._getframe",
    "sys.setprofile",
    "sys.excepthook",
    "sys.unraisablehook",
    "tempfile.",
    "time.",
)
_MEMOS = re.compile(r"_cached?(_|\b|')|cache_|__slotnames__|__dynamo_disable|__warningregistry__")
_MAX_DEPTH = 6
_DETAILED = ("diffusers", "transformers")
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")


class Message(msgspec.Struct, frozen=True, order=True):
    """A log record or a warning, without its time."""

    logger: str
    """Of a record; empty for a warning."""
    level: int
    text: str
    file: str
    line: int
    function: str = ""
    category: str = ""
    """Of a warning: its class."""

    @property
    def levelno(self) -> int:
        """The level, as log records call it."""
        return self.level


class Effects(msgspec.Struct, frozen=True):
    """What some code left."""

    changes: tuple[str, ...]
    """One line each, sorted."""
    messages: tuple[Message, ...]
    """Sorted: the libraries load components in an order that differs in each process."""


class Snapshot:
    """The state of all modules; `changes` tells what is no longer as it was, and notes it anew.

    Args:
        modules: where to begin, by name; None for all that are imported.
    """

    def __init__(self, modules: Mapping[str, object] | None = None) -> None:
        # By id: the object, its content then, and how it is reached. The content keeps all alive.
        self._known: dict[int, tuple[Any, list[Any], str]] = {}
        self._values = _values()
        waiting: collections.deque[tuple[str, Any]] = collections.deque()
        for name, module in list((sys.modules if modules is None else modules).items()):
            if isinstance(module, types.ModuleType) and name.partition(".")[0] not in _PRIVATE:
                waiting.append((name, vars(module)))
        self._walk(waiting)

    def changes(self) -> Iterator[str]:
        """Yield a line for each change since the snapshot or the last call."""
        now = _values()
        for name, value in now.items():
            if value != self._values[name]:
                yield f"{name} was changed: {zlib.crc32(_ADDRESS.sub('', repr(value)).encode()):x}"
        self._values = now
        found: collections.deque[tuple[str, Any]] = collections.deque()
        for key, (known, before, path) in list(self._known.items()):
            after = _content(known)
            if len(after) == len(before) and all(map(operator.is_, after, before)):
                continue
            self._known[key] = (known, after, path)
            yield from _differences(path, known, before, after)
            found.extend(_children(known, path))
        self._walk(found)

    def _walk(self, waiting: collections.deque[tuple[str, Any]]) -> None:
        known = self._known
        while waiting:
            path, value = waiting.popleft()
            if id(value) in known or not _is_open(value):
                continue
            known[id(value)] = (value, _content(value), path)
            waiting.extend(_children(value, path))


def _is_open(value: Any) -> bool:
    if isinstance(value, (*_PLAIN, *_CLOSED, types.ModuleType)):
        return False
    if isinstance(value, type):
        return str(value.__module__).partition(".")[0] not in _PRIVATE
    return not str(type(value).__module__).startswith(("shmload", "_thread"))


def _content(value: Any) -> list[Any]:
    """Return what an object holds, as a list of objects to compare by identity."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, (list, tuple, collections.deque)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=id)
    if isinstance(value, type):
        held = type.__dict__["__dict__"].__get__(value)
        return [*held.keys(), *held.values()]
    return [each for _, each in _attributes(value)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return name and value of what an object holds that is neither a container nor a class."""
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        inner = [
            (f"<{name}>", _cell(c))
            for name, c in zip(value.__code__.co_freevars, cells, strict=False)
        ]
        own = [(".code", value.__code__), (".defaults", value.__defaults__)]
        return [*own, (".kwdefaults", value.__kwdefaults__), (".dict", value.__dict__), *inner]
    if isinstance(value, (classmethod, staticmethod)):
        return [(".function", value.__func__)]
    if isinstance(value, types.MethodType):
        return [(".function", value.__func__), (".self", value.__self__)]
    if isinstance(value, property):
        return [(".get", value.fget), (".set", value.fset), (".del", value.fdel)]
    if isinstance(value, types.MappingProxyType):
        return []
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, torch.Tensor):
        return [(".version", _version(value))]
    if isinstance(value, logging.Logger):  # but for its cache of levels
        return [(f".{name}", each) for name, each in vars(value).items() if name != "_cache"]
    if isinstance(value, itertools.count):
        return [(".next", sys.intern(repr(value)))]
    found: list[tuple[str, Any]] = []
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError, RuntimeError):
        attributes = None
    if isinstance(attributes, dict):
        found.append((".", attributes))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            slot = kind.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found.append((f".{name}", slot.__get__(value)))
                except AttributeError:
                    continue
    return found


def _children(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in dict.items(value):
            if not isinstance(key, _PLAIN):
                yield f"{path}<{_text(key, 1)}>", key
            yield f"{path}[{_text(key, 1)}]", each
    elif isinstance(value, type):
        held = type.__dict__["__dict__"].__get__(value)
        for name, each in held.items():
            yield f"{value.__module__}.{value.__qualname__}.{name}", each
    elif isinstance(value, (list, tuple, collections.deque, set, frozenset)):
        for number, each in enumerate(value):
            yield f"{path}[{number}]", each
    else:
        for name, each in _attributes(value):
            yield f"{path}{name}", each


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
    lost = len(before) - len(after)
    yield f"{path} has {len(after)} items, {max(lost, 0)} fewer: {_text(after[-3:])}"


class _Same:
    """A key of a dict: plain ones by value, others by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = value if isinstance(value, _PLAIN) else id(value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and bool(self._key == other._key)


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _text(value: Any, depth: int = 0) -> str:
    """Describe a value in words that are the same in every process."""
    if isinstance(value, _PLAIN):
        return _ADDRESS.sub("0x", repr(value)[:400])
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(value, '__module__', '')}.{name}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth >= _MAX_DEPTH or isinstance(value, _CLOSED):
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
    held = ", ".join(f"{k}{_text(v, depth + 1)}" for k, v in _attributes(value))
    return f"{kind}({held})"


def is_memo(change: str) -> bool:
    """Tell whether a change is what a library keeps to be quicker the next time.

    Such a memory fills when it is first needed, after a skeleton as well. Torch's private modules
    keep what they need to compile.
    """
    return bool(_MEMOS.search(change.partition(" = ")[0])) or change.startswith("torch._")


# States beside the modules ------------------------------------------------------------------------


def _values() -> dict[str, object]:
    """Return what no module's dictionary shows, by name."""
    global_numpy = np.random.get_state(legacy=False)
    return {
        "random's state": random.getstate(),
        "numpy's random state": repr(global_numpy),
        "torch's random state": bytes(torch.get_rng_state().numpy().tobytes()),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "the path": tuple(sys.path),
        "the umask": _umask(),
        "the number of functions to call at exit": atexit._ncallbacks(),
        "the handlers of signals": tuple(signal.getsignal(n) for n in signal.valid_signals()),
        "the threads": sorted(thread.name for thread in threading.enumerate()),
        "the filters of warnings": tuple(warnings.filters),
        "the recursion limit": sys.getrecursionlimit(),
        "the hook of tracing": (sys.gettrace(), threading.gettrace()),
        "what sys keeps": (sys.excepthook, sys.displayhook, sys.stdout, sys.stderr, sys.stdin),
        "the level of logging": logging.root.manager.disable,
        "a mode of torch": torch_modes(),
        "the number of torch's threads": torch.get_num_threads(),
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def torch_modes() -> tuple[object, ...]:
    """Return the modes of torch that a program may set and that C code keeps."""
    return (
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        *(len(held) for name, held in sorted(_hooks().items())),
        torch.__future__.get_overwrite_module_params_on_conversion(),
        torch.__future__.get_swap_module_params_on_conversion(),
    )


def _hooks() -> dict[str, dict[Any, Any]]:
    """Return torch's hooks for all modules, by the names of their tables."""
    from torch.nn.modules import module

    held = vars(module).items()
    return {name: each for name, each in held if name[:8] == "_global_" and isinstance(each, dict)}


# Watching -----------------------------------------------------------------------------------------


class Watch:
    """Notes the messages and the deeds of this process: one for its whole life.

    Args:
        is_own: tells whether a path is the judge's own, which no load of a program touches.
    """

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._deeds: list[str] = []
        self._records: list[logging.LogRecord] = []
        self._messages: list[Message | logging.LogRecord] = []
        self._is_on = False
        make_record = logging.getLogRecordFactory()

        def note_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make_record(*args, **kwargs)
            if self._is_on and not record.name.startswith("shmload"):
                self._messages.append(record)
            return record

        def note_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if self._is_on:
                kind = f"{category.__module__}.{category.__qualname__}"
                said = Message("", logging.WARNING, str(message), filename, lineno, category=kind)
                self._messages.append(said)

        logging.setLogRecordFactory(note_record)
        # The model libraries say much on a lower level; `hears_details` is asked of that.
        logging.root.setLevel(logging.DEBUG)
        for name in _DETAILED:
            logging.getLogger(name).setLevel(logging.WARNING)
        warnings.simplefilter("always")
        warnings.showwarning = note_warning
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on or event.startswith(_READING):
            return
        if event == "open":
            flags = args[2]
            if not isinstance(flags, int) or not flags & _FLAGS:
                return
        texts = [os.fsdecode(each) for each in args if isinstance(each, (str, bytes, os.PathLike))]
        if not any(map(self._is_own, texts)):
            self._deeds.append(f"{event} {' '.join(texts)}")

    def during(self, function: Callable[[], object], snapshot: Snapshot) -> Effects:
        """Call a function; return what it left."""
        self._deeds.clear()
        self._messages.clear()
        self._is_on = True
        try:
            function()
        finally:
            self._is_on = False
        # A level below that of any handler hides a record.
        heard = (each for each in self._messages if each.levelno >= 0)
        messages = tuple(sorted(map(_message, heard)))
        self._messages.clear()
        changes = sorted({*snapshot.changes(), *self._deeds})
        return Effects(tuple(changes), messages)


def _message(said: Message | logging.LogRecord) -> Message:
    if isinstance(said, Message):
        return said
    return Message(
        said.name,
        said.levelno,
        said.getMessage(),
        said.pathname,
        said.lineno,
        said.funcName or "",
    )


def hears_details() -> bool:
    """Tell whether this process hears what the model libraries say below a warning."""
    return any(logging.getLogger(name).isEnabledFor(logging.INFO) for name in _DETAILED)


def say(messages: Iterable[Message]) -> None:
    """Repeat messages, to those that this process has chosen to hear."""
    for message in messages:
        if message.category:
            _warn(message)
            continue
        logger = logging.getLogger(message.logger)
        if logger.isEnabledFor(message.level):
            record = logger.makeRecord(
                message.logger,
                message.level,
                message.file,
                message.line,
                message.text,
                (),
                None,
                message.function,
            )
            logger.handle(record)


def _warn(message: Message) -> None:
    """Give a warning as its code would: the filters count, and whether it was given before."""
    home, _, name = message.category.rpartition(".")
    category = getattr(importlib.import_module(home), name)
    module = next(
        (
            each
            for each in list(sys.modules.values())
            if getattr(each, "__file__", None) == message.file
        ),
        None,
    )
    registry = vars(module).setdefault("__warningregistry__", {}) if module else None
    warnings.warn_explicit(
        message.text,
        category,
        message.file,
        message.line,
        module.__name__ if module else None,
        registry,
    )
