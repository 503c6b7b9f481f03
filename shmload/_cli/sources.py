"""The commands `shmload plan`, `view` and `warm`, and the options that select parts of a source.

Each line of a list, for `warm` and `shmload serve`, has what would stand behind `shmload warm`:

    # SOURCE... [OPTIONS]
    ~/models/flux --dtype bfloat16 --pin
    ~/models/sdxl --dtype float16 --dtype vae=float32 --variant fp16 --keep-for 2h
    "/models/my lora.safetensors"

Guarantee: a list with a mistake is refused as a whole, before anything is warmed.
"""

import ast
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import shmload
from shmload._checkpoints.dtypes import AUTO, dtype_by_component, dtype_names, torch_names
from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._settings import parse_keep_for
from shmload.errors import ArgumentError, ShmloadError


def complete_paths(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Let the shell complete paths; without this it completes nothing for a source."""
    return [CompletionItem(typed, type="file")]


def _complete_dtypes(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the dtypes that begin so, also behind `COMPONENT=`."""
    component, equals, begun = typed.rpartition("=")
    return [
        CompletionItem(f"{component}{equals}{name}")
        for name in (*dtype_names(), AUTO)
        if name.startswith(begun)
    ]


def _parse_dtypes(_context: click.Context, _option: click.Parameter, given: Any) -> object:
    """Return what `dtype=` takes; an unknown name is an error before anything is loaded."""
    return torch_names(dtype_by_component(given))


source_argument = click.argument("source", shell_complete=complete_paths)
dtype_option = click.option(
    "--dtype",
    multiple=True,
    callback=_parse_dtypes,
    shell_complete=_complete_dtypes,
    help="Such as bfloat16, or COMPONENT=float32 for one component; repeatable. auto is "
    "each checkpoint's own dtype.",
)
_OPTIONS = (
    dtype_option,
    click.option("--variant", help="File variant, such as fp16."),
    click.option(
        "--component", "components", multiple=True, help="Only this component; repeatable."
    ),
    click.option("--subfolder", help="Directory in the source to read instead of its root."),
    click.option(
        "--weight-name",
        multiple=True,
        help="File to read in a directory of adapters, such as LoRAs; repeatable.",
    ),
    click.option("--revision", help="Branch, tag or commit of a hub id."),
    click.option("--cache-dir", help="Hub cache directory, if not the default."),
)


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select parts of a source."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return only the options that were given."""
    return {name: value for name, value in options.items() if value}


def _parse_device_map(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> object:
    """Read a device map as JSON or as the Python code that a placement is printed with."""
    if text is None:
        return None
    text = text.strip().removeprefix("device_map").lstrip(" =")
    if not text.startswith("{"):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError) as exc:
        raise ArgumentError(
            'device_map: it cannot be read as a dict; quote the names, as in {"vae": "cuda:1"}'
        ) from exc


@click.command("plan")
@source_argument
@source_options
@click.option("--keep", is_flag=True, help="Plan for `warm` instead of `load_pipeline`.")
@click.option(
    "--device-map",
    callback=_parse_device_map,
    help="A strategy (auto, balanced, balanced_low_0, sequential), a device, or a dict of "
    "devices by component or path; auto if only an inventory is given.",
)
@click.option(
    "--inventory",
    help="Devices to plan for, such as 2x24GiB or cuda:0=24GiB,cpu=64GiB; this machine's "
    "if only a device map is given.",
)
@as_json_option
def plan_command(source: str, as_json: bool, **options: Any) -> None:
    """Show what loading SOURCE would do.

    It reads headers only. With --inventory or --device-map, show on which device each module would
    be.
    """
    found = shmload.plan(source, **given(options))
    if as_json:
        sums = {"decode_nbytes": found.decode_nbytes, "resident_nbytes": found.resident_nbytes}
        print_json("plan", plan=found, **sums)
    else:
        print_page(found.page())


@click.command("view")
@source_argument
@source_options
@click.option("--dir", "directory", type=click.Path(), required=True, help="Where to make it.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.")
@click.option("--verify", is_flag=True, help="Recompute the digests of all its segments.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@as_json_option
def view_command(source: str, directory: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Make a directory of weights in shared memory.

    It looks like SOURCE. Any program takes it as a path: `shmload view SOURCE --dtype bfloat16
    --dir DIR`, then `python server.py --model DIR`. Its weights are pinned. To end that, remove the
    directory, and `shmload rm SOURCE`. After a restart, give the command again.
    """
    progress = False if quiet else None
    made = shmload.view_directory(source, directory, progress=progress, **given(options))
    if as_json:
        print_json("view", directory=str(made))
    elif not quiet:
        say(f"{made}: ready")


# Warming ------------------------------------------------------------------------------------------


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
