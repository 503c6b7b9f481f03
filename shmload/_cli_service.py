"""The service's part of the command line: `shmload serve | status | top | shutdown`."""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from shmload._budget import budget_warnings, default_budget
from shmload._cli_output import as_json_option, print_json, print_table
from shmload._client import Client
from shmload._coordinator import DecodeCancelled
from shmload._endpoint import Endpoint, socket_path
from shmload._errors import (
    ProtocolError,
    ServiceError,
    ServiceRunning,
    ServiceSilent,
    ShmloadError,
    format_nbytes,
)
from shmload._protocol import GetStatus, Shutdown, Status, Stopping
from shmload._residency import remove_dead_parts, segments
from shmload._service import ServiceState
from shmload._sessions import serve
from shmload._settings import parse_nbytes, settings, worker_count
from shmload._warm import warm

logger = logging.getLogger(__name__)

_TOP_INTERVAL_S = 1.0
# No shard is so small; whoever says less has forgotten the unit.
_LEAST_NBYTES = 1 << 20


class _Size(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:  # click's own signature
        try:
            nbytes = parse_nbytes(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
        if 0 < nbytes < _LEAST_NBYTES:
            self.fail(
                f"{value} is {nbytes} bytes; is a unit missing, as in {value}GiB?", param, ctx
            )
        return nbytes


@click.command("serve")
@click.option("--budget", type=_Size(), help="What may stay resident, such as 40GiB. [half]")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes. [one per core]")
@click.option(
    "--preload",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Warm the sources in this file at the start, one a line: SOURCE [DTYPE].",
)
@click.option("--metrics", metavar="HOST:PORT", help="Serve metrics for Prometheus there.")
def serve_command(
    budget: int | None, workers: int | None, preload: Path | None, metrics: str | None
) -> None:
    """Keep workers warm and decoded weights resident, for every process of this user.

    Runs in the foreground until SIGTERM or Ctrl-C; what is resident stays.
    """
    # Whatever it loads, it loads itself.
    os.environ["SHMLOAD_SERVICE"] = "off"
    settings.cache_clear()
    logging.getLogger("shmload").setLevel(logging.INFO)
    with contextlib.closing(_open_endpoint(socket_path())) as endpoint:
        remove_dead_parts()
        count = workers or worker_count(parent_is_busy=False)
        state = ServiceState(count, default_budget() if budget is None else budget)
        for warning in budget_warnings(state.budget_nbytes, segments()):
            logger.warning("%s", warning)
        with contextlib.closing(state):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: state.stop())
            if metrics:
                from shmload._metrics import serve_metrics

                serve_metrics(metrics, state.status)
            serve(endpoint, state, lambda: _when_ready(endpoint, state, preload))


def _open_endpoint(path: Path) -> Endpoint:
    """Take the place of the service; one that is in it and hangs is named as such."""
    try:
        return Endpoint(path)
    except ServiceRunning as running:
        try:
            Client(path).close()
        except ServiceSilent as exc:
            raise exc from None
        except (ServiceError, ProtocolError):  # it starts or ends just now, or listens elsewhere
            raise running from None
        raise


def _when_ready(endpoint: Endpoint, state: ServiceState, preload: Path | None) -> None:
    budget = format_nbytes(state.budget_nbytes)
    click.echo(f"shmload: serving at {endpoint.path}, budget {budget}", err=True)
    _notify_systemd("READY=1")
    if preload:
        state.run_in_background(lambda: _preload(preload, state))


def _preload(path: Path, state: ServiceState) -> None:
    for line in path.read_text().splitlines():
        words = line.split("#")[0].split()
        if not words or state.is_stopping:
            continue
        source, dtype = (words[0], words[1] if len(words) > 1 else None)
        try:
            report = warm(source, torch_dtype=dtype, progress=False, service=state.as_service())
            logger.info("preloaded %s: %s", source, format_nbytes(report.resident_nbytes))
        except DecodeCancelled:
            return  # the service ends
        except ShmloadError as exc:  # the others are of use without it
            logger.error("cannot preload %s: %s", source, exc)


@click.command("status")
@as_json_option
def status_command(as_json: bool) -> None:
    """Say how the running service is."""
    with Client(socket_path()) as client:
        found = client.ask(GetStatus(), Status)
    if as_json:
        print_json(found)
    else:
        click.echo("\n".join(_describe(found)))
        rows = [
            (lease.segment, " ".join(map(str, lease.pids)) or "unknown") for lease in found.leases
        ]
        if rows:
            print_table(("SEGMENT IN USE", "PROCESSES"), rows)


@click.command("top")
def top_command() -> None:
    """Show how the running service is, again and again; Ctrl-C ends it."""
    with Client(socket_path()) as client, contextlib.suppress(KeyboardInterrupt):
        before: Status | None = None
        while True:
            found = client.ask(GetStatus(), Status)
            lines = list(_describe(found))
            if before:
                rate = (found.read_nbytes - before.read_nbytes) / _TOP_INTERVAL_S
                lines.append(f"now        {format_nbytes(rate)}/s read")
            if sys.stdout.isatty():
                click.clear()
            click.echo("\n".join(lines))
            before = found
            time.sleep(_TOP_INTERVAL_S)


@click.command("shutdown")
def shutdown_command() -> None:
    """End the running service; what is resident stays."""
    with Client(socket_path()) as client:
        client.ask(Shutdown(), Stopping)
    click.echo(f"the service (process {client.pid}) ends")


def _describe(status: Status) -> Iterator[str]:
    speed = status.read_nbytes / status.decode_s if status.decode_s else 0.0
    state = "decoding" if status.is_decoding else "idle"
    yield f"service    process {status.pid}, up {status.uptime_s:.0f} s, {status.clients} clients"
    yield (
        f"resident   {format_nbytes(status.resident_nbytes)} of "
        f"{format_nbytes(status.budget_nbytes)} in {status.segments} segments, "
        f"{status.pinned} pinned, {len(status.leases)} in use"
    )
    yield f"workers    {status.workers}, {state}, {status.waiting} loads waiting"
    yield f"served     {status.hits} hits, {status.misses} misses, {status.evictions} evictions"
    yield f"read       {format_nbytes(status.read_nbytes)}, {format_nbytes(speed)}/s while decoding"


def _notify_systemd(message: str) -> None:
    """Send a state to systemd if it started us (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        # A leading @ stands for the abstract namespace's zero byte.
        notifier.connect("\0" + address[1:] if address.startswith("@") else address)
        notifier.send(message.encode())
