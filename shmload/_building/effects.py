"""Effects: what a piece of code leaves in this process beside what it returns.

What changed in the objects of modules is noted (`snapshot`), and beside it random states, the
environment, modes of torch, messages, and what was done to files. Not seen is what C code keeps to
itself, other than what is asked for here.
"""

import atexit
import importlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

import msgspec
import numpy as np
import torch

from shmload._building.parts import modules
from shmload._building.snapshot import ADDRESS, Snapshot
from shmload._building.state import LIBRARIES, modes

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


class Effects(msgspec.Struct, frozen=True):
    """What some code left."""

    changes: tuple[str, ...]
    """One line each, sorted."""
    messages: tuple[Message, ...]
    """Sorted: the libraries load components in an order that differs in each process."""


# States beside the modules ------------------------------------------------------------------------


def _values() -> dict[str, object]:
    """Return what no module's dictionary shows, by name."""
    return {
        "random's state": random.getstate(),
        "numpy's random state": repr(np.random.get_state(legacy=False)),
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
        "a mode of torch": modes(),
        "the number of torch's threads": torch.get_num_threads(),
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# Watching -----------------------------------------------------------------------------------------


class Watch:
    """Notes the messages and the deeds of this process: one for its whole life.

    Args:
        is_own: tells whether a path is the judge's own, which no load of a program touches.
    """

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._deeds: list[str] = []
        self._messages: list[Message | logging.LogRecord] = []
        self._values = _values()
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
        # The model libraries say much on a lower level, for which a skeleton is not used.
        logging.root.setLevel(logging.DEBUG)
        for name in LIBRARIES:
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

    def effects(self, build: Callable[[], object], snapshot: Snapshot) -> Effects:
        """Call a function, from random states that are the same each time; return what it left."""
        set_seeds()
        self._values = _values()
        self._deeds.clear()
        self._messages.clear()
        self._is_on = True
        try:
            build()
        finally:
            self._is_on = False
        messages = map(_message, self._messages)
        # A level below that of any handler hides a record.
        heard = tuple(sorted(each for each in messages if each.level >= 0))
        changes = sorted({*self._changed_values(), *snapshot.changes(), *self._deeds})
        return Effects(tuple(changes), heard)

    def _changed_values(self) -> Iterator[str]:
        for name, value in _values().items():
            if value != self._values[name]:
                digest = zlib.crc32(ADDRESS.sub("", repr(value)).encode())
                yield f"{name} was changed: {digest:x}"


def set_seeds() -> None:
    """Set the random states, which a fork renews."""
    random.seed(0)
    torch.default_generator.manual_seed(0)
    np.random.seed(0)


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
        (each for _, each in modules() if vars(each).get("__file__") == message.file),
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
