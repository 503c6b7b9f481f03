"""The commands to a running service: `shmload status` and `shutdown`."""

import contextlib
import dataclasses
import sys
import time

import click

from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._segments.table import models
from shmload._service.notice import Status, end_service, require_service, service_status
from shmload._tables import Page
from shmload._templates import look
from shmload._wording import count_of, format_age, format_nbytes
from shmload.errors import ServiceError

_INTERVAL_S = 1.0


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
