"""The commands `shmload run` and `shmload template ls|warm|stop`."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import click

from shmload._cli.output import as_json_option, print_json, print_table
from shmload._templates import kind, place, wire
from shmload._templates.command import main as run_program
from shmload._templates.start import MODULES, start_template
from shmload._wording import count_of, format_age, format_nbytes
from shmload.errors import TemplateUnavailable

_ANSWER_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 120.0


@click.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(arguments: tuple[str, ...]) -> None:
    """Run a Python program in a copy of a process that has imported the libraries."""
    run_program(list(arguments))


@click.group("template")
def template_group() -> None:
    """Show, start and end the templates of `shmload run`."""


@template_group.command("ls")
@as_json_option
def ls_command(as_json: bool) -> None:
    """List the templates that run."""
    found = list(_templates())
    if as_json:
        print_json("template ls", templates=found)
    elif not found:
        click.echo("no template runs; `shmload run` starts one")
    else:
        print_table(
            ("NAME", "PROCESS", "MEMORY", "PROGRAMS", "IDLE"),
            [
                (
                    template["name"],
                    str(template["pid"]),
                    format_nbytes(template["memory_nbytes"]),
                    str(template["programs"]),
                    format_age(template["idle_s"]),
                )
                for template in found
            ],
            right=(1, 2, 3),
        )


@template_group.command("warm")
@click.option("--name", default="default", help="Of the template.")
@click.option(
    "--import",
    "modules",
    multiple=True,
    help="A module to import, instead of torch, diffusers and transformers; repeatable.",
)
@as_json_option
def warm_command(name: str, modules: tuple[str, ...], as_json: bool) -> None:
    """Start the template that programs of this terminal would use, and wait until it serves."""
    key = kind.key_of(kind.facts_of_this_process(name))
    found = _look(place.socket_of(key))
    if not found:
        start_template(name, key, modules or MODULES)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not found:
        reason = place.read_failure(key)
        if reason or time.monotonic() > deadline:
            waited = f"it does not serve after {_START_TIMEOUT_S:g} s"
            raise TemplateUnavailable(name, reason or waited)
        time.sleep(0.02)  # the socket appears when it is ready; nothing tells of that
        found = _look(place.socket_of(key))
    if as_json:
        print_json("template warm", template=found)
    else:
        click.echo(f"template {name}: process {found['pid']}")


@template_group.command("stop")
@as_json_option
def stop_command(as_json: bool) -> None:
    """End all templates of this user. Programs that run go on."""
    stopped = []
    for template in _templates():
        with wire.open_socket() as channel, contextlib.suppress(OSError):  # it may have ended
            channel.settimeout(_ANSWER_TIMEOUT_S)
            channel.connect(template["socket"])
            wire.send(channel, {"kind": "end"})
            wire.receive(channel)
        stopped.append(template["pid"])
    if as_json:
        print_json("template stop", stopped=stopped)
    else:
        click.echo(f"ended {count_of(len(stopped), 'template')}")


def _templates() -> Iterator[dict[str, Any]]:
    for path in place.sockets():
        found = _look(path)
        if found:
            yield found


def _look(path: str) -> dict[str, Any] | None:
    """Ask a template what it is; None if none serves there."""
    with wire.open_socket() as channel:
        channel.settimeout(_ANSWER_TIMEOUT_S)
        try:
            channel.connect(path)
            wire.send(channel, {"kind": "look"})
            found = wire.receive(channel)
        except OSError:
            return None
    if found is None:
        return None
    return {**found[0], "memory_nbytes": _memory_of(found[0]["pid"]), "socket": path}


def _memory_of(pid: int) -> int:
    """Return a process's share of memory (PSS), in bytes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except OSError:
        return 0
