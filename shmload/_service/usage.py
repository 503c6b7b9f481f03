"""What the service counts for each model: hits, misses, bytes read, decodes and their times.

Guarantee: however many models there are, and whatever clients call them, at most `MAX_MODELS` are
remembered; of more, those that were used least recently go. The sums over all models stay exact.
"""

import bisect
import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from shmload._segments.roots import Root, tell_apart
from shmload._service.protocol import DecodeStatus, ModelUse

MAX_MODELS = 200
"""Number of models that are remembered."""
_MAX_NAME_LENGTH = 200
_MAX_PATH_LENGTH = 4096  # PATH_MAX

BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histogram of decode times, in seconds; one bucket more has the rest."""

INTERVAL_S = 5.0
"""Length of the intervals that `Usage.history` counts by, in seconds."""
_INTERVALS = 60

Clock = Callable[[], float]
Resident = Callable[[], Iterable[Root]]


class _Counts:
    """The counters of one model, or of all."""

    def __init__(self, model: Root | None = None) -> None:
        self.model = model
        self.hits = self.misses = self.read_nbytes = self.failed = 0
        self.decode_s = self.done_s = 0.0
        self.buckets = [0] * (len(BUCKETS_S) + 1)


class ModelHistogram(msgspec.Struct, frozen=True):
    """How long the decodes of one model took."""

    model: str
    source: str
    buckets: tuple[int, ...]
    """Number of decodes in each of `BUCKETS_S`, and beyond; a decode counts in one bucket."""
    sum_s: float


class RunningDecode:
    """A decode from when it is asked for to its end."""

    def __init__(self, model: Root, total_nbytes: int, clock: Clock) -> None:
        self.model = model
        self.total_nbytes = total_nbytes
        self.done_nbytes = 0
        self._clock = clock
        self._began_at: float | None = None

    def begin(self) -> None:
        """Note that the workers begin with it."""
        self._began_at = self._clock()

    @property
    def elapsed_s(self) -> float:
        """How long the workers have been at it, in seconds; 0 while it waits for them."""
        return 0.0 if self._began_at is None else self._clock() - self._began_at

    def describe(self, name: str) -> DecodeStatus:
        """Return it as it stands now; `name` is what the model is called."""
        return DecodeStatus(
            model=name,
            source=_shorten(self.model.path, _MAX_PATH_LENGTH),
            variant=self.model.variant,
            done_nbytes=self.done_nbytes,
            total_nbytes=self.total_nbytes,
            elapsed_s=self.elapsed_s,
            is_waiting=self._began_at is None,
        )


class Usage:
    """The counters of a service; thread-safe.

    Args:
        clock: as `time.monotonic`, in seconds.
        resident: returns the resident models, which have the names that `ls` gives them.
    """

    def __init__(self, clock: Clock = time.monotonic, resident: Resident = tuple) -> None:
        self._clock = clock
        self._resident = resident
        self._lock = threading.Lock()
        self._all = _Counts()
        # By the model's key.
        self._models: OrderedDict[str, _Counts] = OrderedDict()
        self._running: list[RunningDecode] = []
        # Number of an interval since the clock's zero, and the bytes read in it; oldest first.
        self._intervals: deque[tuple[int, int]] = deque(maxlen=_INTERVALS)

    def note(self, model: Root, *, hits: int, misses: int) -> None:
        """Count segments that a load of a model found resident, and those that were decoded."""
        with self._lock:
            for counts in (self._all, self._counts_of(model)):
                counts.hits += hits
                counts.misses += misses

    @contextlib.contextmanager
    def decoding(self, model: Root, total_nbytes: int) -> Iterator[RunningDecode]:
        """List a decode inside the block, and count it at the end.

        Args:
            model: the model.
            total_nbytes: what it will read, in bytes.

        Yields:
            The decode. Call its `begin` when the workers begin.
        """
        running = RunningDecode(model, total_nbytes, self._clock)
        with self._lock:
            self._running.append(running)
        is_done = False
        try:
            yield running
            is_done = True
        finally:
            with self._lock:
                self._running.remove(running)
                for counts in (self._all, self._counts_of(model)):
                    counts.decode_s += running.elapsed_s
                    if is_done:
                        counts.done_s += running.elapsed_s
                        counts.buckets[bisect.bisect_left(BUCKETS_S, running.elapsed_s)] += 1
                    else:
                        counts.failed += 1

    def add_read(self, running: RunningDecode, nbytes: int) -> None:
        """Count bytes that a decode has read."""
        interval = int(self._clock() // INTERVAL_S)
        with self._lock:
            running.done_nbytes += nbytes
            for counts in (self._all, self._counts_of(running.model)):
                counts.read_nbytes += nbytes
            before = 0
            if self._intervals and self._intervals[-1][0] == interval:
                _, before = self._intervals.pop()
            self._intervals.append((interval, before + nbytes))

    def _counts_of(self, model: Root) -> _Counts:
        """Return a model's counters, as the most recently used ones."""
        key = _shorten(model.key, _MAX_PATH_LENGTH)
        counts = self._models.setdefault(key, _Counts(model))
        self._models.move_to_end(key)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return counts

    @property
    def hits(self) -> int:
        """Segments that loads found resident."""
        return self._all.hits

    @property
    def misses(self) -> int:
        """Segments that were decoded for loads."""
        return self._all.misses

    @property
    def read_nbytes(self) -> int:
        """Bytes of weights read."""
        return self._all.read_nbytes

    @property
    def failed(self) -> int:
        """Decodes that ended with an error, or whose client left."""
        return self._all.failed

    def running(self) -> tuple[DecodeStatus, ...]:
        """Return the decodes that run or wait, in the order in which they were asked for."""
        names = self._names()
        with self._lock:
            return tuple(
                each.describe(names.get(each.model.key) or _name_of(each.model))
                for each in self._running
            )

    def models(self) -> tuple[ModelUse, ...]:
        """Return what was counted for each model, the most recently used first."""
        names = self._names()
        with self._lock:
            return tuple(
                ModelUse(
                    model=names.get(counts.model.key) or _name_of(counts.model),
                    source=_shorten(counts.model.path, _MAX_PATH_LENGTH),
                    variant=counts.model.variant,
                    hits=counts.hits,
                    misses=counts.misses,
                    read_nbytes=counts.read_nbytes,
                    decodes=sum(counts.buckets),
                    failed=counts.failed,
                    decode_s=counts.decode_s,
                )
                for counts in reversed(self._models.values())
                if counts.model
            )

    def histograms(self) -> tuple[ModelHistogram, ...]:
        """Return the decode times of each model that was decoded."""
        names = self._names()
        with self._lock:
            return tuple(
                ModelHistogram(
                    model=names.get(counts.model.key) or _name_of(counts.model),
                    source=_shorten(counts.model.path, _MAX_PATH_LENGTH),
                    buckets=tuple(counts.buckets),
                    sum_s=counts.done_s,
                )
                for counts in self._models.values()
                if counts.model and any(counts.buckets)
            )

    def name_of(self, model: Root) -> str:
        """Return what a model is called: as in `ls`, also before it is resident."""
        return self._names(model)[model.key]

    def _names(self, *more: Root) -> dict[str, str]:
        """Return what the models are called, by their keys; no two alike.

        A resident model has the name that `ls` gives it. A name gets longer when another model that
        would have it comes.
        """
        with self._lock:
            counted = [counts.model for counts in self._models.values() if counts.model]
            counted += [running.model for running in self._running]
        resident = {root.key: root for root in self._resident()}
        every = resident | {root.key: root for root in (*counted, *more)}
        names = tell_apart(every.values()) | tell_apart(resident.values())
        return {key: _shorten(name, _MAX_NAME_LENGTH) for key, name in names.items()}

    def history(self) -> tuple[int, ...]:
        """Return the bytes read in the latest intervals of `INTERVAL_S`, the latest last."""
        latest = int(self._clock() // INTERVAL_S)
        with self._lock:
            known = dict(self._intervals)
        return tuple(known.get(latest - back, 0) for back in reversed(range(_INTERVALS)))


def _name_of(model: Root) -> str:
    """Return the shortest name of a model that has come since the names were looked up."""
    return _shorten(model.called(next(model.names())), _MAX_NAME_LENGTH)


def _shorten(text: str, length: int) -> str:
    """Return a text that is not too long for a label; the end of a name or path says most."""
    return text if len(text) <= length else "…" + text[1 - length :]
