"""`Switcher`: several pipelines in one process, within a budget.

Guarantee: each pipeline is used by one block at a time, and one in use is never given up. A block
may begin in one thread and end in another, or be an asyncio task's. A forked child has the
pipelines that its parent had loaded, and none of its uses.

The lock is held for moments only: a load, a move and a removal go on without it. A model that comes
has its room in the budget before. One that goes is in use by the switcher until it has gone.
"""

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import msgspec

from shmload._building.mapped import measure, models_in
from shmload._checkpoints.wanted import is_publication
from shmload._placement import inventory
from shmload._segments.listing import segments_by_lock
from shmload._segments.removal import remove_idle
from shmload._settings import parse_size, settings
from shmload._wording import format_nbytes, nearest
from shmload.errors import ArgumentError, DoesNotFit, SegmentTimeout
from shmload.integrations.loads import load_pipeline
from shmload.integrations.mixing import mix

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


class _Model(msgspec.Struct, eq=False):
    """One named pipeline, loaded or not."""

    name: str
    load: Callable[[], Any]
    pipe: Any = None
    user: object = None
    """The `Use` that has it, or the switcher that frees it; None if it is idle."""
    used_at: float = 0.0
    """When its last use began, by `time.monotonic`."""
    places: set[str] = set()
    """`_HOST`, `_DEVICE` or both: where its weights are, or where room was made for them."""
    sizes: dict[str, dict[str, int]] = {}
    """What it takes in each place, in bytes, as of its last load: by the names of segments, and by
    its own name for weights that lie in none. Empty if it is not known."""


