"""What is resident and what is being decoded, as the list that `shmload ls` prints."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from shmload._host.descriptors import try_lock
from shmload._segments.listing import amount_of, segments_by_lock
from shmload._segments.metadata import Metadata
from shmload._segments.models import Model, find_models
from shmload._segments.names import part_names
from shmload._segments.segment import peek
from shmload._segments.users import User, describe_users, holders, name_users, users_of
from shmload._tables import Cell, Listing, Page, Table
from shmload._wording import count_of, format_age, format_nbytes, format_time
from shmload.errors import SegmentCorrupt

# For narrow terminals they are left out where they would say nothing.
_OPTIONAL = ("KEPT", "COMPONENTS")


class UnfinishedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or some of its shards, while they are being decoded."""

    name: str
    """As `Model.name`."""
    dtype: str
    """As `Model.dtype`."""
    source: str
    """Path of the directory or file that it is loaded from."""
    variant: str
    """As `Model.variant`."""
    parts: int
    """How many segments are being made."""
    nbytes: int
    """Size that they will have, in bytes."""
    done_nbytes: int
    """How much of them is filled, in bytes."""
    elapsed_s: float
    """How long ago the first of them was planned, in seconds."""
    built_by: tuple[User, ...]
    """The processes that load them, as far as this one can see them."""
    bytes_per_s: float
    """How fast they have been filled so far, in bytes per second."""


class _Part(Metadata, frozen=True, kw_only=True):
    name: str
    nbytes: int
    done_nbytes: int


def find_decoding() -> list[UnfinishedModel]:
    """List what is being decoded by processes of this user, by model.

    A part whose header is not written yet is left out. Weights that go straight to a device lie in
    no part.
    """
    names = list(part_names())
    if not names:
        return []
    users = describe_users(holders(names))
    groups: dict[tuple[str, str, str], list[_Part]] = {}
    for part in _living_parts(names, users):
        groups.setdefault((part.root, part.variant, part.dtype), []).append(part)
    return [_sum_up(parts, users) for parts in groups.values()]


def _sum_up(parts: Sequence[_Part], users: dict[str, tuple[User, ...]]) -> UnfinishedModel:
    first = parts[0]
    done = sum(part.done_nbytes for part in parts)
    elapsed_s = max(0.0, time.time() - min(part.created_at for part in parts))
    builders = {user.pid: user for part in parts for user in users.get(part.name, ())}
    name = first.model or first.source
    return UnfinishedModel(
        name=f"{name}:{first.variant}" if first.variant else name,
        dtype=first.dtype,
        source=first.root or first.source,
        variant=first.variant,
        parts=len(parts),
        nbytes=sum(part.nbytes for part in parts),
        done_nbytes=done,
        elapsed_s=elapsed_s,
        built_by=tuple(builders[pid] for pid in sorted(builders)),
        bytes_per_s=done / elapsed_s if elapsed_s > 0 else 0.0,
    )


def _living_parts(names: list[str], users: dict[str, tuple[User, ...]]) -> Iterator[_Part]:
    for part in filter(None, map(peek, names)):
        with part, contextlib.suppress(SegmentCorrupt):  # no header yet
            # /proc/locks names most builders; asking the lock itself is for the others, since it
            # holds a dead builder's part for a moment.
            if part.name in users or not try_lock(part.fd, exclusive=False):
                found = os.fstat(part.fd)
                yield _Part(
                    **msgspec.structs.asdict(part.read_metadata()),
                    name=part.name,
                    nbytes=found.st_size,
                    # stat(2): units of 512 bytes, whole pages
                    done_nbytes=min(found.st_size, 512 * found.st_blocks),
                )


class Models(Listing[Model]):
    """Resident models, as a list that is printed as a table.

    Attributes:
        decoding: what was being decoded when they were listed.
    """

    def __init__(
        self, found: Iterable[Model] = (), decoding: Sequence[UnfinishedModel] = ()
    ) -> None:
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
            done = format_nbytes(sum(each.done_nbytes for each in self.decoding))
            nbytes = format_nbytes(sum(each.nbytes for each in self.decoding))
            text += f"; being decoded: {done} of {nbytes}"
        return text


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
    return Models(find_models(seen, users), find_decoding())


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


def _table_of_decodes(found: Iterable[UnfinishedModel]) -> Table:
    rows = [
        (
            Cell(each.name, "bold"),
            each.dtype or "-",
            format_nbytes(each.done_nbytes),
            format_nbytes(each.nbytes),
            Cell(f"{format_nbytes(each.bytes_per_s)}/s", "green"),
            name_users(each.built_by) or "unknown",
        )
        for each in found
    ]
    titles = ("BEING DECODED", "DTYPE", "DONE", "SIZE", "RATE", "BY")
    return Table(titles=titles, rows=rows, right=(2, 3, 4))
