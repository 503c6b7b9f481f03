"""`Switcher`: several pipelines in one process, within a budget.

Guarantee: each pipeline is used by one thread at a time, and one in use is never given up.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import msgspec
import torch

from shmload._building.device_copies import DeviceCopies
from shmload._building.shelf import MustWait, Shelf
from shmload._building.turns import Entry, Turns
from shmload._checkpoints.wanted import SCHEME, is_publication
from shmload._loading.verbs import plan
from shmload._placement.inventory import canonical_device, is_on_the_host, machine_inventory
from shmload._segments.publications import Publication
from shmload._segments.removal import attached
from shmload._settings import parse_nbytes, settings
from shmload._wording import logger_of, nearest
from shmload.errors import ArgumentError, DeviceMissing, SegmentNotFound, SwitchTimeout
from shmload.integrations.diffusers import load_pipeline
from shmload.integrations.mixing import Mixture, mix

logger = logger_of(__name__)

# What changes the segments, of the arguments of `load_pipeline`.
_PLANNED = {
    "cache_dir",
    "components",
    "dtype",
    "local_files_only",
    "pipeline_class",
    "revision",
    "token",
    "variant",
}
_OWN = {"device_map", "keep", "max_host_memory", "max_memory", "share"}


class SwitcherFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a switcher has done since it was made."""

    uses: int
    hits: int
    """Uses whose pipeline was ready at once."""
    loads: int
    given_up: int
    """How often a pipeline was given up."""
    waits: int
    """How often one thread waited for another: for a pipeline, or for room."""
    waited_s: float
    copied_nbytes: int
    """How much was copied to the device, in bytes."""
    held_nbytes: int
    """What counts on the host now, in bytes."""
    most_held_nbytes: int
    """The most that has counted there after a load, in bytes."""


