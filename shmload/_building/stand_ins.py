"""Stand-ins for a load's segments: files of the same length and header, without the bytes.

Models are built over them as over segments. They have no name and take no memory, but for headers
and the pages that are touched.
"""

from collections.abc import Mapping
from typing import Self

from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rule import Rule
from shmload._host.shm import write_at
from shmload._loading.holdings import Holdings
from shmload._segments.part import Hollow
from shmload._segments.segment import Stay

# Whether code has read a larger tensor is told by the kernel's page table.
_SMALL_NBYTES = 160 << 10
# Any float of these bytes is a small number other than zero.
_PATTERN = b"\x21\x3c"


class StandIns:
    """What an ordinary build asks of a load, without a decode; a context that closes the files.

    Args:
        source: what to build.
        rules: the rule of each component's checkpoint.

    Raises:
        CheckpointError: a shard cannot be opened, or its header is wrong.
    """

    def __init__(self, source: Source, rules: Mapping[str, Rule]) -> None:
        self.holdings = _HollowHoldings(Stay.PRIVATE, is_hollow=True)
        try:
            self.holdings.open_shards(source, rules, None)
            self.holdings.stand_in()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; models that were built over them stay valid."""
        self.holdings.close()

    def mark_small(self) -> None:
        """Write numbers other than zero into all tensors whose reading nothing else would show."""
        for name, fd in self.holdings.open_files():
            header = read_header(fd, name)
            for spec in header.tensors:
                if 0 < spec.nbytes <= _SMALL_NBYTES:
                    content = (_PATTERN * (spec.nbytes // 2 + 1))[: spec.nbytes]
                    write_at(fd, content, header.data_offset + spec.begin)


class _HollowHoldings(Holdings):
    def stand_in(self) -> None:
        """Make a file for each shard."""
        for shard in self._shards:
            name = shard.plan.segment
            if name not in self._held:  # two paths may lead to one file
                self._held[name] = hollow = Hollow(name)
                hollow.prepare(shard.layout)
