"""The service's metrics for Prometheus, served over HTTP."""

from collections.abc import Callable, Iterator

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from shmload._service.protocol import Status
from shmload.errors import ShmloadError

# Name, type, attribute of `Status`, help text.
_METRICS = (
    ("shmload_resident_bytes", GaugeMetricFamily, "resident_nbytes", "Shared memory of segments."),
    ("shmload_budget_bytes", GaugeMetricFamily, "budget_nbytes", "What may be resident."),
    ("shmload_segments", GaugeMetricFamily, "segments", "Resident segments."),
    ("shmload_pinned_segments", GaugeMetricFamily, "pinned", "Segments that are never evicted."),
    ("shmload_workers", GaugeMetricFamily, "workers", "Worker processes."),
    ("shmload_waiting_decodes", GaugeMetricFamily, "waiting", "Decodes that wait for workers."),
    ("shmload_clients", GaugeMetricFamily, "clients", "Connections."),
    ("shmload_hits", CounterMetricFamily, "hits", "Segments that loads found resident."),
    ("shmload_misses", CounterMetricFamily, "misses", "Segments that loads had to decode."),
    ("shmload_evictions", CounterMetricFamily, "evictions", "Segments evicted to make room."),
    ("shmload_read_bytes", CounterMetricFamily, "read_nbytes", "Bytes of weights read."),
    ("shmload_decode_seconds", CounterMetricFamily, "decode_s", "Time spent on decoding."),
)


class _StatusCollector(Collector):
    """Reads the status at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for name, kind, attribute, text in _METRICS:
            metric = kind(name, text)
            metric.add_metric([], getattr(status, attribute))
            yield metric
        leases = GaugeMetricFamily("shmload_leased_segments", "Segments in use.")
        leases.add_metric([], len(status.leases))
        yield leases


def serve_metrics(host: str, port: int, status: Callable[[], Status]) -> int:
    """Serve metrics over HTTP from a new thread, until the process ends.

    Args:
        host: name or address.
        port: 0 for any free port.
        status: returns the status; called from that thread.

    Returns:
        The port in use.

    Raises:
        ShmloadError: the host has no such address, or the port is taken.
    """
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as exc:
        raise ShmloadError(
            f"metrics cannot be served at {host} port {port}: {exc.strerror or exc}; "
            "choose another with --metrics"
        ) from exc
    return int(server.server_port)
