"""A shard that is open for a load."""

import os
from collections.abc import Callable
from pathlib import Path

from shmload._checkpoints.remote import pointed_object
from shmload._checkpoints.rule import Rule
from shmload._decoding.job import Job
from shmload._host.descriptors import Descriptor
from shmload._host.linux import open_source
from shmload._loading.plan import Action, plan_shard
from shmload._loading.unpacking import unpack
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
        self.layout = planned.layout
        self.leaves_casts = planned.leaves_casts
        self._unpickled = planned.unpickled

    def close(self) -> None:
        """Close the file, and free the unpickled copy; a second call does nothing."""
        self.forget_copy()
        super().close()

    def forget_copy(self) -> None:
        """Free the unpickled copy, if there is one; a second call does nothing."""
        self._copy.close()

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
        return self._unpickled.data_nbytes if self._unpickled else 0

    @property
    def needs_copy(self) -> bool:
        """Whether `make_copy` has to be called before `job`."""
        return self._unpickled is not None and self._copy.fd < 0

    def make_copy(self, go_on: Callable[[], None]) -> None:
        """Have torch unpickle the file, in a process of its own; blocks until that is done.

        Args:
            go_on: called several times a second; what it raises ends the call.

        Raises:
            CheckpointError, CapacityError, WorkerError: as `unpack`.
        """
        assert self._unpickled is not None
        self._copy.fd = unpack(self.plan.path, self.fd, self.source, self._unpickled, go_on)

    def job(self, part: Part | Hollow) -> Job:
        """Return the job that decodes it into a part; both descriptors stay with their owners."""
        assert not self.needs_copy
        source_fd = self.fd if self._copy.fd < 0 else self._copy.fd
        return Job(
            path=self.plan.path,
            source_fd=source_fd,
            source=self.source if source_fd == self.fd else os.fstat(source_fd),
            part_fd=part.fd,
            nbytes=self.layout.nbytes,
            pieces=self.layout.pieces,
        )
