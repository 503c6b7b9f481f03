"""The command `warm`."""

import sys
from pathlib import Path
from typing import Any

import click

import shmload
from shmload._checkpoints.dtypes import AUTO, dtype_by_component, parse_dtype
from shmload._cli import views
from shmload._cli.completion import complete_paths
from shmload._cli.ending import EndingCommand
from shmload._cli.noting import note_for_templates
from shmload._cli.output import as_json_option, print_json, say
from shmload._cli.preload_list import read_list
from shmload._cli.source_options import as_arguments, given, source_options
from shmload._cli.warming import Task, by_size, warm_all
from shmload._settings import parse_keep_for
from shmload.errors import ArgumentError, ShmloadError, UnknownComponent

# Options that do not select parts of a source.
_OF_WARM = frozenset({"workers", "verify", "pin", "keep_for", "quiet"})


@click.command("warm", cls=EndingCommand)
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
    "--views",
    "with_views",
    is_flag=True,
    help="Also restore all view directories, as after a restart.",
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
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--with-text", is_flag=True, hidden=True)
@as_json_option
def warm_command(
    sources: tuple[str, ...],
    dtypes: tuple[str, ...],
    with_views: bool,
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
    if not (sources or with_views or list_path):
        raise click.UsageError("Missing argument 'SOURCES...': give some, --list or --views.")
    texts: list[str] = []
    if list_path or jobs or largest_first:
        tasks = _tasks(sources, dtypes, list_path, options)
        is_silent = as_json or options["quiet"]
        reports = _warm_at_once(tasks, jobs or 1, largest_first=largest_first, is_silent=is_silent)
    else:
        reports = _warm_here(sources, dtypes, texts, as_json=as_json, **options)
    workers, quiet = options["workers"], options["quiet"]
    restored = views.restore_views(workers, quiet=quiet) if with_views else []
    if as_json:
        more = {"texts": texts} if with_text else {}
        print_json("warm", reports=reports, views=restored, **more)
    elif not quiet:
        for view in restored:
            if not isinstance(view, dict):
                say(*str(view).split("\n"))
    if any(isinstance(each, dict) and "error" in each for each in (*reports, *restored)):
        sys.exit(1)


def _warm_here(
    sources: tuple[str, ...],
    dtypes: tuple[str, ...],
    texts: list[str],
    *,
    workers: int | None,
    verify: bool,
    pin: bool,
    keep_for: str | None,
    quiet: bool,
    as_json: bool,
    **where: Any,
) -> list[object]:
    """Warm sources one after the other; return the report of each, and add its words to `texts`."""
    reports: list[object] = []
    dtype = dtype_by_component(dtypes)
    for source in sources:
        try:
            report = shmload.warm(
                source,
                dtype=dtype,
                workers=workers,
                verify=verify,
                pin=pin,
                keep_for=keep_for,
                progress=False if quiet else None,
                **given(where),
            )
        except ShmloadError as exc:  # go on with the other sources
            if isinstance(exc, ArgumentError) and not isinstance(exc, UnknownComponent):
                raise  # it would fail for every source
            say(f"shmload: {exc}", err=True)
            reports.append({"source": source, "error": str(exc)})
            texts.append("")
            continue
        note_for_templates(source, dtype)
        reports.append(report)
        texts.append(str(report))
        if not as_json and not quiet:
            say(*str(report).split("\n"))
    return reports


def _tasks(
    sources: tuple[str, ...],
    dtypes: tuple[str, ...],
    list_path: Path | None,
    options: dict[str, Any],
) -> list[Task]:
    """Return a task for each source, and for each line of a list with that line's options."""
    where = {name: value for name, value in options.items() if name not in _OF_WARM}
    workers, keep_for = options["workers"], options["keep_for"]
    _require_options(dtypes, keep_for, is_pinned=options["pin"])
    general = [f"--workers={workers}"] if workers else []
    general += ["--verify"] if options["verify"] else []
    own = [*general, *as_arguments(dtypes, where)]
    own += [f"--keep-for={keep_for}"] if keep_for else []
    own += ["--pin"] if options["pin"] else []
    listed = read_list(list_path) if list_path else []
    return [
        *(Task(source, tuple(own)) for source in sources),
        *(Task(each.source, (*general, *each.options())) for each in listed),
    ]


def _require_options(dtypes: tuple[str, ...], keep_for: str | None, *, is_pinned: bool) -> None:
    """Check what each child would refuse.

    Raises:
        ArgumentError: an option has no such value, or excludes another.
    """
    dtype_by_component(dtypes)
    for each in dtypes:
        if (dtype := each.rpartition("=")[2]) != AUTO:
            parse_dtype(dtype)
    if keep_for is not None and parse_keep_for(keep_for) and is_pinned:
        raise ArgumentError(
            "--pin and --keep-for exclude each other: what is pinned stays when idle"
        )


def _warm_at_once(
    tasks: list[Task], jobs: int, *, largest_first: bool, is_silent: bool
) -> list[object]:
    """Warm sources in child processes; return the report of each, in the order of the tasks."""
    begun = by_size(tasks) if largest_first else range(len(tasks))
    reports: dict[int, object] = {}
    for outcome in warm_all(tasks, begun, jobs):
        reports[outcome.number] = outcome.report
        if outcome.text and not is_silent:
            say(*outcome.text.split("\n"))
    return [reports[number] for number in sorted(reports)]