class Use:
    """The use of a pipeline: `with` and `async with` give it, and take it back at their end."""

    def __init__(self, switcher: "Switcher", model: _Model) -> None:
        self._switcher = switcher
        self.model = model

    def __enter__(self) -> Any:
        return self._switcher._lend(self.model, self)

    def __exit__(self, *exc_info: object) -> None:
        self._switcher._take_back(self.model, self)

    async def __aenter__(self) -> Any:
        # In a thread of its own: the loop goes on, and its executor stays free for the block that
        # has the pipeline.
        lent: Future[Any] = Future()
        lent.set_running_or_notify_cancel()  # a task that is cancelled cancels no use
        threading.Thread(target=self._lend, args=(lent,), name="shmload-use", daemon=True).start()
        try:
            return await asyncio.wrap_future(lent)
        except BaseException:
            lent.add_done_callback(self._abandon)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self.__exit__()

    def _lend(self, lent: Future[Any]) -> None:
        try:
            lent.set_result(self.__enter__())
        except BaseException as exc:
            lent.set_exception(exc)

    def _abandon(self, lent: Future[Any]) -> None:
        """End a use whose task was cancelled, or whose loop has ended."""
        if lent.exception() is None:
            self.__exit__()


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
        ArgumentError: the device is not there.
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
            raise ArgumentError(f"give a list of sources, or a dict, instead of {models!r}")
        given = models if isinstance(models, Mapping) else {each: each for each in models}
        made = (_parse_model(os.fspath(name), each, load_kwargs) for name, each in given.items())
        self._models = {model.name: model for model in made}
        self._budgets = {_HOST: parse_size(_HOST, budget)}
        self._device: str | None = None
        if device is not None:
            self._device, self._budgets[_DEVICE] = _find_device(device, device_budget)
        elif device_budget is not None:
            raise ArgumentError("device_budget needs a device")
        self._changed = threading.Condition()
        """Held while what follows, or a model, is read or changed; notified when a model may be
        used again, takes less, or is known to."""
        self._is_closed = False
        self._counts = {"hits": 0, "loads": 0, "given_up": 0}
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
            DoesNotFit: when the block begins: it does not fit, whatever goes.
            SegmentTimeout: then: others were used for `SHMLOAD_WAIT_TIMEOUT_S`.
            Exception: then: any error of `load_pipeline`.
        """
        if model := self._models.get(os.fspath(name)):
            return Use(self, model)
        raise ArgumentError(f"no model is called {name!r}{nearest(str(name), list(self._models))}")

    def reload(self, name: _Name) -> None:
        """Give up a pipeline, so that its next use loads it again: the newest of a publication.

        Raises:
            ArgumentError, SegmentTimeout: as `use`.
        """
        model = self.use(name).model
        self._claim(model, self, time.monotonic() + settings().wait_timeout_s)
        try:
            self._give_up(model)
            model.sizes = {}  # the newest may be smaller
        finally:
            self._take_back(model, self)

    @property
    def figures(self) -> SwitcherFigures:
        """What it has done."""
        with self._changed:
            return SwitcherFigures(**self._counts, held_nbytes=_nbytes(_HOST, self._in(_HOST)))

    def close(self) -> None:
        """Give up all pipelines, each when it is not used; their segments stay resident.

        A second call does nothing.
        """
        with self._changed:
            self._is_closed = True
            idle = [each for each in self._in(_HOST) if not each.user]
            for model in idle:
                model.user = self
            self._changed.notify_all()
        for model in idle:
            self._give_up(model)
            self._take_back(model, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Uses ---------------------------------------------------------------------------------------

    def _lend(self, model: _Model, user: Use) -> Any:
        deadline = time.monotonic() + settings().wait_timeout_s
        self._claim(model, user, deadline)
        try:
            with self._changed:
                self._counts["hits"] += model.places == self._budgets.keys()
            for place in self._budgets:
                while place not in model.places:
                    self._bring(model, place, deadline)
            return model.pipe
        except BaseException:
            self._take_back(model, user)
            raise

    def _claim(self, model: _Model, user: object, deadline: float) -> None:
        """Wait until a model is idle, and use it."""
        with self._changed:
            self._wait(model, lambda: not model.user, deadline)
            model.user, model.used_at = user, time.monotonic()

    def _take_back(self, model: _Model, user: object) -> None:
        with self._changed:
            if model.user is user:  # not so in a child that was forked in the block
                model.user = None
                self._changed.notify_all()
        if self._is_closed:
            self.close()

    def _wait(self, model: _Model, is_over: Callable[[], bool], deadline: float) -> None:
        """Wait until something is so, with the lock held.

        Raises:
            ArgumentError: the switcher is closed.
            SegmentTimeout: the time is over.
        """
        left_s = deadline - time.monotonic()
        is_so = self._changed.wait_for(lambda: self._is_closed or is_over(), left_s)
        if self._is_closed:
            raise ArgumentError(f"{model.name} is of a switcher that is closed")
        if not is_so:
            used = [m.name for m in self._models.values() if m.user and m is not model]
            names = ", ".join(sorted(used or [model.name]))
            raise SegmentTimeout(
                f"{model.name} waited {settings().wait_timeout_s:g} s for {names}, which are in "
                "use; end their `with` blocks, or raise SHMLOAD_WAIT_TIMEOUT_S",
                name=model.name,
            )

    # Room ---------------------------------------------------------------------------------------

    def _bring(self, model: _Model, place: str, deadline: float) -> None:
        """Wait until a model fits beside those in use, and bring it to a place.

        It is not there afterwards if the room was taken meanwhile, or if a load has shown that the
        model is larger than was known.

        Raises:
            DoesNotFit: it does not fit alone, there or in another place.
        """
        with self._changed:
            if small := self._too_small_for(model):
                nbytes, budget = _nbytes(small, [model]), self._budgets[small]
                raise DoesNotFit(
                    f"{model.name} takes {format_nbytes(nbytes)}, but {small} is "
                    f"{format_nbytes(budget)}; raise {small}",
                    needed=nbytes,
                    available=budget,
                    limit=small,
                )
            self._wait(model, lambda: self._may_fit(model, place), deadline)
        if not self._make_room(model, place):
            return
        try:
            self._load(model) if place == _HOST else model.pipe.to(self._device)
        except BaseException:
            self._leave(model, place)
            raise

    def _make_room(self, model: _Model, place: str) -> bool:
        """Give a model room in a place, which idle ones leave for it; tell whether it has it.

        None leaves if that would not be enough.
        """
        while True:
            with self._changed:
                there = self._in(place)
                if not self._may_fit(model, place):
                    return False
                if _nbytes(place, [model, *there]) <= self._budgets[place]:
                    model.places.add(place)
                    return True
                idle = min((m for m in there if not m.user), key=lambda m: m.used_at)
                idle.user = self
            try:
                self._leave(idle, place)
            finally:
                self._take_back(idle, self)

    def _load(self, model: _Model) -> None:
        """Load a model that has room; if it needs more than there is, give it up again."""
        pipe = model.load()
        sizes, copied = measure(models_in(pipe).values(), model.name)
        with self._changed:
            model.pipe, model.sizes = pipe, {_HOST: sizes, _DEVICE: {model.name: copied}}
            self._counts["loads"] += 1
            self._changed.notify_all()
        if self._too_small_for(model) or not self._make_room(model, _HOST):
            self._leave(model, _HOST)

    def _leave(self, model: _Model, place: str) -> None:
        """Free what a model takes in a place, with its segments if they can go."""
        if place == _HOST:
            self._give_up(model, stays=False)
            return
        model.pipe.to("cpu")  # its weights lie in their segments again
        with self._changed:
            model.places.discard(place)

    def _give_up(self, model: _Model, *, stays: bool = True) -> None:
        """Free a model, also for who still refers to it.

        Args:
            model: whose user this is.
            stays: leave its segments, also those that nothing else uses.
        """
        with self._changed:
            pipe, model.pipe = model.pipe, None  # a child that is forked from here on has none
            model.places.clear()
            self._counts["given_up"] += pipe is not None
            self._changed.notify_all()
            kept = {name for each in self._in(_HOST) for name in each.sizes.get(_HOST, ())}
        if pipe is not None:
            vars(pipe).clear()  # the variable of a `with` block keeps its value
            gc.collect()  # modules refer to themselves
        if not stays:
            going = model.sizes.get(_HOST, {}).keys() - kept
            # The newest first: a publication before what it needs.
            names = [info.name for info in segments_by_lock()[::-1] if info.name in going]
            remove_idle(names, condition=lambda segment: not segment.is_pinned)

    def _in(self, place: str) -> list[_Model]:
        return [each for each in self._models.values() if place in each.places]

    def _may_fit(self, model: _Model, place: str) -> bool:
        """Tell whether a model fits into a place beside those in use; first loads take turns."""
        used = [each for each in self._in(place) if each.user and each is not model]
        is_its_turn = bool(model.sizes) or all(each.sizes for each in used)
        return is_its_turn and _nbytes(place, [model, *used]) <= self._budgets[place]

    def _too_small_for(self, model: _Model) -> str:
        """Return a place that is too small for a model alone, as far as its size is known."""
        return next((p for p, most in self._budgets.items() if _nbytes(p, [model]) > most), "")


def _nbytes(place: str, models: Iterable[_Model]) -> int:
    """Return what some models take in a place; segments that several lie in count once."""
    return sum({k: size for m in models for k, size in m.sizes.get(place, {}).items()}.values())


# Forks --------------------------------------------------------------------------------------------

_all: "weakref.WeakSet[Switcher]" = weakref.WeakSet()


def _forget_uses() -> None:
    """Forget all uses in a forked child: a block of its parent, if it goes on, protects nothing."""
    for switcher in _all:
        switcher._changed = threading.Condition()
        for model in switcher._models.values():
            model.user = None
            # Threads that the child lacks may have been at work on it.
            model.places = set() if model.pipe is None else {_HOST}


os.register_at_fork(after_in_child=_forget_uses)


# Arguments ----------------------------------------------------------------------------------------


def _parse_model(name: str, given: object, common: Mapping[str, Any]) -> _Model:
    """Return a model that is not loaded yet.

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
        return _Model(name, lambda: mix(source, loras, **arguments))
    kept: dict[str, Any] = {} if is_publication(source) else {"keep": True}
    return _Model(name, lambda: load_pipeline(source, **kept, **arguments))


def _find_device(device: object, nbytes: float | str | None) -> tuple[str, int]:
    here = inventory.machine_inventory([device] if nbytes is None else ())
    name = inventory.canonical_device(device, here.current)
    if inventory.is_on_the_host(name):
        there = ", ".join(here.names)
        raise ArgumentError(f"device: {name} is no accelerator, and the devices are {there}")
    here.require(name, "device")
    found = here.find(name)
    return name, found.room_nbytes if found else parse_size(_DEVICE, nbytes)
