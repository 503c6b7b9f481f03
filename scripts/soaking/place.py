"""A place of its own for `shmload run`: a folder for sockets and caches, and its templates."""

import os
import subprocess
import sys
from pathlib import Path

from proc import pids_with

_DEADLINE_S = 90.0


class Place:
    """Starts programs that have their templates here.

    Args:
        folder: of all files; its path is short.
        variables: more of the environment.
    """

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        self._mark = os.fsencode(runtime)
        self._environment = os.environ | {
            "XDG_RUNTIME_DIR": str(runtime),
            "SHMLOAD_CACHE_DIR": str(folder / "cache"),
            **variables,
        }

    def start(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Run Python, which may fail.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )

    def python(self, *words: object) -> str:
        """Run Python; return what it prints."""
        done = self.start(*words)
        done.check_returncode()
        return done.stdout

    def shmload(self, *words: object) -> "subprocess.CompletedProcess[str]":
        """Call the command `shmload`, which may fail."""
        return self.start("-m", "shmload", *words)

    def alive(self) -> list[int]:
        """Return the processes of the templates here."""
        return list(pids_with(self._mark, file="cmdline"))
