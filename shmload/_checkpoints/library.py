"""The one door from the core to the model libraries.

The core imports neither diffusers nor transformers nor torch: importing them takes 3 s. Some
questions need them. Modules of `_building` answer these, and are imported when the first is asked.

Their loading is not thread-safe: it sets torch's default dtype and replaces functions of torch for
all threads. So one thread at a time makes models, and what a load of shmload calls meanwhile is the
library's own.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Literal

from shmload._host.changes import add_lock
from shmload.errors import LibraryError

LIBRARIES = ("diffusers", "transformers")

libraries_lock = add_lock()
"""Held by the thread that makes models for shmload."""
# torch's default dtype before each block of `making` that is under way, the outermost first.
_default_dtypes: list[str] = []
# A thread that has the lock notes the default dtype within this time.
_BRIEF_S = 0.001
_is_inside: ContextVar[bool] = ContextVar("shmload_inside_a_load", default=False)


@contextlib.contextmanager
def whole_libraries() -> Iterator[None]:
    """Refuse to import or use a library whose import was cut short before, as by Ctrl-C.

    Python forgets a package whose import fails, and not the modules in it. Torch's extension cannot
    be loaded a second time: that raises odd errors, or ends the process.

    Raises:
        LibraryError: that was so before the block.
    """
    _require_whole_torch()
    yield


def _require_whole_torch() -> None:
    for name in list(sys.modules):
        parent = name.rpartition(".")[0]
        if name.startswith("torch.") and parent not in sys.modules:
            raise LibraryError(
                f"an import of {parent} ended halfway in this process, by its own error or by "
                "Ctrl-C, and cannot be repeated; restart the process (in a notebook, the kernel)"
            )


def library(module: Literal["makers", "module_trees", "rules"]) -> Any:
    """Import a module of `_building`, which answers with the help of the model libraries.

    Raises:
        LibraryError: as `whole_libraries`.
    """
    _require_whole_torch()
    return importlib.import_module(f"shmload._building.{module}")


# While they make models ---------------------------------------------------------------------------


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Let no other thread make models in the block."""
    with libraries_lock:
        _default_dtypes.append(_default_dtype_now())
        try:
            yield
        finally:
            _default_dtypes.pop()


def default_dtype() -> str:
    """Return torch's default dtype; while another thread makes models, as it was before.

    It does not wait for the end of that, which may take a minute.
    """
    while not libraries_lock.acquire(timeout=_BRIEF_S):
        noted = _default_dtypes[:1]  # in one step: the other thread may end
        if noted:
            return noted[0]
    try:
        return _default_dtype_now()
    finally:
        libraries_lock.release()


def _default_dtype_now() -> str:
    get = getattr(sys.modules.get("torch"), "get_default_dtype", None)
    return str(get()) if get else "torch.float32"  # that of a new process


def is_inside() -> bool:
    """Tell whether this thread, or this asynchronous task, is in a load."""
    return _is_inside.get()


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Mark a block as part of a load."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)
