"""The resident models, and what is being decoded, as a list and as the table of `shmload ls`."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from shmload._host.descriptors import try_lock
from shmload._segments.grouping import Model, group_segments
from shmload._segments.listing import SegmentInfo, amount_of, segments_by_lock
from shmload._segments.metadata import Metadata
from shmload._segments.names import part_names
from shmload._segments.roots import Root, find_roots, shards_below, tell_apart
from shmload._segments.segment import peek
from shmload._segments.users import User, describe_users, holders, name_users, users_of
from shmload._tables import Cell, Listing, Page, Table
from shmload._wording import count_of, format_age, format_nbytes, format_time
from shmload.errors import SegmentCorrupt

# For narrow terminals they are left out where they would say nothing.
_OPTIONAL = ("PINNED", "EXPIRES", "COMPONENTS")


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


def find_decoding(resident: Iterable[str] = ()) -> list[UnfinishedModel]:
    """List what is being decoded by processes of this user, by model.

    A part whose header is not written yet is left out. Weights that go straight to a device lie in
    no part.

    Args:
        resident: the sources of segments, whose models' names are for these alone.
    """
    names = list(part_names())
    if not names:
        return []
    users = describe_users(holders(names))
    found = list(_living_parts(names, users))
    roots = find_roots(part.source for part in found)
    by_key = {root.key: root for root in (*find_roots(resident).values(), *roots.values())}
    called = tell_apart(by_key.values())
    groups: dict[tuple[str, str], list[_Part]] = {}
    for part in found:
        groups.setdefault((roots[part.source].key, part.dtype), []).append(part)
    return [_sum_up(called[key], by_key[key], parts, users) for (key, _), parts in groups.items()]


def _sum_up(
    name: str, root: Root, parts: list[_Part], users: dict[str, tuple[User, ...]]
) -> UnfinishedModel:
    done = sum(part.done_nbytes for part in parts)
    elapsed_s = max(0.0, time.time() - min(part.created_at for part in parts))
    builders = {user.pid: user for part in parts for user in users.get(part.name, ())}
    return UnfinishedModel(
        name=name,
        dtype=parts[0].dtype,
        source=root.path,
        variant=root.variant,
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
            with_ids: begin each row with the model's id.
        """
        blocks: list[Table | str] = [_table_of(self, with_ids)] if self else []
        if self.decoding:
            blocks += [*([""] if self else []), _table_of_decodes(self.decoding)]
        return Page((*blocks, *([""] if self.decoding else []), self.totals()))

    def totals(self) -> str:
        """Write how many models are resident, their size, and how much is being decoded."""
        once = {info.name: info for model in self for info in model.segments}
        text = f"{count_of(len(self), 'model')}, {amount_of(list(once.values()))}"
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
    return Models(
        find_models(seen, users),
        find_decoding(info.source for info in found if info.source),
    )


def find_models(
    found: Sequence[SegmentInfo],
    users: Mapping[str, tuple[User, ...]] | None = None,
) -> list[Model]:
    """Group segments into models; look up where these lie on disk.

    Args:
        found: the segments.
        users: the processes that use them, by segment; None to leave them out.
    """
    roots = find_roots(info.source for info in found if info.source)
    by_key = {root.key: root for root in roots.values()}
    # Only where there are several sources can they share files.
    shards = {key: shards_below(root) for key, root in by_key.items()}
    return group_segments(found, roots, shards, users or {})


def _table_of(found: Iterable[Model], with_ids: bool) -> Table:
    now = time.time()
    rows = [_row(model, now) for model in found]
    hidden = {title for title in _OPTIONAL if all(row[title] == "-" for row in rows)}
    titles = [title for title in rows[0] if title not in hidden and (with_ids or title != "ID")]
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
        "LAST USED": "now" if model.is_leased else format_age(now - model.used_at),
        "PINNED": "yes" if model.is_pinned else "partly" if model.pinned_segments else "-",
        "EXPIRES": _expiry(model, now),
        "COMPONENTS": _components(model),
    }


def _components(model: Model) -> str:
    """Write which components are resident, and which are not."""
    absent = f" (not {', '.join(model.absent)})" if model.absent else ""
    return f"{', '.join(model.components)}{absent}" if model.components else "-"


def _expiry(model: Model, now: float) -> str:
    """Write when a model goes if no process uses it until then."""
    if not model.keep_for_s or model.is_pinned:
        return "-"
    if model.is_leased:
        return f"{format_time(model.keep_for_s)} idle"
    return f"in {format_time(model.used_at + model.keep_for_s - now)}"


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
