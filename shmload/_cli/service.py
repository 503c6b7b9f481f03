"""The service's commands: `shmload status` and `shutdown`, and `serve`, from start to end."""

import contextlib
import dataclasses
import logging
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._cli.sources import read_list
from shmload._host import procs
from shmload._host.limits import allow_descriptors, allow_file_size
from shmload._segments.listing import segments
from shmload._segments.removal import remove_leftovers
from shmload._segments.table import models
from shmload._service.keeper import Keeper, budget_warnings, default_budget, notify_systemd
from shmload._service.notice import Status, end_service, require_service, service_status
from shmload._settings import parse_budget, settings, unknown_variables
from shmload._tables import Page
from shmload._templates import look
from shmload._wording import count_of, format_age, format_nbytes, logger_of
from shmload.errors import ServiceError

logger = logger_of(__name__)

_INTERVAL_S = 1.0
_MAX_PORT = 65535
_DESCRIPTORS = 1 << 12
# How long a preloading child may take to end, in seconds, and how long the service waits for that.
_END_TIMEOUT_S, _JOIN_S = 5.0, 10.0
_STDERR = 2


@click.command("status")
@click.option("--watch", is_flag=True, help="Show it again each second, until Ctrl-C.")
@as_json_option
def status_command(watch: bool, as_json: bool) -> None:
    """Show the running service, and what is resident.

    The exit code is 1 if no service runs. With --json what is resident is printed even then.
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other")
    if as_json:
        _print_status(service_status())
        require_service()
    elif watch and sys.stdout.isatty():
        _watch()
    else:
        print_page(_page(require_service()))
        with contextlib.suppress(KeyboardInterrupt):
            while watch:
                time.sleep(_INTERVAL_S)
                click.echo()
                print_page(_page(require_service()))


def _watch() -> None:
    """Show the status in place, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            try:
                page = _page(require_service())
            except ServiceError as exc:  # it may come back
                page = Page((str(exc), "", *models().page().blocks))
            live.update(page, refresh=True)
            time.sleep(_INTERVAL_S)


def _page(status: Status) -> Page:
    """Return how a service is doing, and what is resident."""
    listed = models()
    found = [info for model in listed for info in model.segments]
    resident, budget = map(
        format_nbytes, (sum(info.nbytes for info in found), status.budget_nbytes)
    )
    lines = [
        f"service    process {status.pid}, up {format_age(time.time() - status.started_at)}",
        f"resident   {resident} of {budget} in {count_of(len(found), 'segment')}, "
        f"{sum(info.is_pinned for info in found)} pinned, "
        f"{sum(info.is_leased for info in found)} in use",
    ]
    if status.to_preload:
        failed = f", {status.failed_preloads} failed" if status.failed_preloads else ""
        lines.append(f"preloaded  {status.preloaded} of {status.to_preload}{failed}")
    lines += [f"template   {each}" for each in _templates()]
    return Page((*lines, "", *listed.page().blocks))


def _print_status(status: Status | None) -> None:
    listed = models()
    print_json(
        "status",
        service=status,
        models=listed,
        decoding=listed.decoding,
        templates=[dataclasses.asdict(template) for template in _templates()],
    )


def _templates() -> list[look.ListedTemplate]:
    try:
        return look.templates()
    except OSError:  # without this folder there are no templates
        return []


@click.command("shutdown")
@as_json_option
def shutdown_command(as_json: bool) -> None:
    """End the running service. Resident segments stay."""
    pid = end_service()
    if as_json:
        print_json("shutdown", pid=pid)
        return
    say(f"the service (process {pid}) ends")


# From start to end --------------------------------------------------------------------------------


