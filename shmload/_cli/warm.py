"""The command `shmload warm`: sources, or a list of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import shmload
from shmload._checkpoints.dtypes import AUTO, dtype_by_component, parse_dtype
from shmload._cli.output import as_json_option, print_json, say
from shmload._cli.source_list import ListedSource, read_list
from shmload._cli.sources import as_arguments, complete_paths, given, source_options
from shmload._cli.warming import Outcome, by_size, warm_all
from shmload._settings import parse_keep_for
from shmload.errors import ArgumentError, ShmloadError, UnknownComponent


@click.command("warm")
@click.argument("sources", nargs=-1, shell_complete=complete_paths)
@source_options
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.")
@click.option(
    "--verify", is_flag=True, help="Recompute digests, also of segments that were resident before."
)
@click.option("--pin", is_flag=True, help="Never evict the segments to make room.")
@click.option(
    "--keep-for",
    metavar="TIME",
    help="How long the segments stay while no process uses them, such as 2h; or forever.",
)
@click.option(
    "--list",
    "list_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with more sources, one a line, such as `SOURCE bfloat16 pin`; as for "
    "`serve --preload`.",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Warm this many sources at a time.")
@click.option("--largest-first", is_flag=True, help="Begin with the largest source.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--with-text", is_flag=True, hidden=True)
@as_json_option
def warm_command(
    sources: tuple[str, ...],
    list_path: Path | None,
    jobs: int | None,
    largest_first: bool,
    with_text: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Decode SOURCES into shared memory and leave them there.

    A source is a pipeline's or component's directory, a file of weights, or a hub id.
    """
    if not (sources or list_path):
        raise click.UsageError("Missing argument 'SOURCES...': give some, or --list.")
    _require_options(**options)
    quiet = options["quiet"]
    if list_path or jobs or largest_first:
        wanted = _wanted(sources, list_path, options)
        begun = by_size(wanted) if largest_first else range(len(wanted))
        outcomes = warm_all(wanted, begun, jobs or 1)
    else:
        outcomes = _warm_here(sources, options)
    found = {}
    for number, report, text in outcomes:
        found[number] = report, text
        if text and not (as_json or quiet):
            say(*text.split("\n"))
    reports = [found[number][0] for number in sorted(found)]
    if as_json:
        more = {"texts": [found[number][1] for number in sorted(found)]} if with_text else {}
        print_json("warm", reports=reports, **more)
    if any(isinstance(each, dict) and "error" in each for each in reports):
        sys.exit(1)


def _warm_here(sources: tuple[str, ...], options: dict[str, Any]) -> Iterator[Outcome]:
    """Warm sources one after the other."""
    arguments = given(options)
    dtype = dtype_by_component(arguments.pop("dtypes", ()))
    progress = False if arguments.pop("quiet", False) else None
    for number, source in enumerate(sources):
        try:
            report = shmload.warm(source, dtype=dtype, progress=progress, **arguments)
        except ShmloadError as exc:  # go on with the other sources
            if isinstance(exc, ArgumentError) and not isinstance(exc, UnknownComponent):
                raise  # it would fail for every source
            say(f"shmload: {exc}", err=True)
            yield number, {"source": source, "error": str(exc)}, ""
        else:
            yield number, report, str(report)


def _wanted(
    sources: tuple[str, ...], list_path: Path | None, options: dict[str, Any]
) -> list[ListedSource]:
    """Return sources with the given options, and those of a list with the options of its lines."""
    own = tuple(as_arguments(options | {"quiet": False}))
    general = tuple(as_arguments({name: options[name] for name in ("workers", "verify")}))
    listed = read_list(list_path) if list_path else []
    return [
        *(ListedSource(0, source, own) for source in sources),
        *(ListedSource(each.line, each.source, general + each.options) for each in listed),
    ]


def _require_options(
    dtypes: tuple[str, ...], keep_for: str | None, pin: bool, **_others: object
) -> None:
    """Check what would fail for every source.

    Raises:
        ArgumentError: an option has no such value, or excludes another.
    """
    dtype_by_component(dtypes)
    for each in dtypes:
        if (dtype := each.rpartition("=")[2]) != AUTO:
            parse_dtype(dtype)
    if keep_for is not None and parse_keep_for(keep_for) and pin:
        raise ArgumentError(
            "--pin and --keep-for exclude each other: what is pinned stays when idle"
        )
