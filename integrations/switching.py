"""`Switcher`: several pipelines in one process, within a budget.

Guarantee: each pipeline is used by one `with` block at a time, and one in use is never given up. A
block may begin in one thread and end in another, or be an asyncio task's. A forked child has the
pipelines that its parent had loaded, and uses them without its parent.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import msgspec
import torch

from shmload._building.mapped import Spans, host_tensors
from shmload._building.weights import models_in
from shmload._checkpoints.wanted import is_publication
from shmload._compat import as_plain_tensors
from shmload._host.changes import add_row
from shmload._placement.inventory import canonical_device, is_on_the_host, machine_inventory
from shmload._segments.listing import names_by_inode, segments_by_lock
from shmload._segments.removal import remove_idle
from shmload._settings import parse_nbytes, settings
from shmload._wording import logger_of, nearest
from shmload.errors import ArgumentError, DeviceMissing, NoRoom, SwitchTimeout
from shmload.integrations.diffusers import load_pipeline
from shmload.integrations.mixing import mix

logger = logger_of(__name__)

# The two places with a budget, by the names of the arguments that set it.
_HOST, _DEVICE = "budget", "device_budget"
_OWN = {"device_map", "keep", "max_host_memory", "max_memory", "share"}
_Name = str | os.PathLike[str]


class SwitcherFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a switcher has done since it was made."""

    hits: int
    """Uses whose pipeline was ready at once."""
    loads: int
    given_up: int
    """How often a pipeline was given up."""
    held_nbytes: int
    """What the weights of its pipelines take on the host now, in bytes."""