def _parse_budget(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> int | None:
    try:
        return None if text is None else parse_budget(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


def _parse_address(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> tuple[str, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]*):([0-9]+)", text, re.ASCII)
    if not found or int(found[2]) > _MAX_PORT:
        raise click.BadParameter(
            f"{text!r} is no address; write it like 127.0.0.1:9477 or [::1]:9477"
        )
    return found[1].strip("[]") or "127.0.0.1", int(found[2])


@click.command("serve")
@click.option(
    "--budget",
    metavar="SIZE",
    callback=_parse_budget,
    help="Limit for resident segments, such as 40GiB. [SHMLOAD_BUDGET, else half of the memory]",
)
@click.option(
    "--preload",
    "list_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of sources to warm at the start, one a line, as for `shmload warm --list`.",
)
@click.option(
    "--metrics",
    metavar="HOST:PORT",
    callback=_parse_address,
    help="Serve metrics for Prometheus at this address.",
)
def serve_command(
    budget: int | None, list_path: Path | None, metrics: tuple[str, int] | None
) -> None:
    """Keep a budget, and warm a list at the start.

    The budget is for what stays resident, of all processes of this user. Runs in the foreground
    until SIGTERM, SIGHUP or Ctrl-C. Resident segments stay.
    """
    lines = read_list(list_path) if list_path else []
    _log_with_times()
    for warning in unknown_variables(os.environ):
        logger.warning("%s", warning)
    remove_leftovers()
    allow_descriptors(_DESCRIPTORS)
    allow_file_size()  # before a preload, which inherits the limit
    chosen = [given for given in (budget, settings().budget) if given is not None]
    budget_nbytes = chosen[0] if chosen else default_budget()
    with (
        contextlib.closing(Keeper(budget_nbytes, len(lines))) as keeper,
        _ending_by_signals(keeper),
    ):
        for warning in budget_warnings(budget_nbytes):
            logger.warning("%s", warning)
        if metrics:
            _serve_metrics(*metrics, keeper)
        preloading = threading.Thread(target=_preload, args=(lines, keeper), daemon=True)
        logger.info("serving, budget %s", format_nbytes(budget_nbytes))
        notify_systemd("READY=1")
        preloading.start()
        keeper.run()
        notify_systemd("STOPPING=1")
        preloading.join(_JOIN_S)
    remove_leftovers()  # parts of a preload that the end cut short
    logger.info("ended; %s", count_of(len(segments()), "segment stays", "segments stay"))


def _log_with_times() -> None:
    """Have the root logger's handlers write each step, with its time."""
    logging.getLogger("shmload").setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))


@contextlib.contextmanager
def _ending_by_signals(keeper: Keeper) -> Iterator[None]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1)
            signal.signal(number, lambda *_: keeper.stop())
    # Python calls these only between two instructions. A signal that comes just before the service
    # waits must end that wait.
    signal.set_wakeup_fd(keeper.signalled_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)


def _serve_metrics(host: str, port: int, keeper: Keeper) -> None:
    # Imported here: a service without --metrics needs no server.
    from shmload._service.gauges import serve_metrics

    port = serve_metrics(host, port, keeper)
    logger.info("metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, port)


def _preload(lines: Sequence[Sequence[str]], keeper: Keeper) -> None:
    """Warm one line of the list after the other; ends early when the service does.

    A child process warms each, so that the service never imports torch; what it says goes to the
    service's standard error.
    """
    poll = select.poll()
    poll.register(keeper.wake_fd, select.POLLIN)
    for words in lines:
        try:
            child = procs.start("shmload", "--verbose", "warm", *words, stdout=_STDERR)
        except OSError as exc:
            logger.error("no process to warm %s: %s", " ".join(words), exc)
            keeper.note_preloaded(is_resident=False)
            continue
        poll.register(child.pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        poll.unregister(child.pidfd)
        is_stopping = keeper.wake_fd in ready
        how = child.end(_END_TIMEOUT_S, ask=is_stopping)
        if is_stopping:
            return
        is_resident = child.process.returncode == 0
        if not is_resident:
            logger.error("cannot preload %s: its process ended (%s)", " ".join(words), how)
        keeper.note_preloaded(is_resident=is_resident)
