"""`warm` and `view`: make segments resident, and lend a path to them."""

import contextlib
import os
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import name_in_view
from shmload._checkpoints.source import LeftOut, Source, find_left_out, why_none_is_read
from shmload._checkpoints.wanted import Wanted, require_bools
from shmload._host.limits import repair_errors
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import complete_load, find_with_rules, require_read
from shmload._loading.trace import Phase, describe_times, tracing
from shmload._segments.models import Model
from shmload._segments.segment import Stay
from shmload._segments.upkeep import move_pins
from shmload._segments.view import View
from shmload._settings import parse_keep_for
from shmload._tables import Page, Printable
from shmload._wording import count_of, format_nbytes, logger_of, printing
from shmload.errors import ArgumentError

logger = logger_of(__name__)


class WarmReport(Printable, msgspec.Struct, frozen=True, kw_only=True):
    """What `warm` did; printed, the lines of `shmload warm`."""

    source: str
    segments: tuple[str, ...]
    """Names of the source's segments, all resident now."""
    resident_nbytes: int
    """Total size of these segments, in bytes."""
    read_nbytes: int
    """Bytes of weights read from the source; 0 if all segments were resident before."""
    elapsed_s: float
    """Duration of the call, in seconds."""
    times_s: dict[str, float]
    """The time of each phase, in seconds, which add up to it: `find`, `plan`, `import`,
    `make room`, `wait for another`, `read and cast`, `rest`; and those of loads, which are 0."""
    left_out: tuple[LeftOut, ...] = ()
    """Files of weights that are left to the libraries, because shmload does not read them."""
    evicted: tuple[Model, ...] = ()
    """The models, or parts of models, that were evicted to make room for it."""

    def page(self) -> Page:
        """Return a line for the source, and one for each that went or was left to the library."""
        resident = format_nbytes(self.resident_nbytes)
        done = f"already resident, {resident}"
        if self.read_nbytes:
            others = dict(self.times_s)
            reading_s = others.pop(Phase.READ.value)
            times = describe_times(others)
            done = (
                f"{resident} resident in {count_of(len(self.segments), 'segment')}, "
                f"{format_nbytes(self.read_nbytes)} read in {reading_s:.1f} s"
                f"{times and f' ({times})'}"
            )
        left = (f"left to the library: {each}" for each in self.left_out)
        lines = (done, *(each.eviction for each in self.evicted), *left)
        return Page(tuple(printing(f"{self.source}: {line}") for line in lines))


def warm(
    source: str | os.PathLike[str],
    *,
    pipeline_class: type | str | None = None,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    pin: bool = False,
    keep_for: float | str | timedelta | None = None,
    trace: str | os.PathLike[str] | None = None,
    **hub_kwargs: Any,
) -> WarmReport:
    """Decode a source into resident segments, which later loads with the same arguments attach.

    Segments that are resident already stay as they are; their shards are not read.

    Args:
        source: the directory of a pipeline or component, a file of weights, or a hub id.
        pipeline_class: the same as for the later `load_pipeline`: a class of pipelines or its
            name, whose components alone are decoded. None for all components.
        dtype: the same as for the later `load_pipeline`: a dtype, its name, `auto`, a dict of these
            by component, or None.
        components: only these components; None for all.
        variant: as for `from_pretrained`, such as `fp16`.
        workers: number of worker processes; None for the number in the settings.
        verify: recompute the digests of all segments, resident ones too.
        progress: as for `load_state_dict`.
        pin: never evict the segments to make room, as `shmload.pin` does. A pin of an earlier
            version of the files moves to the segments of this one in any case, unless `keep_for`
            gives these a time.
        keep_for: how long the segments stay while no process uses them: a text such as `2h` or
            `90min`, a number of seconds, or a `timedelta`; `forever` for no limit; None leaves the
            limit of segments that are resident already, and gives new ones none.
        trace: as for `load_pipeline`.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`,
            `subfolder`; and `weight_name`, the name or names of the files to read in a directory
            that is no model's, such as one of LoRAs or IP-Adapters.

    Raises:
        ArgumentError: `keep_for` is no time, or `pin` is given too; or there is no such class.
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError, CapacityError, WorkerError,
        SegmentError: this call has left nothing in shared memory.
    """
    began = time.monotonic()
    require_bools(verify=verify, pin=pin)
    keep_for_s = None if keep_for is None else parse_keep_for(keep_for)
    if pin and keep_for_s:
        raise ArgumentError("pin and keep_for exclude each other: what is pinned stays when idle")
    wanted = Wanted.parse(source, dtype, components, variant, hub_kwargs, function=warm)
    with tracing(trace, wanted.title) as timed, Progress(progress, wanted.title) as counter:
        found, rules = find_with_rules(wanted, counter, pipeline_class=pipeline_class)
        require_read(found, wanted)
        with complete_load(found, rules, counter, Stay.RESIDENT, workers, verify) as load:
            held = load.holdings.segments()
            if not keep_for_s:
                move_pins(held)
            for segment in held:
                if pin:
                    segment.pin()
                if keep_for_s is not None:
                    segment.keep_for(keep_for_s)
            left_out = find_left_out(found)
            for each in left_out:  # a preload list's log has this line
                logger.info("%s: left to the library: %s", source, each)
            return WarmReport(
                source=str(source),
                segments=tuple(segment.name for segment in held),
                resident_nbytes=sum(segment.nbytes for segment in held),
                read_nbytes=load.read_nbytes,
                elapsed_s=time.monotonic() - began,
                times_s=timed.times_s(),
                left_out=left_out,
                evicted=tuple(load.evicted),
            )


