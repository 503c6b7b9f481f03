"""The modules of what loads have kept: a template imports them, so a recall imports none.

A recall makes objects of the libraries' classes, and imports their modules first. A new Python, or
a template that has imported the libraries alone, needs a second for Stable Diffusion's.
"""

import contextlib
import importlib
import os
import signal
import sys
import time
from typing import Any

from shmload._templates.freshness import Freshness
from shmload._templates.imports import TIMEOUT_S, TRUSTED, Output, in_copy, require_fitness
from shmload._templates.recorder import Recorder
from shmload._templates.stash import Stash

LOOK_S = 5.0
"""How often a template looks whether there is more."""

_STORED = "shmload._building.stored"
_SHM = "shmload._host.shm"


class Kept:
    """Imports the modules of kept objects; make it before the modules are hidden.

    Args:
        stash: hides the template's modules.
        recorder: of their imports.
    """

    def __init__(self, stash: Stash, recorder: Recorder) -> None:
        self._stash = stash
        self._recorder = recorder
        self._stored: Any = sys.modules.get(_STORED)
        """Reads what is kept; None if the template has not imported it."""
        self._shm: Any = sys.modules.get(_SHM)
        self._changed_ns = -1
        self._looked = 0.0

    def new(self) -> list[str]:
        """Return the modules that are not imported yet; nothing if nothing has been kept since."""
        now = time.monotonic()
        if self._stored is None or now - self._looked < LOOK_S:
            return []
        self._looked = now
        changed_ns = os.stat(self._shm.SHM_DIR).st_mtime_ns
        if changed_ns == self._changed_ns:
            return []
        self._changed_ns = changed_ns
        names = in_copy(self._read).split()  # its own imports would be seen here
        return [n for n in names if n not in self._stash.names and n.partition(".")[0] in TRUSTED]

    def _read(self) -> str:
        self._stash.show_all()
        return "\n".join(sorted(self._stored.modules_kept()))

    def make(self, names: list[str]) -> Freshness:
        """Import modules, which are hidden before and after; return how the files of all are now.

        Raises:
            Unfit: this process cannot be a template any more.
        """
        signal.alarm(TIMEOUT_S)
        self._stash.show_all()
        self._recorder.start()
        with Output({fd: os.memfd_create("said", os.MFD_CLOEXEC) for fd in (1, 2)}) as output:
            self._recorder.drain = output.drain
            for name in names:
                with contextlib.suppress(ImportError):  # of a package that was removed meanwhile
                    importlib.import_module(name)
            self._recorder.stop()
        require_fitness("the import of what loads have kept")
        freshness = Freshness()
        self._stash.hide()
        signal.alarm(0)
        return freshness
