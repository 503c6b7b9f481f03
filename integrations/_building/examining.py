"""Examining one request: making a skeleton, and finding out whether it can stand for a build."""

import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import numpy as np
import torch

from shmload._host.linux import SHM_DIR
from shmload._host.procfs import mappings, modified_nbytes
from shmload._segments.names import name_prefix
from shmload.integrations._building.build import Build
from shmload.integrations._building.conditions import Trace, conditions_of, without_unmet
from shmload.integrations._building.draws import CannotRepeat, Draw, Draws
from shmload.integrations._building.effects import Effects, Message, Watch
from shmload.integrations._building.hooks import next_number, renumber
from shmload.integrations._building.mapped import Spans, plain_tensors
from shmload.integrations._building.model_maker import ModelMaker
from shmload.integrations._building.pickling import Models, pickle_models
from shmload.integrations._building.pipeline_maker import PipelineMaker
from shmload.integrations._building.requests import Request
from shmload.integrations._building.sameness import Comparison, Different
from shmload.integrations._building.skeletons import Skeleton
from shmload.integrations._building.snapshot import Snapshot, is_memo
from shmload.integrations._building.stand_ins import StandIns

_REPEATS = 2


class Refused(Exception):
    """Raised when some models can have no skeleton; its text is the reason."""


