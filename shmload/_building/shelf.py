"""Pipelines within a budget: which are loaded, what they take, and which go to make room.

What counts on the host are the segments that pipelines of the shelf lie in, those of its models
that are idle in shared memory or pinned there, and the weights that lie in no segment. Each segment
counts once, and so does each copy on the device. Segments that only other processes use do not
count. What the program still refers to counts after its pipeline was given up.

It is not for several threads at once.
"""

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import torch

from shmload._building.alive import Alive
from shmload._building.device_copies import DeviceCopies, put_back
from shmload._building.mapped import Spans, host_tensors
from shmload._building.turns import PRIVATE, Entry, Turns
from shmload._building.weights import models_in
from shmload._compat import as_plain_tensors
from shmload._segments.listing import SegmentInfo, names_by_inode, segments_by_lock
from shmload._segments.removal import remove_idle
from shmload._segments.segment import Segment
from shmload._wording import logger_of
from shmload.errors import NoRoom, ShmloadError

logger = logger_of(__name__)

Sizes = Mapping[Hashable, int]
"""Sizes of segments, by name, or of copies on a device, in bytes."""

_Infos = dict[str, SegmentInfo]
_lent: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


class MustWait(Exception):
    """Raised if there is room only when pipelines are not used any more."""


def choose(order: Sequence[tuple[Entry, Sizes]], staying: Sizes, limit: int) -> list[Entry] | None:
    """Choose what to give up.

    Args:
        order: entries with what they take, the first to go first.
        staying: what stays whatever goes.
        limit: how much may stay, in bytes.

    Returns:
        The entries that go, from the beginning of `order`. One whose going frees nothing that is
        needed is left out. None if even all of them are not enough.
    """

    def fits(kept: Iterable[tuple[Entry, Sizes]]) -> bool:
        taken = dict(staying)
        for _, sizes in kept:
            taken |= sizes
        return sum(taken.values()) <= limit

    left, going = list(order), []
    while not fits(left):
        if not left:
            return None
        going.append(left.pop(0))
    for each in reversed(going[:-1]):
        if fits([*left, each]):
            going.remove(each)
            left.append(each)
    return [entry for entry, _ in going]


