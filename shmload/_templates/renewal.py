"""What modules have kept since their import and would not be the same in a new process."""

import contextlib
import os
import sys
import time
import uuid
from types import ModuleType
from typing import Any

_ID_DIGITS = 32


class Renewal:
    """Finds the modules that keep such things; make it before they are hidden."""

    def __init__(self) -> None:
        self._torch = _module("torch")
        self._numpy = _module("numpy.random")
        self._process = _module("multiprocessing.process")
        self._tempfile = _module("tempfile")
        self._linecache = _module("linecache")
        self._logging = _module("logging")
        # Libraries that talk to a hub tell their processes apart by such a number.
        self._sessions = [
            module
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType) and _is_id(vars(module).get("SESSION_ID"))
        ]

    def renew_seeds(self) -> None:
        """Seed what draws random numbers, and draw anew what was drawn at import.

        The module `random` does that by itself in every copy of a process; `os.urandom`,
        `uuid.uuid4` and `secrets` keep nothing. CUDA's generators are made when a program first
        touches a GPU.
        """
        if hasattr(self._torch, "default_generator"):
            self._torch.default_generator.seed()
        if self._numpy:
            self._numpy.seed()
        if self._process:
            key = self._process.AuthenticationString(os.urandom(32))
            self._process._current_process._config["authkey"] = key
        for module in self._sessions:
            module.SESSION_ID = uuid.uuid4().hex  # type: ignore[attr-defined]

    def renew_places(self) -> None:
        """Forget directories, files and times of the template."""
        _renew_time_zone()
        if self._tempfile:
            self._tempfile.tempdir = None
        if self._linecache:
            self._linecache.clearcache()
        if self._logging:
            self._logging._startTime = time.time()
        if self._process:
            with contextlib.suppress(OSError):  # the directory was removed
                self._process.ORIGINAL_DIR = os.getcwd()


def _renew_time_zone() -> None:
    """Read the time zone anew: its file may have changed on disk."""
    zone = os.environ.get("TZ")
    if zone:  # the C library reads it again only for another name
        os.putenv("TZ", "UTC0")
        time.tzset()
        os.putenv("TZ", zone)
    time.tzset()


def _module(name: str) -> Any:
    return sys.modules.get(name)


def _is_id(value: object) -> bool:
    return isinstance(value, str) and len(value) == _ID_DIGITS
