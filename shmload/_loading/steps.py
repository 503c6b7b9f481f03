"""The steps of a load: how long each took, and a word about one that takes long."""

import contextlib
import enum
import threading
import time
from collections.abc import Callable, Iterator

# A shorter wait needs no word.
_SILENCE_S = 1.0


class Step(enum.Enum):
    """What a load does; the value is what a report calls it."""

    IMPORTING = "imports"
    DERIVING_RULES = "dtype rules"
    MAKING_ROOM = "making room"
    WAITING = "waiting for other processes"
    UNPICKLING = "unpickling"
    READING = "reading"
    BUILDING = "building"


class Steps:
    """Adds up the time of each step. Several threads may be in steps of one load.

    Args:
        say: called, in a thread of its own, with the words for a step that has lasted a second.
            It returns False if they were not needed yet; they are offered again a second later.
    """

    def __init__(self, say: Callable[[str], bool]) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._elapsed_s = dict.fromkeys(Step, 0.0)

    @contextlib.contextmanager
    def during(self, step: Step, doing: str = "") -> Iterator[None]:
        """Count the block's time for a step.

        Args:
            step: the step.
            doing: what to say if it takes long, such as `importing diffusers`; empty for nothing.
        """
        has_ended = threading.Event()
        teller = None
        if doing:
            teller = threading.Thread(
                target=self._tell, args=(doing, has_ended), name="shmload-steps", daemon=True
            )
            teller.start()
        began = time.monotonic()
        try:
            yield
        finally:
            elapsed_s = time.monotonic() - began
            has_ended.set()
            if teller:
                teller.join()
            with self._lock:
                self._elapsed_s[step] += elapsed_s

    def elapsed_s(self, step: Step) -> float:
        """Return the time in a step so far, in seconds."""
        return self._elapsed_s[step]

    def describe(self) -> str:
        """Return the time of each step that took a tenth of a second or more; may be empty."""
        return ", ".join(
            f"{step.value} {elapsed_s:.1f} s"
            for step, elapsed_s in self._elapsed_s.items()
            if elapsed_s >= 0.1
        )

    def _tell(self, doing: str, has_ended: threading.Event) -> None:
        while not has_ended.wait(_SILENCE_S):
            if self._say(doing):
                return
