"""A shard that is open for a load."""

from pathlib import Path

from shmload._checkpoints.remote import pointed_object
from shmload._checkpoints.rule import Rule
from shmload._decoding.job import Job
from shmload._host.descriptors import Descriptor
from shmload._host.linux import open_source
from shmload._loading.plan import Action, plan_shard
from shmload._segments.part import Hollow, Part


class OpenShard(Descriptor):
    """One shard's open file and what is planned for it; owns the descriptor.

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

    @property
    def is_link(self) -> bool:
        """Whether the library maps the file directly."""
        return self.plan.action is Action.LINK

    @property
    def is_pointer(self) -> bool:
        """Whether the file only points to the shard, an object elsewhere."""
        return pointed_object(self.fd) is not None

    def job(self, part: Part | Hollow) -> Job:
        """Return the job that decodes it into a part; both descriptors stay with their owners."""
        return Job(
            path=self.plan.path,
            source_fd=self.fd,
            source=self.source,
            part_fd=part.fd,
            nbytes=self.layout.nbytes,
            pieces=self.layout.pieces,
        )
