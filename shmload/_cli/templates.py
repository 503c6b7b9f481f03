"""The commands `shmload run` and `shmload template ls|warm|stop`."""

import contextlib
import dataclasses
from collections.abc import Iterator

import click

from shmload._cli.output import as_json_option, print_json, say
from shmload._templates import look
from shmload._templates.command import main as run_program
from shmload.errors import ShmloadError


@click.command("run", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(arguments: tuple[str, ...]) -> None:
    """Run a Python program with the libraries imported."""
    run_program(list(arguments))


@click.group("template")
def template_group() -> None:
    """Show, start and end the templates of `shmload run`."""


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Give errors of templates as one of this package."""
    try:
        yield
    except (look.NotStarted, OSError) as exc:
        raise ShmloadError(
            f"no template can be started: {exc}; programs under `shmload run` start in the "
            "ordinary way"
        ) from exc


@template_group.command("ls")
@as_json_option
def ls_command(as_json: bool) -> None:
    """List the templates that run."""
    with _told():
        found = look.templates()
    if as_json:
        print_json("template ls", templates=[dataclasses.asdict(each) for each in found])
    else:
        say(*map(str, found) if found else ["no template runs; `shmload run` starts one"])


@template_group.command("warm")
@as_json_option
def warm_command(as_json: bool) -> None:
    """Start the template that programs of this terminal would use, and wait until it serves."""
    with _told():
        found = look.start_and_wait()
    if as_json:
        print_json("template warm", template=dataclasses.asdict(found))
    else:
        say(str(found))


@template_group.command("stop")
@as_json_option
def stop_command(as_json: bool) -> None:
    """End all templates of this user, each with its last program."""
    with _told():
        found = look.templates()
    for template in found:
        look.end(template)
    if as_json:
        print_json("template stop", stopped=[template.pid for template in found])
    else:
        say(*[f"told to end: {template}" for template in found] or ["no template runs"])