class Examination:
    """Examines the models of one load, in steps for processes of their own; a context.

    Args:
        request: of the load.

    Raises:
        Refused: the source is not what it was when the load asked.
        ShmloadError: a file cannot be read.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        maker = _maker(request)
        source = maker.import_classes(request.source)
        dtype = request.torch_dtype
        rules = {each.component: maker.rule(each, dtype) for each in source.checkpoints}
        self._stand_ins = StandIns(source, rules)
        self._build = Build(source, maker, rules, self._stand_ins, dtype, dict(request.kwargs))
        if self._build.skeleton_key() != request.key:
            raise Refused("the judge found something else than the load")
        self._snapshot: Snapshot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stand_ins.close()

    def make(self) -> tuple[Skeleton, list[str]]:
        """Build twice; return the skeleton, and the Python modules that building imports.

        Raises:
            Refused: the models cannot be pickled, or do not come out of it as they were.
        """
        imported, fetched = set(sys.modules), _fetched()
        with Trace() as trace:
            first, taken = self._first_built()
        _require_plain(self._build.models_of(first))
        modules = sorted(_importable(set(sys.modules) - imported))
        self._stand_ins.fill_small()
        state = torch.get_rng_state()
        second, taken_again = self._built(self._build.build_ordinarily)
        draws = () if torch.equal(state, torch.get_rng_state()) else self._draws()
        self._require_same(first, second, "built a second time, ")
        if taken != taken_again:
            raise Refused(f"building registers {taken} hooks and then {taken_again}")
        models = self._build.models_of(second)
        self._require_untouched(models)
        try:
            pickled = pickle_models(models, self._stand_ins.holdings.open_files())
        except Exception as exc:  # a model may hold anything, and not everything can be pickled
            raise Refused(f"{_names(models)}: {exc}") from None
        made = Skeleton(
            source=self._request.given,
            root=self._request.root,
            class_name=self._request.class_name or self._request.wanted or "",
            dtype=str(self._request.torch_dtype),
            models=pickled,
            conditions=conditions_of(trace, _kinds(models)),
            modules=tuple(modules),
            draws=draws,
            hooks=taken,
            names={
                home: tuple(sorted(new))
                for home, names in _fetched().items()
                if (new := names - fetched.get(home, set()))
            },
        )
        try:
            third, _ = self._built(lambda: self._build.build_around(made))
        except Exception as exc:
            raise Refused(f"{_names(models)}: {type(exc).__name__}: {exc}") from None
        self._require_same(second, third, "from a skeleton, ")
        return made, modules

    def keep_conditions(self, made: Skeleton) -> Skeleton:
        """Leave out conditions that a process which has built nothing yet does not meet."""
        assert made.conditions
        return msgspec.structs.replace(made, conditions=without_unmet(made.conditions))

    def look(self) -> None:
        """Note the state of this process, of which forked children are copies."""
        gc.collect()
        gc.disable()
        self._snapshot = Snapshot()

    def effects(self, made: Skeleton | None) -> list[Effects]:
        """Build twice, around a skeleton or in the ordinary way; return what each time leaves.

        Watches this process from now on: call it in a child.
        """
        snapshot = self._snapshot
        assert snapshot
        own = f"{SHM_DIR}/{name_prefix()}"
        watch = Watch(lambda path: path.startswith(own))

        def build() -> None:
            if made:
                self._build.build_around(made)
            else:
                self._build.build_ordinarily()

        # A fork renews process ids and seeds, which differ in each process.
        random.seed(0)
        torch.manual_seed(0)
        np.random.seed(0)
        watch.during(lambda: None, snapshot)
        return [watch.during(build, snapshot) for _ in range(_REPEATS)]

    def decide(
        self,
        made: Skeleton,
        wanted: list[Effects],
        got: list[Effects],
        in_child: Callable[[Callable[[], list[Effects]]], list[Effects]],
    ) -> Skeleton:
        """Return the skeleton, perhaps with messages to repeat.

        Args:
            made: the skeleton.
            wanted: what building in the ordinary way leaves, the first and the second time.
            got: what building from the skeleton leaves.
            in_child: calls a function in a forked child.

        Raises:
            Refused: the two differ in what cannot be repeated.
        """
        missing = _missing(wanted[0].messages, got[0].messages)
        if missing:
            made = msgspec.structs.replace(made, messages=missing)
            got = in_child(lambda: self.effects(made))
        # What is left each time comes first: it is the better reason.
        for number, when in ((1, "each time"), (0, "the first time")):
            if difference := _difference(wanted[number], got[number]):
                raise Refused(f"{difference} ({when})")
        return made

    def _first_built(self) -> tuple[Any, int]:
        """Return what `_built` does for an ordinary build.

        Raises:
            Refused: the library needs the weights, of which the stand-ins have none.
        """
        try:
            return self._built(self._build.build_ordinarily)
        except Refused:
            raise
        except Exception as exc:
            raise Refused(f"building reads weights: {type(exc).__name__}: {exc}") from None

    def _built(self, build: Callable[[], Any]) -> tuple[Any, int]:
        """Return what was built, its hooks numbered from 0, and how many numbers that took."""
        first = next_number()
        pipe = build()
        taken = next_number() - first
        renumber(self._build.models_of(pipe).values(), -first)
        return pipe, taken

    def _draws(self) -> tuple[Draw, ...]:
        """Return the random numbers that a build draws."""
        try:
            with Draws() as draws:
                self._build.build_ordinarily()
        except CannotRepeat as exc:
            raise Refused(str(exc)) from None
        return tuple(draws.found)

    def _require_same(self, one: Any, other: Any, how: str) -> None:
        spans = Spans(self._stand_ins.holdings.inodes())
        try:
            Comparison(spans).require_same(one, other, type(one).__name__)
        except Different as exc:
            raise Refused(f"{how}{exc}") from None

    def _require_untouched(self, models: Models) -> None:
        """Refuse models whose weights are read or changed while they are built."""
        inodes = self._stand_ins.holdings.inodes()
        if any(map(modified_nbytes, mappings(inodes))):
            raise Refused(f"{_names(models)}: building changes weights")
        spans = Spans(inodes)
        for name, model in models.items():
            for key, tensor in model.state_dict().items():
                if spans.find(tensor) and not spans.holds_unread(tensor):
                    raise Refused(f"{name}: building reads the weight {key}")


def _require_plain(models: Models) -> None:
    """Refuse models with tensors that are made of others, as quantised ones may be."""
    for model in models.values():
        for key, tensor in model.state_dict().items():
            if next(plain_tensors(tensor)) is not tensor:
                raise Refused(f"{type(model).__name__}: {key} is a {type(tensor).__name__}")


def _maker(request: Request) -> PipelineMaker | ModelMaker:
    if request.maker == "pipeline":
        return PipelineMaker(request.wanted, request.left_out)
    return ModelMaker(request.wanted, takes_path=request.takes_path)


def _kinds(models: Models) -> set[type]:
    return {type(module) for model in models.values() for module in model.modules()}


def _names(models: Models) -> str:
    return ", ".join(type(model).__name__ for model in models.values())


def _fetched() -> dict[str, set[str]]:
    """Return, by module that imports names at their first use, those that it has."""
    found = {}
    for name, module in list(sys.modules.items()):
        lazy = getattr(type(module), "__getattr__", None) and vars(module).get("_class_to_module")
        if lazy:
            found[name] = set(vars(module)).intersection(lazy)
    return found


def _importable(names: set[str]) -> Iterator[str]:
    for name in names:
        module = sys.modules.get(name)
        if getattr(getattr(module, "__spec__", None), "name", None) == name:
            yield name


def _missing(wanted: tuple[Message, ...], got: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages that the second lacks, in their order."""
    left = list(got)
    found = []
    for message in wanted:
        if message in left:
            left.remove(message)
        else:
            found.append(message)
    return tuple(found)


def _difference(wanted: Effects, got: Effects) -> str:
    """Say in words what a skeleton would not leave, or would leave besides; empty if nothing."""
    if wanted.messages != got.messages:
        lacks = _missing(wanted.messages, got.messages) or _missing(got.messages, wanted.messages)
        return f"building says: {lacks[0].text:.200}"
    for change in sorted({*wanted.changes} ^ {*got.changes}):
        if not is_memo(change):
            who = "building leaves" if change in wanted.changes else "a skeleton would leave"
            return f"{who} {change:.300}"
    return ""
