"""The order in which a run continues a folder of results, though items were added or removed."""

import os
from collections.abc import Sequence
from pathlib import Path

from shmload.errors import ResultsMismatch
from shmload.integrations._results.errors import accessing
from shmload.integrations._results.journal import read_heads
from shmload.integrations._results.names import format_of, is_journal, number_of


def continued_order(folder: str | os.PathLike[str], keys: Sequence[str]) -> list[str]:
    """Return the keys of all items in an order with which a folder can be continued.

    `dataprep.write` takes an item only at the number that it had before. So keys that the folder
    has keep their numbers, also those that are not given any more. The others follow in their
    order: first at numbers that have no result yet, then at the end. With the keys of the run
    before, in their order, the order is the same again.

    Nothing is changed, and no array is read.

    Args:
        folder: of results; need not exist.
        keys: of the items that there are now, in the order for those that are new.

    Raises:
        ResultsMismatch: items without a result are gone, and there are no new ones in their place.
        ResultsCorrupt: a file is not what was written.
        ResultsInaccessible: a file cannot be read.
    """
    with accessing(folder):
        known = _known_keys(Path(folder))
    there = set(known.values())
    new = iter([key for key in keys if key not in there])
    count = max(known, default=-1) + 1
    order = []
    for number in range(count):
        key = known[number] if number in known else next(new, None)
        if key is None:
            reason = (
                f"it has an item {count - 1}, but item {number} has no result and is not there now"
            )
            raise ResultsMismatch(folder, reason)
        order.append(key)
    return [*order, *new]


def _known_keys(folder: Path) -> dict[int, str]:
    """Return the keys of the items that a folder has results or errors of, by number."""
    known: dict[int, str] = {}
    for name in os.listdir(folder) if folder.exists() else ():
        if number_of(name) is None:
            continue
        if is_journal(name):
            known |= {head.index: head.key for head in read_heads(folder / name)}
        else:
            contents = format_of(name).read_contents(folder / name)
            known |= dict(enumerate(contents.keys, contents.first))
    return known