class _Model:
    """One named pipeline, loaded or not."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = name
        self.load = load
        self.pipe: Any = None
        self.user: int | None = None
        """The thread in which the block began that uses it; None if no block does."""
        self.places: set[str] = set()
        """Of `_HOST` and `_DEVICE` those where its weights are."""
        self.sizes: dict[str, dict[str, int]] = {_HOST: {}, _DEVICE: {}}
        """What it takes in each place, in bytes, as of its last load: by the names of segments, and
        by its own name for weights that lie in none."""

    def look(self) -> None:
        """Look where its weights lie on the host, and how large they are."""
        names = names_by_inode()
        nbytes = {info.name: info.nbytes for info in segments_by_lock()}
        spans = Spans(set(names))
        with as_plain_tensors():
            models = models_in(self.pipe).values()
            tensors = list(itertools.chain(*map(host_tensors, models)))
            copied = sum({each.data_ptr(): each.nbytes for each in tensors}.values())
            storages = {(s := each.untyped_storage()).data_ptr(): s.nbytes() for each in tensors}
        self.sizes = {_HOST: {self.name: 0}, _DEVICE: {self.name: copied}}
        for address, size in storages.items():
            mapping = spans.find_address(address)
            segment = names[mapping.inode] if mapping else ""
            if segment in nbytes:
                self.sizes[_HOST][segment] = nbytes[segment]
            else:
                self.sizes[_HOST][self.name] += size


class Use:
    """The use of a pipeline: `with` and `async with` give it, and take it back at their end."""

    def __init__(self, switcher: "Switcher", model: _Model) -> None:
        self._switcher = switcher
        self._model = model

    def __enter__(self) -> Any:
        return self._switcher._lend(self._model)

    def __exit__(self, *exc_info: object) -> None:
        self._switcher._take_back(self._model)

    async def __aenter__(self) -> Any:
        # In a thread of its own: the loop goes on, and its executor stays free for the block that
        # has the pipeline.
        loop = asyncio.get_running_loop()
        lent: asyncio.Future[Any] = loop.create_future()
        waiting = _Waiting(self, loop, lent)
        threading.Thread(target=waiting.lend, name="shmload-use", daemon=True).start()
        try:
            return await lent
        except asyncio.CancelledError:
            waiting.abandon()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__()


class _Waiting:
    """A use that a task waits for; a task that is cancelled leaves nothing in use."""

    def __init__(
        self, use: Use, loop: asyncio.AbstractEventLoop, lent: "asyncio.Future[Any]"
    ) -> None:
        self._use, self._loop, self._lent = use, loop, lent
        self._lock = threading.Lock()
        self._is_abandoned = self._has_it = False

    def lend(self) -> None:
        try:
            pipe = self._use.__enter__()
        except BaseException as exc:
            self._tell(self._lent.set_exception, exc)
            return
        with self._lock:
            self._has_it = not self._is_abandoned
        if self._has_it:
            self._tell(self._lent.set_result, pipe)
        else:
            self._use.__exit__()

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
        if self._has_it:
            self._use.__exit__()

    def _tell(self, answer: Callable[[Any], None], value: Any) -> None:
        def tell() -> None:
            if not self._lent.done():
                answer(value)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
            self._loop.call_soon_threadsafe(tell)


class Switcher:
    """Some pipelines that share a budget; what was not used for longest goes to make room.

    Threads, asyncio tasks and forked children may use it. Each pipeline is loaded when it is first
    used, attached or decoded, with `keep=True`. When it goes, so do its segments, unless another
    pipeline or process has them or they are pinned. A context that gives up all pipelines at its
    end, and leaves the segments.

    Args:
        models: sources of `load_pipeline`, or a dict of them by name. Instead of a source, the dict
            may have a dict of arguments: `source`, `loras` as for `mix`, and those of
            `load_pipeline`.
        budget: the most that the weights of its pipelines may take on the host, in bytes or as
            `20GiB`: the segments that they lie in, each once, and weights that lie in none. How
            much a pipeline takes is known after its first load, which may exceed the budget.
        device: where the pipelines run; None for the host. They are moved there by `to`, and what
            is on the host stays there.
        device_budget: the most that weights may take on the device, as `budget`; None for what is
            free there now, less the part for activations (`SHMLOAD_HEADROOM`).
        load_kwargs: arguments of `load_pipeline` for all models but publications, such as `dtype`.

    Raises:
        ArgumentError: a size cannot be read, or an argument cannot be given here.
        DeviceMissing: the device is not there.
    """

    def __init__(
        self,
        models: Sequence[_Name] | Mapping[_Name, _Name | Mapping[str, Any]],
        budget: float | str,
        *,
        device: object = None,
        device_budget: float | str | None = None,
        **load_kwargs: Any,
    ) -> None:
        if isinstance(models, str | os.PathLike):
            raise ArgumentError(
                f"models is one path, {models!r}; give a list of sources, or a dict"
            )
        given = models if isinstance(models, Mapping) else {each: each for each in models}
        named = {os.fspath(name): each for name, each in given.items()}
        # The one that was not used for longest is the first.
        self._models = OrderedDict(
            (name, _Model(name, _loader(name, each, load_kwargs))) for name, each in named.items()
        )
        self._budgets = {_HOST: _parse(_HOST, budget)}
        self._device: torch.device | None = None
        if device is None and device_budget is not None:
            raise ArgumentError("device_budget needs a device")
        if device is not None:
            self._device, self._budgets[_DEVICE] = _find_device(device, device_budget)
        self._changed = threading.Condition()
        """Held while what follows, or a model, is read or changed; notified when a use ends."""
        self._is_loading = False
        self._is_closed = False
        self._ended = self._hits = self._loads = self._given_up = 0
        _all.add(self)

    def use(self, name: _Name) -> Use:
        """Lend a pipeline that is ready to run, for the block of `with` or `async with`.

        No other block has it meanwhile. When it goes, it is emptied: what still refers to it keeps
        no memory. Weights that are changed in place, as by `fuse_lora`, take memory that is not
        counted: use what `mix` or `publish` has made instead.

        Args:
            name: of the model.

        Raises:
            ArgumentError: there is no such model, or the switcher is closed.
            NoRoom: when the block begins: it does not fit, whatever goes.
            SwitchTimeout: then: others were used for `SHMLOAD_WAIT_TIMEOUT_S`.
            Exception: then: any error of `load_pipeline`.
        """
        return Use(self, self._find(name))

    def reload(self, name: _Name) -> None:
        """Give up a pipeline, so that its next use loads it again: the newest of a publication.

        Raises:
            ArgumentError, SwitchTimeout: as `use`.
        """
        model = self._find(name)
        self._claim(model, _deadline())
        try:
            self._drop(model)
        finally:
            self._take_back(model)

    @property
    def figures(self) -> SwitcherFigures:
        """What it has done."""
        with self._changed:
            return SwitcherFigures(
                hits=self._hits,
                loads=self._loads,
                given_up=self._given_up,
                held_nbytes=_nbytes_of(self._in(_HOST), _HOST),
            )

    def close(self) -> None:
        """Give up all pipelines, each when it is not used; their segments stay resident.

        A second call does nothing.
        """
        with self._changed:
            self._is_closed = True
            for model in self._models.values():
                if model.user is None:
                    self._drop(model)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find(self, name: _Name) -> _Model:
        found = self._models.get(os.fspath(name))
        if found is None:
            known = list(self._models)
            raise ArgumentError(f"no model is called {name!r}{nearest(str(name), known)}")
        return found

    # Uses ---------------------------------------------------------------------------------------

    def _lend(self, model: _Model) -> Any:
        deadline = _deadline()
        self._claim(model, deadline)
        try:
            if model.places == self._budgets.keys():
                self._hits += 1
            else:
                self._make_ready(model, deadline)
        except BaseException:
            self._take_back(model)
            raise
        return model.pipe

    def _claim(self, model: _Model, deadline: float) -> None:
        """Wait until no block uses a model, and use it."""
        with self._changed:
            self._wait(model, lambda: model.user is None, deadline)
            model.user = threading.get_ident()
            self._models.move_to_end(model.name)

    def _take_back(self, model: _Model) -> None:
        with self._changed:
            model.user = None
            self._ended += 1
            if self._is_closed:
                self._drop(model)
            self._changed.notify_all()

    def _wait(self, model: _Model, is_over: Callable[[], bool], deadline: float) -> None:
        """Wait until something is so, with `_changed` held.

        Raises:
            ArgumentError: the switcher is closed.
            SwitchTimeout: the time is over.
        """
        left_s = max(0.0, deadline - time.monotonic())
        is_so = self._changed.wait_for(lambda: self._is_closed or is_over(), left_s)
        if self._is_closed:
            raise ArgumentError(f"{model.name} is of a switcher that is closed")
        if not is_so:
            others = [m.name for m in self._models.values() if m.user and m is not model]
            used = others or [model.name]
            raise SwitchTimeout(model.name, settings().wait_timeout_s, used)

    # Room ---------------------------------------------------------------------------------------

    def _make_ready(self, model: _Model, deadline: float) -> None:
        """Load a model that this block uses, and bring it to the device; one at a time does so."""
        with self._changed:
            self._wait(model, lambda: not self._is_loading, deadline)
            self._is_loading = True
        try:
            while model.pipe is None:
                self._wait_for_room(model, _HOST, deadline)
                self._load(model)
            if self._device and _DEVICE not in model.places:
                self._wait_for_room(model, _DEVICE, deadline)
                model.places.add(_DEVICE)
                try:
                    model.pipe.to(self._device)
                except BaseException:  # it is full
                    self._leave(model, _DEVICE)
                    raise
        finally:
            with self._changed:
                self._is_loading = False
                self._changed.notify_all()

    def _load(self, model: _Model) -> None:
        """Load a model; if it does not fit beside what others use, give it up again."""
        model.pipe = model.load()
        model.places.add(_HOST)
        model.look()
        with self._changed:
            self._loads += 1
            if not self._has_room(model, _HOST):
                self._leave(model, _HOST)

    def _wait_for_room(self, model: _Model, place: str, deadline: float) -> None:
        """Wait until there is room for a model, as far as its size is known."""
        with self._changed:
            while not self._has_room(model, place):
                self._wait_for_an_end(model, self._ended, deadline)

    def _wait_for_an_end(self, model: _Model, ended: int, deadline: float) -> None:
        self._wait(model, lambda: self._ended != ended, deadline)

    def _has_room(self, model: _Model, place: str) -> bool:
        """Have idle models leave a place until one fits; tell whether it does.

        Raises:
            NoRoom: it does not fit alone.
        """
        most = self._budgets[place]
        if (needed := _nbytes_of([model], place)) > most:
            self._leave(model, place)
            raise NoRoom(model.name, needed, most, place)
        while True:
            others = [each for each in self._in(place) if each is not model]
            if _nbytes_of([model, *others], place) <= most:
                return True
            idle = next((each for each in others if each.user is None), None)
            if idle is None:
                return False
            self._leave(idle, place)

    def _in(self, place: str) -> list[_Model]:
        return [each for each in self._models.values() if place in each.places]

    def _leave(self, model: _Model, place: str) -> None:
        """Free what a model takes in a place, with its segments if they can go."""
        if place == _HOST:
            self._drop(model)
            infos = {info.name: info for info in segments_by_lock()}
            kept = {name for each in self._in(_HOST) for name in each.sizes[_HOST]}
            going = [name for name in model.sizes[_HOST] if name in infos.keys() - kept]
            # A publication before what it needs.
            going.sort(key=lambda name: infos[name].created_at, reverse=True)
            remove_idle(going, condition=lambda segment: not segment.is_pinned)
        elif place in model.places:
            model.pipe.to("cpu")  # its weights lie in their segments again
            model.places.discard(place)

    def _drop(self, model: _Model) -> None:
        """Give up a model if it is loaded, also for who still refers to it."""
        if model.pipe is not None:
            pipe, model.pipe = model.pipe, None  # a child that is forked meanwhile has none
            model.places.clear()
            vars(pipe).clear()  # the variable of a `with` block keeps its value
            self._given_up += 1
            gc.collect()  # modules refer to themselves


def _nbytes_of(models: Collection[_Model], place: str) -> int:
    """Return what some models take in a place; segments that several lie in count once."""
    sizes = {name: size for each in models for name, size in each.sizes[place].items()}
    return sum(sizes.values())


def _deadline() -> float:
    return time.monotonic() + settings().wait_timeout_s


# Forks --------------------------------------------------------------------------------------------

_all: "weakref.WeakSet[Switcher]" = weakref.WeakSet()


def _count_busy() -> int:
    return sum(each._is_loading or any(m.user for m in each._models.values()) for each in _all)


def _forget_uses() -> None:
    """Forget in a forked child what threads did that it lacks; blocks of its own thread go on."""
    for switcher in _all:
        switcher._changed = threading.Condition()
        switcher._is_loading = False
        for model in switcher._models.values():
            if model.user != threading.get_ident():
                model.user = None


add_row("uses of switchers", _count_busy, _forget_uses)


# Arguments ----------------------------------------------------------------------------------------


def _loader(name: str, given: object, common: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what loads a model.

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
    if loras is not None:
        if is_publication(source):
            raise ArgumentError(f"{name}: LoRAs are mixed into a directory, not into {source}")
        return functools.partial(mix, source, loras, **arguments)
    kept = {} if is_publication(source) else {"keep": True}
    return functools.partial(load_pipeline, source, **kept, **arguments)


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
