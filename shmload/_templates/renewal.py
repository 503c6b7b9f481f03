"""What modules have kept since their import, and a new process would have anew."""

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import process
from types import ModuleType
from typing import Any


def renew_seeds(modules: Mapping[str, ModuleType]) -> None:
    """Seed what draws random numbers, and draw anew what was drawn at import.

    The module `random` does that by itself in every copy of a process; `os.urandom`, `uuid.uuid4`
    and `secrets` keep nothing. CUDA's generators are made when a program first touches a GPU.

    Args:
        modules: the libraries, by name.
    """
    torch: Any = modules.get("torch")
    numpy: Any = modules.get("numpy.random")
    if torch and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    if numpy:
        numpy.seed()
    key = process.AuthenticationString(os.urandom(32))  # type: ignore[attr-defined]
    vars(process)["_current_process"]._config["authkey"] = key


def renew_places() -> None:
    """Forget directories and times of the template."""
    time.tzset()
    tempfile.tempdir = None
    vars(logging)["_startTime"] = time.time()
    with contextlib.suppress(OSError):  # the directory was removed
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


def renew_streams() -> None:
    """Open the standard streams anew, as Python does when it starts.

    They keep their objects, which libraries may hold from their imports on.
    """
    for fd, name in enumerate(("stdin", "stdout")):
        _open_again(fd, name, getattr(sys, name))
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _open_again(fd: int, name: str, stream: Any) -> None:
    """Open a standard stream; see create_stdio in CPython's pylifecycle.c.

    Args:
        fd: its descriptor.
        name: stdin or stdout.
        stream: the template's, whose encoding is that of the locale, which both share.
    """
    mode = "r" if name == "stdin" else "w"
    is_unbuffered = stream.write_through and mode == "w"
    buffering = 0 if is_unbuffered else -1
    buffer: Any = open(fd, mode + "b", buffering, closefd=False)  # noqa: SIM115 for the whole process
    (buffer if is_unbuffered else buffer.raw).name = f"<{name}>"
    stream.__init__(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=os.isatty(fd) and not is_unbuffered,
        write_through=is_unbuffered,
    )
    stream.mode = mode
