"""What the service counts, in Prometheus's own counters: for `status`, and for `/metrics`.

Guarantee: however many models there are, and whatever clients call them, at most `MAX_MODELS` are
remembered; of more, those that were used least recently go. So the number of series is bounded. The
sums over all models stay exact. Labels are names and paths of models only.
"""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from shmload._segments.roots import Root, tell_apart
from shmload._service.protocol import ModelUse

# With this the library would keep all numbers in files, beside those of another program.
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)

from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
)
from prometheus_client.core import Metric

MAX_MODELS = 200
"""Number of models that are remembered."""
_MAX_NAME_LENGTH = 200
_MAX_PATH_LENGTH = 4096  # PATH_MAX


# Of each: name after `shmload_`, help text.
_COUNTERS = {
    "hits": "Segments that loads found resident.",
    "misses": "Segments that loads had to decode.",
    "evictions": "Segments evicted to make room.",
    "refusals": "Loads refused for lack of room.",
}
# Name after `shmload_model_`, help text.
_OF_MODEL = {
    "hits": "Segments that loads of a model found resident.",
    "misses": "Segments that loads of a model had to decode.",
}


class Usage:
    """The counters of a service; thread-safe.

    Args:
        clock: as `time.monotonic`, in seconds.
        resident: returns the resident models, which have the names that `ls` gives them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], Iterable[Root]] = tuple,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._resident = resident
        self._lock = threading.Lock()
        registry = self._registry = CollectorRegistry()
        self._sums = {
            name: Counter(f"shmload_{name}", text, registry=registry)
            for name, text in _COUNTERS.items()
        }
        # The label is the model's key here; `collect` gives it a name, which may change.
        self._of_model = {
            name: Counter(f"shmload_model_{name}", text, ["key"], registry=registry)
            for name, text in _OF_MODEL.items()
        }
        # By the model's key.
        self._models: OrderedDict[str, Root] = OrderedDict()

    def count(self, name: str, amount: float, model: Root | None = None) -> None:
        """Count more of a kind, one of `_COUNTERS`, and for a model, one of `_OF_MODEL`."""
        self._sums[name].inc(amount)
        if model:
            with self._remembered(model) as key:
                self._of_model[name].labels(key).inc(amount)

    def note(self, model: Root, *, hits: int, misses: int) -> None:
        """Count segments that a load of a model found resident, and those that were decoded."""
        self.count("hits", hits, model)
        self.count("misses", misses, model)

    @contextlib.contextmanager
    def _remembered(self, model: Root) -> Iterator[str]:
        """Note a model as the most recently used one; yield its label."""
        key = _shorten(model.key, _MAX_PATH_LENGTH)
        with self._lock:
            if key not in self._models:
                self._models[key] = model
                for counter in self._of_model.values():
                    counter.labels(key)  # which is 0
            self._models.move_to_end(key)
            if len(self._models) > MAX_MODELS:
                oldest, _ = self._models.popitem(last=False)
                for each in self._of_model.values():
                    each.remove(oldest)
            yield key

    def sums(self) -> dict[str, float]:
        """Return the counters over all models, by the names of `_COUNTERS`."""
        values = self._values()
        return {name: values[f"shmload_{name}_total", ""] for name in _COUNTERS}

    def _values(self) -> dict[tuple[str, str], float]:
        """Return the value of each sample, by its name and its model's key."""
        return {
            (sample.name, sample.labels.get("key", "")): sample.value
            for metric in self._registry.collect()
            for sample in metric.samples
        }

    def models(self) -> tuple[ModelUse, ...]:
        """Return what was counted for each model, the most recently used first."""
        names, values = self._names(), self._values()
        with self._lock:
            known = list(reversed(self._models.items()))

        def value(name: str, key: str) -> float:
            return values.get((f"shmload_model_{name}", key), 0)

        return tuple(
            ModelUse(
                model=names.get(model.key) or _name_of(model),
                source=_shorten(model.path, _MAX_PATH_LENGTH),
                variant=model.variant,
                hits=int(value("hits_total", key)),
                misses=int(value("misses_total", key)),
            )
            for key, model in known
        )

    def collect(self) -> Iterator[Metric]:
        """Yield all counters, with the names and paths of models as labels."""
        names = self._names()
        with self._lock:
            known = dict(self._models)
        for metric in self._registry.collect():
            samples, metric.samples = metric.samples, []
            for sample in samples:
                labels = dict(sample.labels)
                if "key" in labels:
                    model = known.get(labels.pop("key"))
                    if model is None:  # it has been forgotten meanwhile, or has come
                        continue
                    labels["model"] = names.get(model.key) or _name_of(model)
                    labels["source"] = _shorten(model.path, _MAX_PATH_LENGTH)
                metric.samples.append(sample._replace(labels=labels))
            yield metric

    def name_of(self, model: Root) -> str:
        """Return what a model is called: as in `ls`, also before it is resident."""
        return self._names(model)[model.key]

    def _names(self, *more: Root) -> dict[str, str]:
        """Return what the models are called, by their keys; no two alike.

        A resident model has the name that `ls` gives it. A name gets longer when another model that
        would have it comes.
        """
        with self._lock:
            counted = list(self._models.values())
        resident = {root.key: root for root in self._resident()}
        every = resident | {root.key: root for root in (*counted, *more)}
        names = tell_apart(every.values()) | tell_apart(resident.values())
        return {key: _shorten(name, _MAX_NAME_LENGTH) for key, name in names.items()}


def _name_of(model: Root) -> str:
    """Return the shortest name of a model that has come since the names were looked up."""
    return _shorten(model.called(next(model.names())), _MAX_NAME_LENGTH)


def _shorten(text: str, length: int) -> str:
    """Return a text that is not too long for a label; the end of a name or path says most."""
    return text if len(text) <= length else "…" + text[1 - length :]
