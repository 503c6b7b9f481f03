"""A shard that is open for a load: its file, and what its header alone tells to do with it.

No weights are read here.
"""

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shmload._checkpoints.formats.known import detect_format
from shmload._checkpoints.header import truncated
from shmload._checkpoints.quantised import are_quantised, require_dequantised
from shmload._checkpoints.remote import pointed_object
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint, Source
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source, unreadable
from shmload._host.limits import no_memory
from shmload._host.procfs import file_system, is_remote
from shmload._host.shm import no_room, shm_free_nbytes, shm_nbytes
from shmload._segments.layout import Layout, lay_out, needs_conversion
from shmload._segments.metadata import NOWHERE, Metadata, home_of, make_metadata
from shmload._segments.names import identify, segment_name
from shmload.errors import ShardChanged, ShmloadError, WorkerError
from shmload.workers.messages import Reason

if TYPE_CHECKING:
    from shmload._segments.part import Part


class Shard(Descriptor):
    """One shard's open file and what is planned for it; owns the descriptor.

    Args:
        component: its name in the pipeline, or empty.
        path: of the shard.
        rule: the dtypes its tensors get.
        may_link: let the library map the file itself if it can.
        home: which model its segment belongs to.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: it cannot be opened, its header is wrong, or nothing dequantises it.
        LibraryError: the package that dequantises is not installed.
    """

    def __init__(
        self,
        component: str,
        path: Path,
        rule: Rule,
        *,
        may_link: bool,
        home: Metadata = NOWHERE,
        piece_nbytes: int | None = None,
    ) -> None:
        super().__init__(open_source(path))
        self.component = component
        self.path = path
        self.part: Part | None = None
        """What this process decodes it into, until that is published; the load's."""
        self._piece_nbytes = piece_nbytes
        try:
            self._plan(rule, may_link, home)
        except BaseException:
            self.close()
            raise

    def _plan(self, rule: Rule, may_link: bool, home: Metadata) -> None:
        self.stat = os.fstat(self.fd)
        """The result of fstat before the header was read."""
        file_format = detect_format(self.fd, self.path)
        self.header = header = file_format.read_header(self.fd, self.path)
        pointed = pointed_object(self.fd)
        self.shown = pointed.url if pointed else self.path
        """What errors of a decode call it: the path, or the URL of what is read in its place."""
        identity = identify(self.path, self.stat)
        # If the file has the wanted dtypes, every rule makes the same segment: give it one name.
        is_cast = needs_conversion(header, rule) and not are_quantised([header])
        self.rule = applied = rule if is_cast else RAW
        """The one by which its segment is made."""
        self._metadata = make_metadata(os.path.abspath(self.path), identity, applied.text, home)
        self.leaves_casts = any(rule.leaves_cast(tensor, applied) for tensor in header.tensors)
        """Whether the library certainly casts some of its tensors."""
        self.name = segment_name(identity, applied.text)
        """Of its segment, whether or not that exists."""
        self.resident_nbytes = shm_nbytes(self.name) or 0
        """Size of the segment, in bytes, if it is resident."""
        can_link = may_link and file_format.can_be_linked and applied == RAW
        self.is_linked = (
            can_link
            and not self.resident_nbytes
            and not is_remote(file_system(self.stat.st_dev))  # last: it reads all mounts
        )
        """Whether the library maps the file directly: its format allows that, it has the wanted
        dtypes and lies on a local disk."""
        if not (self.is_linked or self.resident_nbytes):
            require_dequantised(self.path, header.tensors, applied)

    @functools.cached_property
    def layout(self) -> Layout:
        """What its segment has; a load that attaches it needs no layout."""
        return lay_out(self.header, self.rule, self._metadata, self._piece_nbytes)

    def require_unchanged(self) -> None:
        """Check that the file still has the bytes that it had.

        The change time also moves when another file is renamed over this one. The descriptor then
        still reads the old bytes, so a new change time is accepted if the link count fell.

        Raises:
            ShardChanged: it has others, or may have.
        """
        before, after = self.stat, os.fstat(self.fd)
        is_same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
        is_unmoved = before.st_ctime_ns == after.st_ctime_ns or after.st_nlink < before.st_nlink
        if not (is_same and is_unmoved):
            raise self._changed()

    def failure(self, reason: Reason, detail: str, offset: int) -> ShmloadError:
        """Return the error for a piece that could not be filled.

        Args:
            reason: what went wrong.
            detail: what the kernel or the worker says of it.
            offset: where in the shard, in bytes.
        """
        match reason:
            case Reason.TRUNCATED:
                return truncated(self.shown, self.stat.st_size, offset)
            case Reason.READ_ERROR:
                return unreadable(self.shown, detail)
            case Reason.CHANGED:
                return self._changed()
            case Reason.NO_SPACE:
                return no_room(
                    self.layout.nbytes,
                    shm_free_nbytes(),
                    "/dev/shm",
                    "another process took the room; free some with `shmload rm` or enlarge it",
                )
            case Reason.NO_MEMORY:
                return no_memory(self.shown)
            case Reason.INTERNAL:
                text = f"a worker failed while it decoded {self.shown}; please report this"
                error = WorkerError(text, path=self.shown)
                error.add_note(detail)
                return error

    def _changed(self) -> ShardChanged:
        return ShardChanged(
            f"{self.shown} changed while it was read; load again when no process writes to it",
            path=self.shown,
        )


def open_checkpoint(
    source: Source,
    checkpoint: Checkpoint,
    rule: Rule,
    *,
    may_link: bool,
    piece_nbytes: int | None = None,
) -> list[Shard]:
    """Open and plan all shards of a checkpoint; the caller closes them.

    If only all headers together say that the weights are quantised, none is cast.

    Args:
        source: what it is a part of.
        checkpoint: the checkpoint.
        rule: the dtypes its tensors get.
        may_link: as for a shard.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: a shard cannot be opened, or its header is wrong.
    """
    component, home = checkpoint.component, home_of(source, checkpoint.component)
    with contextlib.ExitStack() as opened:
        shards = [
            opened.enter_context(
                Shard(
                    component, path, rule, may_link=may_link, home=home, piece_nbytes=piece_nbytes
                )
            )
            for path in checkpoint.shards
        ]
        is_cast = any(shard.rule != RAW for shard in shards)
        if is_cast and len(shards) > 1 and are_quantised([shard.header for shard in shards]):
            return open_checkpoint(
                source, checkpoint, RAW, may_link=may_link, piece_nbytes=piece_nbytes
            )
        opened.pop_all()
        return shards
