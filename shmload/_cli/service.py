"""The commands to a running service: `shmload status` and `shutdown`."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import click

from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._segments.models import Models, models
from shmload._segments.users import PageLocks, page_locks
from shmload._service.notice import Status, end_service, require_service, service_status
from shmload._templates import look
from shmload._templates.place import PlaceUnsafe
from shmload._wording import count_of, format_age, format_nbytes

_INTERVAL_S = 1.0


@click.command("status")
@click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")
@as_json_option
def status_command(watch: bool, as_json: bool) -> None:
    """Show the status of the running service, and what is resident.

    The exit code is 1 if no service runs. With --json what is resident is printed even then.
    """
    if watch and as_json:
        raise click.UsageError("--watch and --json exclude each other")
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                click.clear()
                _say_status(require_service())
                time.sleep(_INTERVAL_S)
    elif as_json:
        _print_status(service_status())
        require_service()
    else:
        _say_status(require_service())


def _say_status(found: Status) -> None:
    listed = models()
    say(*status_lines(found, listed), *describe_page_locks(page_locks()))
    for template in _templates():
        programs = count_of(template.programs, "program")
        memory = format_nbytes(template.memory_nbytes)
        say(f"template   {template.name}: process {template.pid}, {template.state}, "
                   f"{programs}, {memory}")  # fmt: skip
    if listed or listed.decoding:
        click.echo()
        print_page(listed.page())


def _print_status(status: Status | None) -> None:
    listed = models()
    print_json(
        "status",
        service=status,
        models=listed,
        decoding=listed.decoding,
        templates=[dataclasses.asdict(template) for template in _templates()],
        page_locks=page_locks(),
    )


def _templates() -> list[look.ListedTemplate]:
    try:
        return look.templates()
    except (OSError, PlaceUnsafe):  # nobody can have one there
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


def describe_page_locks(found: PageLocks) -> Iterator[str]:
    """Yield a line that says what processes pin for devices, if they do."""
    if found.processes:
        by_process = ", ".join(
            f"{format_nbytes(each.nbytes)} by process {each.pid}" for each in found.processes
        )
        yield f"page locks {format_nbytes(found.nbytes)} for devices: {by_process}"


def status_lines(status: Status, listed: Models) -> list[str]:
    """Return how a service is doing, as the lines that `shmload status` prints first."""
    once = {info.name: info for model in listed for info in model.segments}.values()
    resident, budget = map(format_nbytes, (sum(info.nbytes for info in once), status.budget_nbytes))
    lines = [
        f"service    process {status.pid}, up {format_age(time.time() - status.started_at)}",
        f"resident   {resident} of {budget} in {count_of(len(once), 'segment')}, "
        f"{sum(info.is_pinned for info in once)} pinned, "
        f"{sum(info.is_leased for info in once)} in use",
    ]
    if status.to_preload:
        failed = f", {status.failed_preloads} failed" if status.failed_preloads else ""
        lines.append(f"preloaded  {status.preloaded} of {status.to_preload}{failed}")
    return lines
