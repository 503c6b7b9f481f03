"""The commands `shmload run` and `shmload template ls|warm|stop`."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator

import click

from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._tables import Page, Table
from shmload._templates import look, place
from shmload._templates.command import main as run_program
from shmload._wording import count_of, format_nbytes
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
def _told(name: str = "default") -> Iterator[None]:
    """Give errors of templates as one of this package."""
    try:
        yield
    except (look.NotStarted, place.PlaceUnsafe, OSError) as exc:
        raise ShmloadError(
            f"the template {name} cannot be started: {exc}; programs under `shmload run` start in "
            "the ordinary way"
        ) from exc


@template_group.command("ls")
@as_json_option
def ls_command(as_json: bool) -> None:
    """List the templates that run, and the modules that they leave out."""
    with _told():
        found = look.templates()
    if as_json:
        print_json("template ls", templates=[dataclasses.asdict(each) for each in found])
    elif not found:
        say("no template runs; `shmload run` starts one")
    else:
        rows = [
            (each.name, str(each.pid), each.state, format_nbytes(each.memory_nbytes),
             str(each.programs))
            for each in found
        ]  # fmt: skip
        titles = ("NAME", "PROCESS", "STATE", "MEMORY", "PROGRAMS")
        left_out = dict.fromkeys(f"left out: {name}" for each in found for name in each.left_out)
        print_page(Page((Table(titles=titles, rows=rows, right=(1, 3, 4)), *left_out)))


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
    with _told(name):
        found, is_old = look.start_and_wait(name, modules)
    if as_json:
        print_json("template warm", template=dataclasses.asdict(found))
    else:
        say(f"template {name}: process {found.pid}")
    if modules and is_old:
        remedy = "to have it import them, `shmload template stop` first"
        say(f"template {name} ran already with the modules that it has; {remedy}", err=True)
    for left_out in found.left_out:
        say(f"left out: {left_out}", err=True)
    if modules and found.left_out:
        sys.exit(1)


@template_group.command("stop")
@as_json_option
def stop_command(as_json: bool) -> None:
    """End all templates of this user. Programs that run go on, and theirs end with them."""
    with _told():
        found = look.templates()
    for template in found:
        look.end(template)
    if as_json:
        print_json("template stop", stopped=[template.pid for template in found])
        return
    say(f"ended {count_of(len(found), 'template')}")
    for template in found:
        if template.programs:
            programs = count_of(template.programs, "program")
            say(f"process {template.pid} ends when its {programs} have ended")