class Shelf:
    """Some pipelines, and their budget.

    Args:
        entries: all that may be loaded.
        nbytes: the budget on the host.
        copies: on the device; None to leave pipelines on the host.
        device_nbytes: the budget there.
    """

    def __init__(
        self,
        entries: Collection[Entry],
        nbytes: int,
        copies: DeviceCopies | None = None,
        device_nbytes: int = 0,
    ) -> None:
        self._entries = entries
        self._nbytes = nbytes
        self._copies = copies
        self._device_nbytes = device_nbytes
        self._alive = Alive()
        self.loads = self.given_up = self.copied_nbytes = self.most_held_nbytes = 0

    @property
    def held_nbytes(self) -> int:
        """What counts on the host, in bytes."""
        infos = _infos()
        counted = self._staying(infos)
        for entry in self._entries:
            counted |= _taken_by(infos, entry)
        return sum(counted.values())

    def is_ready(self, entry: Entry) -> bool:
        """Tell whether a pipeline is where it runs."""
        return entry.pipe is not None and (entry.brought is not None or self._copies is None)

    def make_ready(self, entry: Entry, turns: Turns) -> None:
        """Load a pipeline, and bring it to the device.

        Args:
            entry: it.
            turns: what may go for it.

        Raises:
            MustWait: there is room when the others are not used any more.
            NoRoom: there is none, whatever goes; nothing has gone then, unless the program still
                refers to what has.
            Exception: any error of the load.
        """
        if entry.pipe is None:
            self._look_up(entry)
            self._make_room(entry, turns)
            entry.pipe = entry.load()
            try:
                self.loads += 1
                self._count(entry)
                self.most_held_nbytes = max(self.most_held_nbytes, self.held_nbytes)
                self._make_room(entry, turns)  # for what was not foreseen
            except BaseException:
                self.drop([entry])
                self._remove([entry])
                raise
        if self._copies and entry.brought is None:
            self._bring(entry, self._copies, turns)

    def drop(self, entries: Iterable[Entry]) -> None:
        """Give up pipelines, also for who still refers to them; their segments stay resident."""
        loaded = [entry for entry in entries if entry.pipe is not None]
        for entry in loaded:
            self._leave_device(entry)
            # The variable of a `with` block keeps its value.
            vars(entry.pipe).clear()
            entry.pipe = None
        self.given_up += len(loaded)
        if loaded:
            gc.collect()  # modules refer to themselves

    # The host -------------------------------------------------------------------------------------

    def _look_up(self, entry: Entry) -> None:
        """Look up the segments of an entry, and once those of the others, which may be idle."""
        entry.segments = entry.find(False)
        entry.is_known = True
        for other in self._entries:
            if not other.is_known:
                other.is_known = True
                with contextlib.suppress(ShmloadError, OSError):  # its own use says what is wrong
                    other.segments = other.find(True)

    def _count(self, entry: Entry) -> None:
        """Count what a pipeline has, as long as any code refers to it."""
        names = names_by_inode()
        spans = Spans(set(names))
        entry.private_nbytes = 0
        found = set()
        with as_plain_tensors():
            models = models_in(entry.pipe).values()
            for tensor in itertools.chain(*map(host_tensors, models)):
                mapping = spans.find(tensor)
                label = names[mapping.inode] if mapping else PRIVATE
                found.add(label)
                added = self._alive.add([tensor], label)
                entry.private_nbytes += 0 if label else added
        infos = _infos()
        expected, entry.segments = entry.segments, {}
        # A structure has no tensor. What is left was needed to make the pipeline, and is not now.
        found |= {name for name in expected if name in infos and infos[name].needs}
        entry.segments = {name: infos[name].nbytes for name in found if name in infos}
        left = [name for name in expected if name in infos and name not in found]
        kept = {name for each in self._entries for name in each.segments}
        remove_idle([name for name in left if name not in kept], condition=_may_go)
        _lent.update(models)

    def _staying(self, infos: _Infos) -> dict[Hashable, int]:
        """Return what counts whatever goes: pinned, or referred to after it was given up."""
        loaded = [entry for entry in self._entries if entry.pipe is not None]
        in_use = {name for entry in loaded for name in entry.segments}
        private = self._alive.nbytes(PRIVATE) - sum(entry.private_nbytes for entry in loaded)
        staying: dict[Hashable, int] = {PRIVATE: max(0, private)}
        for name in {name for entry in self._entries for name in entry.segments} | (
            self._alive.labels - {PRIVATE}
        ):
            is_stale = name in self._alive.labels and name not in in_use
            if name in infos and (is_stale or self._is_fixed(infos[name], infos)):
                staying[name] = infos[name].nbytes
        return staying

    def _is_fixed(self, info: SegmentInfo, infos: _Infos) -> bool:
        """Tell whether a segment is pinned, or a publication needs it that stays."""
        needing = [each for each in infos.values() if each.source in info.needed_by]
        own = {name for entry in self._entries for name in entry.segments}
        return info.is_pinned or any(
            each.name not in own or self._is_fixed(each, infos) for each in needing
        )

    def _make_room(self, entry: Entry, turns: Turns) -> None:
        stuck: dict[Hashable, int] = {}
        while True:
            infos = _infos()
            going = self._choose(
                entry,
                entry.parts,
                turns.order(entry),
                functools.partial(_taken_by, infos),
                self._staying(infos) | stuck,
                self._nbytes,
                "the budget",
            )
            if not going:
                return
            with turns.claim(going) as are_free:
                if are_free:
                    logger.info("%s goes for %s", ", ".join(e.name for e in going), entry.name)
                    self.drop(going)
                    stuck |= self._remove(going)

    def _remove(self, gone: Collection[Entry]) -> dict[Hashable, int]:
        """Remove the segments that only these entries need; return what could not be removed."""
        kept = {name for each in self._entries if each not in gone for name in each.segments}
        infos = _infos()
        names = [name for each in gone for name in each.segments if name in infos]
        # A publication before what it needs.
        names.sort(key=lambda name: infos[name].created_at, reverse=True)
        going = [name for name in dict.fromkeys(names) if name not in kept]
        look = remove_idle(going, condition=_may_go)
        left = set(going).difference(look.idle)
        return {name: infos[name].nbytes for name in left if not infos[name].is_leased}

    # The device -----------------------------------------------------------------------------------

    def _bring(self, entry: Entry, copies: DeviceCopies, turns: Turns) -> None:
        models = models_in(entry.pipe)
        while True:
            known = dict[Hashable, int]()
            for each in self._entries:
                known |= _on_device(each)
            going = self._choose(
                entry,
                copies.sizes_of(models.values()),
                turns.order(entry),
                _on_device,
                {PRIVATE: max(0, copies.nbytes - sum(known.values()))},
                self._device_nbytes,
                "the budget of the device",
            )
            if not going:
                break
            with turns.claim(going) as are_free:
                for each in going if are_free else ():
                    self._leave_device(each)
        entry.brought, nbytes = copies.bring(models)
        self.copied_nbytes += nbytes

    def _leave_device(self, entry: Entry) -> None:
        if entry.brought:
            put_back(entry.brought)
            entry.brought = None

    # Both -----------------------------------------------------------------------------------------

    def _choose(
        self,
        entry: Entry,
        needed: Sizes,
        order: Sequence[Entry],
        taken_by: Callable[[Entry], Sizes],
        staying: Sizes,
        limit: int,
        limit_name: str,
    ) -> list[Entry]:
        """Choose what goes, so that an entry fits.

        Raises:
            MustWait, NoRoom: as `make_ready`.
        """
        others = [(each, taken_by(each)) for each in order]
        used = [
            (each, taken_by(each))
            for each in self._entries
            if each is not entry and each not in order and each.pipe is not None
        ]
        fixed = dict(staying) | dict(needed)
        with_used = dict(fixed)
        for _, sizes in used:
            with_used |= sizes
        going = choose(others, with_used, limit)
        if going is not None:
            return going
        if choose([*used, *others], fixed, limit) is not None:
            raise MustWait
        left = sum(fixed.values()) - sum(needed.values())
        raise NoRoom(entry.name, sum(needed.values()), limit - left, limit, limit_name)


def _infos() -> _Infos:
    return {info.name: info for info in segments_by_lock()}


def _taken_by(infos: _Infos, entry: Entry) -> dict[Hashable, int]:
    """Return what an entry takes now; of one that is not loaded, what is idle."""
    if entry.pipe is not None:
        return entry.parts
    return {
        name: infos[name].nbytes
        for name in entry.segments
        if name in infos and not infos[name].is_leased
    }


def _on_device(entry: Entry) -> Sizes:
    return entry.brought.sizes if entry.brought else {}


def _may_go(segment: Segment) -> bool:
    return not segment.is_pinned


def is_lent(model: torch.nn.Module) -> bool:
    """Tell whether a shelf has loaded a model, and counts its weights."""
    return model in _lent
