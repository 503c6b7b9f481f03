"""Holds a template ready: `shmload serve --template`."""

import contextlib
import subprocess
import sys
import threading

from shmload._templates import kind, look, place, plain
from shmload._templates.imports import how_it_crashed
from shmload._wording import logger_of

logger = logger_of(__name__)

_LOOK_AGAIN_S = 2.0
_END_TIMEOUT_S = 10.0
# After a failed start; a module that was edited may make the next one succeed.
_PAUSE_S = 60.0


class Keeper:
    """Starts a template, and another one when it ends or is stale, until `close`.

    Programs find it that have this process's variables, cores and rights, and no terminal or the
    same one. It stays when the keeper ends, and ends by itself when it was idle for long.

    Args:
        name: of the template.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_over = threading.Event()
        self._starting: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="template-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; a template that is just being started goes on by itself."""
        self._is_over.set()
        self._thread.join(_END_TIMEOUT_S)
        if self._starting:
            self._starting.kill()
            self._starting.wait(_END_TIMEOUT_S)

    def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError, place.PlaceUnsafe):
                self._look_after()
            if self._is_over.wait(_LOOK_AGAIN_S):
                return

    def _look_after(self) -> None:
        """Start a template if none is ready and none is being started."""
        key = kind.key_of(kind.facts_of_this_process(self._name))
        if self._starting is not None:
            if self._starting.poll() is None:
                return
            if self._starting.returncode != 0:
                reason = place.read_failure(key) or how_it_crashed(key)
                logger.warning("the template %s cannot be started: %s", self._name, reason)
                self._is_over.wait(_PAUSE_S)
            self._starting = None
        if look.keep(place.socket_of(key)) or place.is_taken(key):
            return
        # A process of its own: this one has threads, and a copy of it would have their locks.
        command = [sys.executable, *plain.flags_of_this_process(), "-c", plain.SHMLOAD, "template"]
        self._starting = subprocess.Popen(
            [*command, "warm", "--name", self._name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        logger.info("starting the template %s", self._name)
