"""The commands to a running service: `shmload status` and `shutdown`."""

import dataclasses
from collections.abc import Iterator

import click
import msgspec

from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._segments.models import models
from shmload._segments.users import PageLocks, page_locks
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import GetStatus, Shutdown, Status, Stopping
from shmload._templates import look
from shmload._templates.place import PlaceUnsafe
from shmload._wording import count_of, format_age, format_nbytes
from shmload.errors import ProtocolError, ServiceError


@click.command("status")
@as_json_option
def status_command(as_json: bool) -> None:
    """Show the status of the running service, and what is resident.

    The exit code is 1 if no service answers. With --json what is resident is printed even then.
    """
    try:
        with Client(socket_path()) as client:
            found = client.ask(GetStatus(), Status)
    except (ServiceError, ProtocolError):
        if as_json:
            _print_status(None)
        raise
    if as_json:
        _print_status(found)
    else:
        say(*status_lines(found), *describe_page_locks(page_locks()))
        for template in _templates():
            programs = count_of(template.programs, "program")
            memory = format_nbytes(template.memory_nbytes)
            say(f"template   {template.name}: process {template.pid}, {template.state}, "
                       f"{programs}, {memory}")  # fmt: skip
        listed = models()
        if listed or listed.decoding:
            click.echo()
            print_page(listed.page())


def _print_status(status: Status | None) -> None:
    listed = models()
    # As a dict it lacks the tag that marks it in the protocol.
    service = msgspec.structs.asdict(status) if status else None
    templates = [dataclasses.asdict(template) for template in _templates()]
    print_json(
        "status",
        service=service,
        models=listed,
        decoding=listed.decoding,
        templates=templates,
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
    with Client(socket_path()) as client:
        client.ask(Shutdown(), Stopping)
    if as_json:
        print_json("shutdown", pid=client.pid)
        return
    say(f"the service (process {client.pid}) ends")


def describe_page_locks(found: PageLocks) -> Iterator[str]:
    """Yield a line that says what processes pin for devices, if they do."""
    if found.processes:
        by_process = ", ".join(
            f"{format_nbytes(each.nbytes)} by process {each.pid}" for each in found.processes
        )
        yield f"page locks {format_nbytes(found.nbytes)} for devices: {by_process}"


def describe_status(status: Status) -> dict[str, str]:
    """Return lines that say how a service is doing, by what each is of."""
    resident, budget = map(format_nbytes, (status.resident_nbytes, status.budget_nbytes))
    reserved = f", {format_nbytes(status.reserved_nbytes)} reserved by loads"
    return {
        "service": f"process {status.pid}, up {format_age(status.uptime_s)}, "
        f"{count_of(status.clients, 'client')}",
        "resident": f"{resident} of {budget} in {count_of(status.segments, 'segment')}, "
        f"{status.pinned} pinned, {len(status.leases)} in use"
        f"{reserved if status.reserved_nbytes else ''}",
        "waiting": f"{count_of(status.waiting_for_room, 'load')} for room",
        "served": f"{count_of(status.hits, 'hit')}, {count_of(status.misses, 'miss', 'misses')}, "
        f"{count_of(status.evictions, 'eviction')}, {count_of(status.refusals, 'refusal')}",
    }


def status_lines(status: Status) -> list[str]:
    """Return how a service is doing, as the lines that `shmload status` prints first."""
    return [f"{label:10} {text}" for label, text in describe_status(status).items()]
