"""The command `shmload warm`, and the lists of sources that it and `shmload serve` take.

Each line of a list has what would stand behind `shmload warm`:

    # SOURCE... [OPTIONS]
    ~/models/flux --dtype bfloat16 --pin
    ~/models/sdxl --dtype float16 --dtype vae=float32 --variant fp16 --keep-for 2h
    "/models/my lora.safetensors"

Guarantee: a list with a mistake is refused as a whole, before anything is warmed.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import shmload
from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._cli.sources import complete_paths, given, source_options
from shmload._settings import parse_keep_for
from shmload.errors import ArgumentError, ShmloadError


def _check_time(context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    """Refuse what is no time to keep something, or one beside --pin."""
    if text is not None and parse_keep_for(text) and context.params["pin"]:
        raise ArgumentError(
            "--pin and --keep-for exclude each other: what is pinned stays when idle"
        )
    return text


def _options_of_a_line(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what is warmed, and how."""
    for option in (
        click.option(
            "--keep-for",
            metavar="TIME",
            callback=_check_time,
            help="How long the segments stay while no process uses them, such as 2h; or forever.",
        ),
        click.option(
            "--trace",
            metavar="PATH",
            type=click.Path(dir_okay=False),
            help="Add to this file where the time goes, as a Chrome trace.",
        ),
        click.option(
            "--pin", is_flag=True, is_eager=True, help="Never evict the segments to make room."
        ),
        click.option(
            "--verify",
            is_flag=True,
            help="Recompute digests, also of segments that were resident before.",
        ),
        click.option("--workers", type=click.IntRange(min=1), help="Worker processes."),
    ):
        command = option(command)
    return source_options(command)


@click.command("line", add_help_option=False)
@click.argument("sources", nargs=-1, required=True)
@_options_of_a_line
def _line(**_: Any) -> None:
    """Stand for a line of a list, whose options are read as those of a command."""


def read_list(path: Path) -> list[list[str]]:
    """Read a list of sources.

    Returns:
        The words of each line, as they would stand behind `shmload warm`.

    Raises:
        ArgumentError: a line has a mistake; the message has its number.
    """
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            words = shlex.split(line.decode(), comments=True)
            if words:
                _arguments_of(words)
        except click.UsageError as exc:
            raise ArgumentError(f"{path}, line {number}: {exc.format_message()}") from exc
        except ValueError as exc:  # an option's value, an open quote, or no UTF-8
            raise ArgumentError(f"{path}, line {number}: {exc}") from exc
        if words:
            found.append([os.path.expanduser(word) for word in words])
    return found


def _arguments_of(words: list[str]) -> list[dict[str, Any]]:
    """Return the arguments of `shmload.warm` for each source of a line.

    Raises:
        click.UsageError, ArgumentError: the line has a mistake.
    """
    options = _line.make_context("", list(words)).params
    return [{"source": each} | given(options) for each in options.pop("sources")]


@click.command("warm")
@click.argument("sources", nargs=-1, shell_complete=complete_paths)
@_options_of_a_line
@click.option(
    "--list",
    "list_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with more sources, one a line, each with its own options.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@as_json_option
def warm_command(
    sources: tuple[str, ...], list_path: Path | None, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Decode SOURCES, and leave them in shared memory.

    A source is a pipeline's or component's directory, a file of weights, or a hub id. They are
    warmed one after the other, also after one that fails; the exit code is then 1.
    """
    if not (sources or list_path):
        raise click.UsageError("Missing argument 'SOURCES...': give some, or --list.")
    wanted = [{"source": source} | given(options) for source in sources]
    for words in read_list(list_path) if list_path else ():
        wanted += _arguments_of(words)
    reports: list[object] = []
    has_failed = False
    for each in wanted:
        try:
            report = shmload.warm(**each, progress=False if quiet else None)
        except ShmloadError as exc:
            say(f"shmload: {exc}", err=True)
            reports.append({"source": each["source"], "error": str(exc)})
            has_failed = True
            continue
        reports.append(report)
        if not (as_json or quiet):
            print_page(report.page())
    if as_json:
        print_json("warm", reports=reports)
    if has_failed:
        sys.exit(1)
