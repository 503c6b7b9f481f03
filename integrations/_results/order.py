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

    A run that was killed may have begun an item that is gone now, and stored one behind it. If
    there is no new item for its number, its key is in the order: the item will fail.

    Nothing is changed, and no array is read.

    Args:
        folder: of results; need not exist.
        keys: of the items that there are now, in the order for those that are new.

    Raises:
        ResultsMismatch: an item without a result is gone, there is no new one for its number, and
            the folder does not have its key: the run did not begin it with `is_settled`.
        ResultsCorrupt: a file is not what was written.
        ResultsInaccessible: a file cannot be read.
    """
    with accessing(folder):
        known, begun = _known_keys(Path(folder))
    count = max(known, default=-1) + 1
    # What was begun keeps its number too, while it is there.
    there = set(keys).difference(known.values())
    for number, name in begun.items():
        if number < count and name in there:
            known[number] = name
            there.remove(name)
    taken = set(known.values())
    new = iter([key for key in keys if key not in taken])
    order = []
    for number in range(count):
        key = known[number] if number in known else next(new, None)
        if key is None and begun.get(number) not in taken:
            key = begun.get(number)  # it is gone, and nothing new is left for its number
        if key is None:
            reason = (
                f"it has an item {count - 1}, but item {number} has no result and is not there now"
            )
            raise ResultsMismatch(folder, reason)
        order.append(key)
        taken.add(key)
    return [*order, *new]


def _known_keys(folder: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return keys by number: of items that have a result or an error, and of those only begun."""
    known: dict[int, str] = {}
    begun: dict[int, str] = {}
    for name in os.listdir(folder) if folder.exists() else ():
        if number_of(name) is None:
            continue
        if is_journal(name):
            for head in read_heads(folder / name):
                (begun if head.is_begun else known)[head.index] = head.key
        else:
            contents = format_of(name).read_contents(folder / name)
            known |= dict(enumerate(contents.keys, contents.first))
    return known, {number: key for number, key in begun.items() if number not in known}
