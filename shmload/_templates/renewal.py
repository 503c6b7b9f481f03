"""What modules have kept since their import and would not be the same in a new process."""

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_ID_DIGITS = 32


def renew_seeds(modules: Mapping[str, ModuleType]) -> None:
    """Seed what draws random numbers, and draw anew what was drawn at import.

    The module `random` does that by itself in every copy of a process; `os.urandom`, `uuid.uuid4`
    and `secrets` keep nothing. CUDA's generators are made when a program first touches a GPU.
    """
    if "torch" in modules:
        _of(modules, "torch").default_generator.seed()
    if "numpy.random" in modules:
        _of(modules, "numpy.random").seed()
    process = _of(modules, "multiprocessing.process")
    if process is not None:
        process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))
    for module in list(modules.values()):
        # Libraries that talk to a hub tell their processes apart by such a number.
        found = vars(module).get("SESSION_ID") if isinstance(module, ModuleType) else None
        if isinstance(found, str) and len(found) == _ID_DIGITS:
            module.SESSION_ID = uuid.uuid4().hex  # type: ignore[attr-defined]


def renew_places(modules: Mapping[str, ModuleType]) -> None:
    """Forget directories, files and times of the template."""
    if "tempfile" in modules:
        _of(modules, "tempfile").tempdir = None
    if "linecache" in modules:
        _of(modules, "linecache").clearcache()
    if "logging" in modules:
        _of(modules, "logging")._startTime = time.time()
    process = _of(modules, "multiprocessing.process")
    if process is not None:
        with contextlib.suppress(OSError):  # the directory was removed
            process.ORIGINAL_DIR = os.getcwd()


def _of(modules: Mapping[str, ModuleType], name: str) -> Any:
    return modules.get(name) or sys.modules.get(name)
