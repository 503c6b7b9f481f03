"""Shards that are open for a load."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from shmload._checkpoints.quantised import are_quantised
from shmload._checkpoints.remote import pointed_object
from shmload._checkpoints.resolve import Checkpoint
from shmload._checkpoints.rule import RAW, Rule
from shmload._decoding.job import Job
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload._loading.plan import Action, plan_shard
from shmload._loading.unpacking import unpack
from shmload._segments.layout import Layout
from shmload._segments.part import Hollow, Part


class OpenShard(Descriptor):
    """One shard's open file and what is planned for it; owns the descriptor.

    If torch has to unpickle the file, it also owns the unpickled copy.

    Args:
        component: its name in the pipeline, or empty.
        path: of the shard.
        rule: the dtypes its tensors get.
        keep: make its segment resident.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: it cannot be opened, or its header is wrong.
    """

    def __init__(
        self,
        component: str,
        path: Path,
        rule: Rule,
        *,
        keep: bool,
        piece_nbytes: int | None = None,
    ) -> None:
        super().__init__(open_source(path))
        self._copy = Descriptor(-1)
        try:
            planned = plan_shard(
                component, path, self.fd, rule, keep=keep, piece_nbytes=piece_nbytes
            )
        except BaseException:
            self.close()
            raise
        self.plan = planned.plan
        self.source = planned.source
        self._lay_out = planned.lay_out
        self.leaves_casts = planned.leaves_casts
        self.header = planned.header

    def close(self) -> None:
        """Close the file, and free the unpickled copy; a second call does nothing."""
        self.forget_copy()
        super().close()

    def forget_copy(self) -> None:
        """Free the unpickled copy, if there is one; a second call does nothing."""
        self._copy.close()

    @property
    def layout(self) -> Layout:
        """What its segment has; planned when it is first asked for."""
        return self._lay_out()

    @property
    def is_link(self) -> bool:
        """Whether the library maps the file directly."""
        return self.plan.action is Action.LINK

    @property
    def is_pointer(self) -> bool:
        """Whether the file only points to the shard, an object elsewhere."""
        return pointed_object(self.fd) is not None

    @property
    def copy_nbytes(self) -> int:
        """Size of the unpickled copy that a decode needs beside the segment, in bytes; else 0."""
        return self.header.data_nbytes if self.header.is_unpickled else 0

    @property
    def needs_copy(self) -> bool:
        """Whether `make_copy` has to be called before `job`."""
        return self.header.is_unpickled and self._copy.fd < 0

    def make_copy(self, go_on: Callable[[], None]) -> None:
        """Have torch unpickle the file, in a process of its own; blocks until that is done.

        Args:
            go_on: called several times a second; what it raises ends the call.

        Raises:
            CheckpointError, CapacityError, WorkerError: as `unpack`.
        """
        assert self.header.is_unpickled
        self._copy.fd = unpack(self.plan.path, self.fd, self.source, self.header, go_on)

    def job(self, part: Part | Hollow) -> Job:
        """Return the job that decodes it into a part; both descriptors stay with their owners."""
        assert not self.needs_copy
        source_fd = self.fd if self._copy.fd < 0 else self._copy.fd
        pointed = pointed_object(self.fd)
        return Job(
            path=pointed.url if pointed else self.plan.path,
            source_fd=source_fd,
            source=self.source if source_fd == self.fd else os.fstat(source_fd),
            part_fd=part.fd,
            nbytes=self.layout.nbytes,
            pieces=self.layout.pieces,
        )


def open_checkpoint(
    checkpoint: Checkpoint, rule: Rule, *, keep: bool, piece_nbytes: int | None = None
) -> list[OpenShard]:
    """Open and plan all shards of a checkpoint; the caller closes them.

    If only all headers together say that the weights are quantised, none is cast.

    Args:
        checkpoint: the checkpoint.
        rule: the dtypes its tensors get.
        keep: make its segments resident.
        piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

    Raises:
        CheckpointError: a shard cannot be opened, or its header is wrong.
    """
    with contextlib.ExitStack() as opened:
        shards = [
            opened.enter_context(
                OpenShard(checkpoint.component, path, rule, keep=keep, piece_nbytes=piece_nbytes)
            )
            for path in checkpoint.shards
        ]
        is_cast = any(shard.plan.conversion != RAW.text for shard in shards)
        if is_cast and len(shards) > 1 and are_quantised([shard.header for shard in shards]):
            return open_checkpoint(checkpoint, RAW, keep=keep, piece_nbytes=piece_nbytes)
        opened.pop_all()
        return shards
