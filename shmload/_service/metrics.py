"""The service's metrics for Prometheus.

Guarantee: labels are names and paths of models only, of at most `usage.MAX_MODELS` models. So the
number of series is bounded, whatever clients do.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from shmload._service.usage import BUCKETS_S, ModelHistogram
from shmload._version import __version__

if TYPE_CHECKING:
    from shmload._service.state import ServiceState

# Name, type, attribute of `Status`, help text.
_OF_SERVICE = (
    ("shmload_resident_bytes", GaugeMetricFamily, "resident_nbytes", "Shared memory of segments."),
    ("shmload_budget_bytes", GaugeMetricFamily, "budget_nbytes", "What may be resident."),
    ("shmload_room_bytes", GaugeMetricFamily, "room_nbytes", "Memory that is free for segments."),
    ("shmload_segments", GaugeMetricFamily, "segments", "Resident segments."),
    ("shmload_pinned_segments", GaugeMetricFamily, "pinned", "Segments that are never evicted."),
    ("shmload_workers", GaugeMetricFamily, "workers", "Worker processes."),
    ("shmload_waiting_decodes", GaugeMetricFamily, "waiting", "Decodes that wait for workers."),
    (
        "shmload_waiting_for_room",
        GaugeMetricFamily,
        "waiting_for_room",
        "Loads that wait for room in the budget.",
    ),
    (
        "shmload_reserved_bytes",
        GaugeMetricFamily,
        "reserved_nbytes",
        "Room that loads have reserved for what they decode.",
    ),
    ("shmload_clients", GaugeMetricFamily, "clients", "Connections."),
    ("shmload_hits", CounterMetricFamily, "hits", "Segments that loads found resident."),
    ("shmload_misses", CounterMetricFamily, "misses", "Segments that loads had to decode."),
    ("shmload_evictions", CounterMetricFamily, "evictions", "Segments evicted to make room."),
    ("shmload_refusals", CounterMetricFamily, "refusals", "Loads refused for lack of room."),
    ("shmload_failed_decodes", CounterMetricFamily, "failed", "Decodes that did not end well."),
    ("shmload_read_bytes", CounterMetricFamily, "read_nbytes", "Bytes of weights read."),
    ("shmload_decode_seconds", CounterMetricFamily, "decode_s", "Time spent on decoding."),
)

# Name, attribute of `ModelUse`, help text; all are counters.
_OF_MODEL = (
    ("shmload_model_hits", "hits", "Segments that loads of a model found resident."),
    ("shmload_model_misses", "misses", "Segments that loads of a model had to decode."),
    ("shmload_model_read_bytes", "read_nbytes", "Bytes of a model's weights read."),
    ("shmload_model_failed_decodes", "failed", "Decodes of a model that did not end well."),
)

_LABELS = ("model", "source")


class ServiceCollector(Collector):
    """Reads the service's state at each scrape."""

    def __init__(self, state: "ServiceState") -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._state.status()
        for name, kind, attribute, text in _OF_SERVICE:
            metric = kind(name, text)
            metric.add_metric([], getattr(status, attribute))
            yield metric
        yield _one("shmload_leased_segments", "Segments in use.", len(status.leases))
        failed = len(self._state.preloading.failed)
        yield _one("shmload_failed_preloads", "Sources that could not be preloaded.", failed)
        yield _one("shmload_uptime_seconds", "Time since the service started.", status.uptime_s)
        build = GaugeMetricFamily("shmload_build", "The version, as a label.", labels=("version",))
        build.add_metric([__version__], 1)
        yield build
        for name, attribute, text in _OF_MODEL:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for use in status.models:
                counter.add_metric([use.model, use.source], getattr(use, attribute))
            yield counter
        yield _histogram(self._state.usage.histograms())


def _one(name: str, text: str, value: float) -> Metric:
    metric = GaugeMetricFamily(name, text)
    metric.add_metric([], value)
    return metric


def _histogram(found: Iterable[ModelHistogram]) -> Metric:
    """Return the decode times; Prometheus counts a decode in each bucket that it fits."""
    text = "Time that a decode took the workers, without waiting for them."
    metric = HistogramMetricFamily("shmload_model_decode_seconds", text, labels=_LABELS)
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    for each in found:
        counts = itertools.accumulate(each.buckets)
        labels = [each.model, each.source]
        metric.add_metric(labels, list(zip(bounds, counts, strict=True)), each.sum_s)
    return metric