class Switcher:
    """Some pipelines that share a budget; what was not used for longest goes to make room.

    Several threads may use it. Each pipeline is loaded when it is first used, attached or decoded,
    with `keep=True`. When it goes, so do its segments, unless another pipeline or process has them
    or they are pinned. A context that gives up all pipelines at its end, and leaves the segments.

    Args:
        models: sources of `load_pipeline`, or a dict of them by name. Instead of a source, the dict
            may have a dict of arguments: `source`, `loras` as for `mix`, and those of
            `load_pipeline`.
        budget: the most that the weights may take on the host, in bytes or as `20GiB`. Segments of
            these models count that a pipeline lies in, or that are idle or pinned; each once. So do
            weights that lie in no segment. What other processes alone use does not count.
        device: where the pipelines run; None for the host. They are copied there, and never back.
            Pipelines share the copies of segments that they share.
        device_budget: the most that the copies may take, as `budget`; None for what is free there
            now, less the part for activations (`SHMLOAD_HEADROOM`).
        load_kwargs: arguments of `load_pipeline` for all models but publications, such as `dtype`.

    Raises:
        ArgumentError: a size cannot be read, or an argument cannot be given here.
        DeviceMissing: the device is not there.
    """

    def __init__(
        self,
        models: Sequence[str] | Mapping[str, str | Mapping[str, Any]],
        budget: float | str,
        *,
        device: object = None,
        device_budget: float | str | None = None,
        **load_kwargs: Any,
    ) -> None:
        if isinstance(models, str):
            raise ArgumentError(
                f"models is one text, {models!r}; give a list of sources, or a dict"
            )
        named = models if isinstance(models, Mapping) else {each: each for each in models}
        self._entries = {name: _entry(name, each, load_kwargs) for name, each in named.items()}
        copies, device_nbytes = None, 0
        if device is not None:
            where, device_nbytes = _find_device(device, device_budget)
            copies = DeviceCopies(where)
        entries = list(self._entries.values())
        self._shelf = Shelf(entries, _parse("budget", budget), copies, device_nbytes)
        self._turns = Turns(entries)
        # One thread at a time loads or gives up.
        self._loading = threading.Lock()
        self._uses = self._hits = 0
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="shmload-ahead")

    @contextlib.contextmanager
    def use(self, name: str, then: Sequence[str] = ()) -> Iterator[Any]:
        """Lend a pipeline that is ready to run; no other thread has it meanwhile.

        When it goes, it is emptied: what still refers to it keeps no memory. Weights that are
        changed in place, as by `fuse_lora`, take memory that is not counted, and on a device they
        are changed for all that share them: use what `mix` or `publish` has made instead.

        Args:
            name: of the model.
            then: the models that are used next, in their order. The first is loaded in the
                meantime, if it fits beside what is used. What is used soonest goes last.

        Raises:
            ArgumentError: there is no such model, or it does not fit beside what this thread uses.
            NoRoom: it does not fit, whatever goes; nothing has gone.
            SwitchTimeout: others were used for `SHMLOAD_WAIT_TIMEOUT_S`.
            torch.OutOfMemoryError: the device is full.
            Exception: any error of `load_pipeline`.
        """
        entry = self._find(name)
        coming = [self._find(each) for each in then]
        deadline = time.monotonic() + settings().wait_timeout_s
        with self._turns.changed:
            self._uses += 1
            self._hits += not self._turns.is_used(entry) and self._shelf.is_ready(entry)
        with self._turn(entry, deadline, then):
            self._make_ready(entry, deadline)
            if coming:
                self._load_ahead(coming[0])
            yield entry.pipe

    def prefetch(self, name: str) -> None:
        """Load a model in another thread, if it fits beside what is used.

        An error shows at its use.

        Raises:
            ArgumentError: there is no such model.
        """
        self._load_ahead(self._find(name))

    def reload(self, name: str) -> None:
        """Give up a pipeline, so that its next use loads it again: the newest of a publication.

        Raises:
            ArgumentError, SwitchTimeout: as `use`.
        """
        entry = self._find(name)
        deadline = time.monotonic() + settings().wait_timeout_s
        with self._turn(entry, deadline), self._loads(entry, deadline):
            self._shelf.drop([entry])

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return list(self._entries)

    @property
    def figures(self) -> SwitcherFigures:
        """What it has done."""
        return SwitcherFigures(
            uses=self._uses,
            hits=self._hits,
            loads=self._shelf.loads,
            given_up=self._shelf.given_up,
            waits=self._turns.waits,
            waited_s=self._turns.waited_s,
            copied_nbytes=self._shelf.copied_nbytes,
            held_nbytes=self._shelf.held_nbytes,
            most_held_nbytes=self._shelf.most_held_nbytes,
        )

    def close(self) -> None:
        """Give up all pipelines, each when it is not used; their segments stay resident.

        A second call does nothing.
        """
        self._turns.close()
        self._ahead.shutdown(cancel_futures=True)
        with self._loading:
            for entry in self._turns.order():
                with self._turns.claim([entry]) as is_free:
                    if is_free:
                        self._shelf.drop([entry])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find(self, name: str) -> Entry:
        if name not in self._entries:
            raise ArgumentError(f"no model is called {name!r}{nearest(name, list(self._entries))}")
        return self._entries[name]

    @contextlib.contextmanager
    def _turn(self, entry: Entry, deadline: float, then: Sequence[str] = ()) -> Iterator[None]:
        with self._turns.take(entry, deadline, then):
            try:
                yield
            finally:
                if self._turns.is_closed:
                    with self._loading:
                        self._shelf.drop([entry])

    def _make_ready(self, entry: Entry, deadline: float, *, waits_for_room: bool = True) -> None:
        """Load a pipeline; wait for others to be left where there is no room otherwise."""
        while not self._shelf.is_ready(entry):
            seen = self._turns.ended
            with self._loads(entry, deadline), contextlib.suppress(MustWait):
                self._shelf.make_ready(entry, self._turns)
                return
            until = deadline if waits_for_room else time.monotonic()
            self._turns.wait_for_end(entry, seen, until)

    @contextlib.contextmanager
    def _loads(self, entry: Entry, deadline: float) -> Iterator[None]:
        """Be the one that loads or gives up, in the block."""
        if not self._loading.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise SwitchTimeout(entry.name, settings().wait_timeout_s, ["other loads"])
        try:
            self._turns.require_open(entry)
            yield
        finally:
            self._loading.release()

    def _load_ahead(self, entry: Entry) -> None:
        with self._turns.changed:
            if not self._turns.is_closed:
                self._ahead.submit(self._prefetch, entry)

    def _prefetch(self, entry: Entry) -> None:
        deadline = time.monotonic() + settings().wait_timeout_s
        try:
            with self._turn(entry, time.monotonic()):
                self._make_ready(entry, deadline, waits_for_room=False)
        except Exception as exc:  # the use of it will show it
            logger.info("%s was not loaded ahead: %s", entry.name, exc)


