"""What the service tells Prometheus: numbers that each scrape reads anew from /dev/shm.

prometheus_client's own server answers, each client in a thread of its own.
"""

import time
from collections.abc import Iterator

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from shmload import __version__
from shmload._segments.eviction import room_nbytes
from shmload._segments.table import models
from shmload._service.keeper import Keeper
from shmload._wording import encodable
from shmload.errors import ShmloadError


def serve_metrics(host: str, port: int, keeper: Keeper) -> int:
    """Serve the metrics from a thread, until the process ends.

    Args:
        host: name or address.
        port: 0 for any free port.
        keeper: the service.

    Returns:
        The port in use.

    Raises:
        ShmloadError: the host has no such address, or the port is taken.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Gauges(keeper))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as exc:
        raise ShmloadError(
            f"metrics cannot be served at {host} port {port}: {exc.strerror or exc}; "
            "choose another with --metrics"
        ) from exc
    return int(server.server_port)


class Gauges(Collector):
    """Reads the service's status, and what is resident, at each scrape."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status, listed = self._keeper.status, models()
        found = [info for model in listed for info in model.segments]
        for name, text, value in (
            ("resident_bytes", "Shared memory of segments.", sum(each.nbytes for each in found)),
            ("budget_bytes", "What may be resident.", status.budget_nbytes),
            ("room_bytes", "Memory that is free for segments.", max(0, room_nbytes())),
            ("segments", "Resident segments.", len(found)),
            ("pinned_segments", "Pinned segments.", sum(each.is_pinned for each in found)),
            ("leased_segments", "Segments in use.", sum(each.is_leased for each in found)),
            ("pending_preloads", "Sources to preload.", status.to_preload - status.preloaded),
            ("failed_preloads", "Sources that could not be preloaded.", status.failed_preloads),
            ("uptime_seconds", "Time since the start.", time.time() - status.started_at),
        ):
            yield GaugeMetricFamily(f"shmload_{name}", text, value)
        labels = ("model", "dtype", "source")
        sizes = GaugeMetricFamily("shmload_model_bytes", "Shared memory of a model.", labels=labels)
        users = GaugeMetricFamily("shmload_model_users", "Processes that use it.", labels=labels)
        for model in listed:
            if model.is_current:  # an earlier version of its files has the same labels
                of = [encodable(each) for each in (model.name, model.dtype, model.source)]
                sizes.add_metric(of, model.nbytes)
                users.add_metric(of, len(model.used_by))
        build = GaugeMetricFamily("shmload_build", "The version, as a label.", labels=("version",))
        build.add_metric([__version__], 1)
        yield from (sizes, users, build)
