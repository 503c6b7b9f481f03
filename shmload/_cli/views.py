"""The command `shmload view`, and what `shmload warm --views` does."""

from typing import Any

import click

import shmload
from shmload._checkpoints.dtypes import dtype_by_component
from shmload._cli.completion import complete_paths
from shmload._cli.ending import EndingCommand
from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._cli.source_options import given, source_options
from shmload._segments.protection import settle_leftovers
from shmload._segments.standing_views import ViewDirectory
from shmload.errors import ShmloadError


@click.command("view", cls=EndingCommand)
@click.argument("source", required=False, shell_complete=complete_paths)
@source_options
@click.option("--dir", "directory", type=click.Path(), help="Where to make the directory.")
@click.option(
    "--replace", is_flag=True, help="Put it in the place of a view directory of other arguments."
)
@click.option("--list", "is_list", is_flag=True, help="List the view directories.")
@click.option("--remove", metavar="DIR", type=click.Path(), help="Remove a view directory.")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes.")
@click.option("--verify", is_flag=True, help="Recompute the digests of all its segments.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@as_json_option
def view_command(
    source: str | None,
    directory: str | None,
    dtypes: tuple[str, ...],
    is_list: bool,
    remove: str | None,
    as_json: bool,
    quiet: bool,
    **where: Any,
) -> None:
    """Make a directory that looks like SOURCE, and whose weights lie in shared memory.

    Any program takes it as a path: `shmload view SOURCE --dtype bfloat16 --dir DIR`, then
    `python server.py --model DIR`. Its weights stay resident until `shmload view --remove DIR`.
    """
    if sum((source is not None or directory is not None, is_list, remove is not None)) != 1:
        raise click.UsageError("give SOURCE and --dir, or --list, or --remove DIR")
    if is_list:
        listed = shmload.view_directories()
        if as_json:
            print_json("view", views=listed, removed=[])
        else:
            print_page(listed.page())
        return
    if remove is not None:
        gone = shmload.remove_view_directory(remove)
        if as_json:
            print_json("view", views=[], removed=[gone])
        else:
            say(f"removed {gone.directory}; its weights stay resident until they must go")
        return
    if source is None or directory is None:
        raise click.UsageError("give both SOURCE and --dir")
    made = shmload.view_directory(
        source,
        directory,
        dtype=dtype_by_component(dtypes),
        progress=False if quiet else None,
        **given(where),
    )
    if as_json:
        print_json("view", views=[made], removed=[])
    elif not quiet:
        say(*str(made).split("\n"))


def restore_views(workers: int | None, *, quiet: bool) -> list[ViewDirectory | dict[str, str]]:
    """Restore all view directories; what fails is said, and the others go on.

    Returns:
        Each view directory, or its path and what went wrong.
    """
    settle_leftovers()
    answers: list[ViewDirectory | dict[str, str]] = []
    for each in shmload.view_directories():
        try:
            answers.append(
                shmload.restore_view_directory(
                    each.directory, workers=workers, progress=False if quiet else None
                )
            )
        except ShmloadError as exc:
            say(f"shmload: {each.directory}: {exc}", err=True)
            answers.append({"directory": each.directory, "error": str(exc)})
    return answers