def _entry(name: str, given: object, common: Mapping[str, Any]) -> Entry:
    """Return the entry of a model.

    Raises:
        ArgumentError: it has no source, or an argument that cannot be given here.
    """
    own: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"source": given}
    source, loras = own.pop("source", None), own.pop("loras", None)
    if source is None:
        raise ArgumentError(f"{name} has no source: {given!r}")
    arguments = own if is_publication(source) else {**common, **own}
    if fixed := sorted(_OWN & arguments.keys()):
        raise ArgumentError(f"{name}: a switcher decides on {', '.join(fixed)} itself")
    load = functools.partial(load_pipeline, source, **arguments)
    if is_publication(source):
        if loras is not None:
            raise ArgumentError(f"{name}: LoRAs are mixed into a directory, not into {source}")
        return Entry(name, lambda is_local: _parts_of_publication(str(source)), load)
    planned = {key: value for key, value in arguments.items() if key in _PLANNED}

    def find(is_local: bool) -> dict[str, int]:
        return _planned(source, planned | ({"local_files_only": True} if is_local else {}))

    if loras is None:
        return Entry(name, find, functools.partial(load, keep=True))
    others = {key: value for key, value in arguments.items() if key != "dtype"}

    def find_mixture(is_local: bool) -> dict[str, int]:
        mixture = Mixture(source, loras, arguments.get("dtype"), others)
        return _parts_of_mixture(mixture, functools.partial(find, is_local))

    return Entry(name, find_mixture, functools.partial(mix, source, loras, **arguments))


def _planned(source: Any, arguments: Mapping[str, Any]) -> dict[str, int]:
    shards = plan(source, keep=True, **arguments).shards
    return {shard.segment: shard.segment_nbytes for shard in shards}


def _parts_of_mixture(mixture: Mixture, find_base: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return the segments of a mixture; before it is made, those of its base and what it needs."""
    with contextlib.suppress(SegmentNotFound):
        return _parts_of_publication(f"{SCHEME}{mixture.name}")
    base = find_base()
    changed = mixture.changed_nbytes() or sum(base.values())
    # First they are in this process, and then published, with a structure.
    return {**base, mixture.name: 2 * changed + mixture.structure_nbytes}


def _parts_of_publication(source: str) -> dict[str, int]:
    _, own = Publication.parse(source).attach()
    with own:
        sizes = {own.name: own.nbytes}
        for name in own.read_metadata().needs:
            with attached(name) as segment:
                sizes |= {name: segment.nbytes} if segment else {}
    return sizes


def _find_device(device: object, nbytes: float | str | None) -> tuple[torch.device, int]:
    inventory = machine_inventory([device] if nbytes is None else ())
    name = canonical_device(device, inventory.current)
    if name not in inventory.names or is_on_the_host(name):
        raise DeviceMissing(name, inventory.names, argument="device")
    found = inventory.find(name)
    if nbytes is None and found:
        return torch.device(name), found.room_nbytes
    return torch.device(name), _parse("device_budget", nbytes)


def _parse(name: str, size: object) -> int:
    try:
        return parse_nbytes(str(size))
    except ValueError as exc:
        raise ArgumentError(f"{name}: {exc}") from None
