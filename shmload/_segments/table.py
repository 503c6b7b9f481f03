"""What is resident and what is being decoded, as the list that `shmload ls` prints."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from shmload._segments.listing import (
    amount_of,
    describe_users,
    holders,
    name_users,
    parts_under_way,
    segments_by_lock,
    users_of,
)
from shmload._segments.models import Model, find_models
from shmload._tables import Cell, Listing, Page, Table
from shmload._wording import count_of, format_age, format_nbytes, format_time

# For narrow terminals they are left out where they would say nothing.
_OPTIONAL = ("KEPT", "COMPONENTS")


class Models(Listing[Model]):
    """Resident models, as a list that is printed as a table.

    Attributes:
        decoding: what was being decoded when they were listed. A segment is among them once its
            header is written; `used_by` are the processes that decode it.
    """

    def __init__(self, found: Iterable[Model] = (), decoding: Sequence[Model] = ()) -> None:
        super().__init__(found)
        self.decoding = tuple(decoding)

    def page(self, *, with_ids: bool = False) -> Page:
        """Return a row for each model and each decode, and the totals.

        Args:
            with_ids: begin each row with the model's id, in the place of its components.
        """
        blocks: list[Table | str] = [_table_of(self, with_ids)] if self else []
        if self.decoding:
            blocks += [*([""] if self else []), _table_of_decodes(self.decoding)]
        return Page((*blocks, *([""] if self.decoding else []), self.totals()))

    def totals(self) -> str:
        """Write how many models are resident, their size, and how much is being decoded."""
        found = [info for model in self for info in model.segments]
        text = f"{count_of(len(self), 'model')}, {amount_of(found)}"
        if self.decoding:
            done = format_nbytes(sum(map(_done, self.decoding)))
            nbytes = format_nbytes(sum(each.nbytes for each in self.decoding))
            text += f"; being decoded: {done} of {nbytes}"
        return text


def _done(model: Model) -> int:
    """Return how much of a model's segments is filled, in bytes."""
    return sum(info.done_nbytes for info in model.segments)


def models() -> Models:
    """List this user's resident models, the oldest first, and what is being decoded.

    Printed, and in a notebook, the list is the table of `shmload ls`.
    """
    found = segments_by_lock()
    # It reads the mappings, so once for all.
    users = describe_users(users_of(info.name for info in found))
    seen = [
        msgspec.structs.replace(info, is_leased=True) if info.name in users else info
        for info in found
    ]
    parts = parts_under_way()
    builders = describe_users(holders(info.name for info in parts))
    return Models(find_models(seen, users), find_models(parts, builders))


def _table_of(found: Iterable[Model], with_ids: bool) -> Table:
    now = time.time()
    rows = [_row(model, now) for model in found]
    hidden = {title for title in _OPTIONAL if all(row[title] == "-" for row in rows)}
    hidden.add("COMPONENTS" if with_ids else "ID")
    titles = [title for title in rows[0] if title not in hidden]
    return Table(
        titles=tuple(titles),
        rows=[[row[title] for title in titles] for row in rows],
        right=(titles.index("SIZE"),),
    )


def _row(model: Model, now: float) -> dict[str, str | Cell]:
    users = name_users(model.used_by) or ("unknown" if model.is_leased else "-")
    name = Cell(f"{model.name} (changed)", "yellow")
    return {
        "ID": model.id,
        "MODEL": Cell(model.name, "bold") if model.is_current else name,
        "DTYPE": model.dtype or "-",
        "SIZE": format_nbytes(model.nbytes),
        "USED BY": Cell(users, "green" if model.is_leased else ""),
        "IDLE": "-" if model.is_leased else format_age(now - model.used_at),
        "KEPT": _kept(model, now),
        "COMPONENTS": ", ".join(model.components) or "-",
    }


def _kept(model: Model, now: float) -> str:
    """Write how long a model stays while no process uses it, if something says that."""
    if model.pinned_segments:
        return "pinned" if model.is_pinned else "partly pinned"
    if not model.keep_for_s:
        return "-"
    left_s = model.keep_for_s if model.is_leased else model.used_at + model.keep_for_s - now
    return format_time(left_s)


def _table_of_decodes(found: Iterable[Model]) -> Table:
    rows = [
        (
            Cell(each.name, "bold"),
            each.dtype or "-",
            format_nbytes(_done(each)),
            format_nbytes(each.nbytes),
            name_users(each.used_by) or "unknown",
        )
        for each in found
    ]
    titles = ("BEING DECODED", "DTYPE", "DONE", "SIZE", "BY")
    return Table(titles=titles, rows=rows, right=(2, 3))
