"""The commands on what is resident: `shmload ls`, `pin`, `unpin`, `rm`, `save`, `gc`, `verify`."""

import contextlib
import sys
from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem

import shmload
from shmload._checkpoints.wanted import is_publication
from shmload._cli.output import as_json_option, print_json, print_page, say
from shmload._segments.listing import SegmentInfo, Segments, amount_of, segments_by_lock
from shmload._segments.models import find_models, select
from shmload._segments.upkeep import (
    evict_segments,
    find_garbage,
    pin,
    pinned_outdated,
    unpin,
    verify_each,
)
from shmload._wording import count_of, format_nbytes
from shmload.errors import SegmentBusy, ShmloadError


# It runs at every press of the Tab key: it reads headers in /dev/shm, and neither processes nor
# weights.
def _complete_names(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the names that begin so, their last folders and their ids; or else paths."""
    offered = {}
    # Nothing may be printed between what the user types.
    with contextlib.suppress(ShmloadError, OSError):
        for model in find_models(segments_by_lock()):
            for word in (model.id, model.name.rpartition("/")[2], model.name):
                if word.startswith(typed) and (typed or word == model.name):
                    offered[word] = f"{model.full_name}, {format_nbytes(model.nbytes)}"
    if not offered:
        return [CompletionItem(typed, type="file")]
    return [CompletionItem(name, help=text) for name, text in sorted(offered.items())]


def _names_argument(*, is_required: bool = False) -> Callable[..., click.Command]:
    return click.argument(
        "patterns",
        nargs=-1,
        required=is_required,
        metavar="NAME|ID|PATH..." if is_required else "[NAME|ID|PATH]...",
        shell_complete=_complete_names,
    )


@click.command("ls")
@click.option("--long", "is_long", is_flag=True, help="Show ids, and the segments of each model.")
@as_json_option
def list_command(is_long: bool, as_json: bool) -> None:
    """List resident models, and what is being decoded."""
    found = shmload.models()
    if as_json:
        print_json("ls", models=found, decoding=found.decoding)
        return
    print_page(found.page(with_ids=is_long))
    if is_long and found:
        click.echo()
        print_page(Segments(info for model in found for info in model.segments).page())


def _pinning(verb: str, change: Callable[..., list[SegmentInfo]], text: str) -> click.Command:
    """Return the command that pins or unpins models."""

    @click.command(verb, help=text)
    @_names_argument(is_required=True)
    @as_json_option
    def command(patterns: tuple[str, ...], as_json: bool) -> None:
        changed = change(*patterns)
        if as_json:
            print_json(verb, **{f"{verb}ned": changed})
        else:
            say(_change(changed, shmload.segments(), f"{verb}ned"))

    return command


pin_command = _pinning(
    "pin",
    pin,
    """Keep models until they are removed.

    They are given as for `shmload rm`, and never evicted to make room or because they are idle.
    """,
)
unpin_command = _pinning(
    "unpin",
    unpin,
    """Let pinned models be evicted again.

    They are given as for `shmload rm`, and stay resident.
    """,
)


@click.command("rm")
@_names_argument()
@click.option("--all", "everything", is_flag=True, help="Remove everything of this user.")
@as_json_option
def remove_command(patterns: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Remove resident models.

    Each is given by its name, its id, or the path of its files or of a directory above. A part of a
    name is enough if no other model has it. What a process uses stays, and the exit code is then 1.
    What another resident model shares stays too.
    """
    if everything and patterns:
        raise click.UsageError("--all removes everything: leave out the names, or leave out --all")
    if not patterns and not everything:
        raise click.UsageError("give names, ids or paths, or --all")
    before = shmload.segments()
    chosen = select(patterns, before)
    busy: SegmentBusy | None = None
    try:
        removed: list[SegmentInfo] = evict_segments(chosen)
    except SegmentBusy as exc:
        busy, removed = exc, [info for info in before if info.name in exc.removed]
    if as_json:
        print_json("rm", removed=removed, in_use=list(busy.names) if busy else [])
    elif removed or not busy:
        say(_change(removed, before, "removed"))
    if busy:
        raise busy


@click.command("save")
@click.argument("source", metavar="shm:NAME", shell_complete=_complete_names)
@click.argument("directory", type=click.Path(file_okay=False))
def save_command(source: str, directory: str) -> None:
    """Write a publication as an ordinary checkpoint.

    save_pretrained writes it to DIRECTORY.
    """
    if not is_publication(source):
        raise click.UsageError(f"{source} is no publication; give a name like shm:watercolour")
    from shmload._building.publishing import load_published

    thing = load_published(source)
    if not hasattr(thing, "save_pretrained"):
        raise click.UsageError(f"{source} is a {type(thing).__name__}, which cannot save itself")
    thing.save_pretrained(directory)
    say(f"saved {source} in {directory}")


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed; remove nothing.")
@as_json_option
def collect_command(dry_run: bool, as_json: bool) -> None:
    """Remove what can never be used again.

    That is what killed processes left, and segments whose files have changed or whose time is over.
    """
    before = segments_by_lock()
    removed = find_garbage() if dry_run else shmload.collect_garbage()
    if as_json:
        print_json("gc", removed=removed, dry_run=dry_run)
        return
    known = [info for info in before if info.name in removed]
    say(_change(known, known, "would remove" if dry_run else "removed"))
    if others := sorted({*removed} - {info.name for info in known}):
        say(f"and {count_of(len(others), 'leftover')} of killed processes: {', '.join(others)}")
    for model in find_models(pinned_outdated()):
        say(
            f"{model.full_name}: pinned, so it stays, though its files have changed; "
            "see shmload unpin"
        )


@click.command("verify")
@_names_argument()
@as_json_option
def verify_command(patterns: tuple[str, ...], as_json: bool) -> None:
    """Recompute the digests of resident models.

    They are given as for `shmload rm`; all if none is given. The exit code is 1 if one is corrupt.
    """
    sound: list[SegmentInfo] = []
    corrupt: list[SegmentInfo] = []
    for info, error in verify_each(*patterns):
        if error:
            of = f"{info.source}: " if info.source else ""
            say(f"shmload: {of}{error}", err=True)
        (corrupt if error else sound).append(info)
    if as_json:
        print_json("verify", sound=sound, corrupt=[info.name for info in corrupt])
    elif sound or not corrupt:
        say(f"sound: {amount_of(sound)}")
    if corrupt:
        sys.exit(1)


def _change(changed: Sequence[SegmentInfo], among: Sequence[SegmentInfo], did: str) -> str:
    """Write what was done to segments: their amount, and the models that they are part of."""
    chosen = {info.name for info in changed}
    models = (m for m in find_models(among) if any(info.name in chosen for info in m.segments))
    names = ", ".join(dict.fromkeys(model.full_name for model in models))
    return f"{did} {amount_of(changed)}{f': {names}' if names else ''}"
