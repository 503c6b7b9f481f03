"""Copies what moves say, while a load still decodes some of it."""

import bisect
import itertools
from collections.abc import Iterable

from shmload._devices.moves import Move, Moves, Overlaps
from shmload._devices.upload import Files, Upload
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings
from shmload._loading.load import Load


def bring(
    moves: Moves,
    load: Load | None = None,
    max_nbytes: int | None = None,
    files: Iterable[tuple[Inode, int]] = (),
) -> None:
    """Copy all bytes of moves, those that a load decodes as they come; blocks until all are there.

    Args:
        moves: to be made; the caller commits them.
        load: fills the segments that some of them lie in. If it is bounded, it gets its memory back
            behind the copy.
        max_nbytes: limit for the slots, in bytes.
        files: those that the moves' bytes lie in, as far as they are known, as for `Files`.

    Raises:
        ShmloadError: the load failed.
        torch.OutOfMemoryError: a device is full.
        RuntimeError: a driver failed.
    """
    if not moves.moves:
        if load:
            load.wait()
        return
    spans = sorted(mappings({part.inode for _, part in load.holdings.unfinished()}) if load else ())
    starts = [there.start for there in spans]

    def comes_later(move: Move) -> bool:
        position = bisect.bisect_right(starts, move.address)
        return position > 0 and move.address < spans[position - 1].end

    nbytes = sum(move.nbytes for move in moves.moves)
    with Upload(nbytes, moves.runtimes[0], max_nbytes, Files(files)) as upload:
        upload.copy(itertools.filterfalse(comes_later, moves.moves))
        coming = Overlaps(filter(comes_later, moves.moves))
        while load and spans and (piece := load.next_filled()) is not None:
            for there in spans:
                if there.inode == piece.inode:
                    base = there.start - there.offset
                    upload.copy(coming.within(base + piece.begin, base + piece.end))
            load.give_back(piece)
        if load:
            load.wait()