@contextlib.contextmanager
def view(
    source: str | os.PathLike[str],
    *,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    keep: bool = False,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> Iterator[Path]:
    """Lend a path that looks like the source, and whose weights lie decoded in shared memory.

    Use it with code that takes a path: `load_lora_weights`, `from_single_file`, peft, transformers.

    Args:
        source: as for `warm`. What shmload does not read in a directory is linked as it is, with
            a warning.
        dtype: as for `warm`. In a single file, or a directory without a known class, all
            floats get it.
        components: as for `warm`.
        variant: as for `warm`.
        keep: leave the segments resident. False: new segments go with the last tensor over them.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `warm`.
        hub_kwargs: as for `warm`.

    Yields:
        A directory, or a file if the source is one. It exists only inside the `with` block;
        tensors that were mapped through it stay valid.

    Raises:
        As `warm`. An error that the block raises passes through. It has the source's path in its
        text instead of the view's.
    """
    require_bools(keep=keep, verify=verify)
    wanted = Wanted.parse(source, dtype, components, variant, hub_kwargs, function=view)
    stay = Stay.RESIDENT if keep else Stay.PRIVATE
    with contextlib.ExitStack() as ending:
        with Progress(progress, wanted.title) as counter:
            found, rules = find_with_rules(wanted, counter, may_be_unread=True)
            load = ending.enter_context(complete_load(found, rules, counter, stay, workers, verify))
        lent = ending.enter_context(View(found.root, load.holdings.files()))
        note = _note_of_left_out(found)
        if note:
            logger.warning("%s", note)
        try:
            yield lent.path
        except Exception as exc:
            repair_errors(exc, lambda text: text.replace(str(lent.path), str(found.root)))
            for each in filter(None, (note, _note_of_other_name(found, str(exc)))):
                exc.add_note(f"shmload: {each}")
            raise


def _note_of_other_name(source: Source, text: str) -> str:
    """Say what a file is called in the view, if a library's error names it; else empty.

    A library that is told to load `lora.bin` finds no such file: a segment is in safetensors.
    """
    for shard in source.shards:
        name = name_in_view(shard.name)
        if name != shard.name and shard.name in text:
            return f"in the view {shard.name} is called {name}: give that name"
    return ""


def _note_of_left_out(source: Source) -> str:
    """Say what of a source is not shared, if it has weights that shmload does not read."""
    if not source.checkpoints:
        return f"{source.given}: {why_none_is_read(source)}"
    files = ", ".join(map(str, find_left_out(source)))
    return f"{source.given}: left to the library: {files}" if files else ""
