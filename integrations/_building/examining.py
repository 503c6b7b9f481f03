"""Examining one request: making a skeleton, and finding out whether it can stand for a build."""

import contextlib
import functools
import gc
import importlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from msgspec.structs import replace

from shmload._host.linux import SHM_DIR
from shmload._host.memo import Memo
from shmload._host.procfs import mappings, modified_nbytes
from shmload._segments.names import name_prefix
from shmload._wording import logger_of
from shmload.integrations._building.build import Build
from shmload.integrations._building.conditions import Trace, conditions_of, without_unmet
from shmload.integrations._building.draws import CannotRepeat, Draw, Draws
from shmload.integrations._building.effects import Effects, Message, Watch
from shmload.integrations._building.hooks import next_number, renumber
from shmload.integrations._building.mapped import Spans, plain_tensors
from shmload.integrations._building.model_maker import ModelMaker
from shmload.integrations._building.pickling import Models, pickle_models
from shmload.integrations._building.pipeline_maker import PipelineMaker
from shmload.integrations._building.proofs import (
    Proof,
    codes_of,
    modules_in,
    names_of,
    proof_memo,
    reach_of,
)
from shmload.integrations._building.requests import Request
from shmload.integrations._building.sameness import Comparison, Different
from shmload.integrations._building.skeletons import Skeleton
from shmload.integrations._building.snapshot import Snapshot, is_memo
from shmload.integrations._building.stand_ins import StandIns

logger = logger_of(__name__)


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
        self._source = source
        self._stand_ins = StandIns(source, rules)
        self._build = Build(source, maker, rules, self._stand_ins, dtype, dict(request.kwargs))
        if self._build.skeleton_key() != request.key:
            raise Refused("the judge found something else than the load")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stand_ins.close()

    @property
    def proof_memo(self) -> Memo[Proof]:
        """What remembers the proof of these models' classes and configurations."""
        return proof_memo(self._source, (self._request.maker, self._request.wanted))

    def make(self) -> tuple[Skeleton, Proof]:
        """Build twice; return the skeleton, and what its build used, which is not proved yet.

        Raises:
            Refused: the models cannot be pickled, or do not come out of it as they were.
        """
        imported, fetched = set(sys.modules), _fetched()
        first, taken, trace = self._first_built()
        kinds = _kinds(self._build.models_of(first))
        used = Proof(
            codes=codes_of(trace),
            kinds=names_of(kinds),
            reach=reach_of(trace),
            conditions=conditions_of(trace, kinds),
            modules=tuple(sorted(_importable(set(sys.modules) - imported))),
            names={
                home: tuple(sorted(new))
                for home, names in _fetched().items()
                if (new := names - fetched.get(home, set()))
            },
        )
        self._stand_ins.fill_small()
        state = torch.get_rng_state()
        second, taken_again = self._built(self._build.build_ordinarily)
        draws = () if torch.equal(state, torch.get_rng_state()) else self._draws()
        if taken != taken_again:
            raise Refused(f"building registers {taken} hooks and then {taken_again}")
        self._require_same(first, second, "built a second time, ")
        made = self._pickled(second, used, draws, taken)
        third, _ = self._built_around(made)
        self._require_same(second, third, "from a skeleton, ")
        return made, used

    def prove(
        self, made: Skeleton, used: Proof, in_child: Callable[[Callable[[], Any]], Any]
    ) -> tuple[Skeleton, Proof]:
        """Compare what building leaves in a process with what the skeleton leaves.

        Watches this process from now on: call it in a child, which has built nothing.

        Args:
            made: the skeleton.
            used: what its build used.
            in_child: calls a function in a forked child.

        Returns:
            The skeleton, perhaps with messages to repeat, and the proof, with the reason why there
            is no skeleton if the two differ in what cannot be repeated.
        """
        for module in used.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        conditions = without_unmet(used.conditions)
        made = replace(made, conditions=conditions)
        used = replace(used, conditions=conditions)
        gc.collect()
        gc.disable()
        everything, near = Snapshot(), Snapshot(modules_in(used.reach))
        watch = _watch()

        def effects(skeleton: Skeleton | None) -> list[Effects]:
            _seed()
            build = self._build.build_ordinarily
            if skeleton:
                build = functools.partial(self._build.build_around, skeleton)
            watch.during(lambda: None, everything)
            first = watch.during(build, everything)
            watch.during(lambda: None, near)
            return [first, watch.during(build, near)]

        wanted = in_child(lambda: effects(None))
        got = in_child(lambda: effects(made))
        if missing := _missing(wanted[0].messages, got[0].messages):
            made = replace(made, messages=missing)
            got = in_child(lambda: effects(made))
        # What is left each time comes first: it is the better reason.
        for number, when in ((1, "each time"), (0, "the first time")):
            if difference := _difference(wanted[number], got[number]):
                return made, replace(used, reason=f"{difference} ({when})")
        return made, used

    def derive(self, proof: Proof) -> Skeleton | None:
        """As `make`, for a class that is proved; return None if only a whole look can tell.

        What building leaves is compared here too: states, messages and deeds, and the objects of
        the modules whose code ran. Watches this process from now on: call it in a child.

        Raises:
            Refused: as for `make`, or the class can have no skeleton.
        """
        first, taken, trace = self._first_built()
        if lacking := proof.lacks(trace, _kinds(self._build.models_of(first))):
            logger.info("a class is examined again: %s is new", lacking)
            return None
        if proof.reason:
            raise Refused(proof.reason)
        self._stand_ins.fill_small()
        snapshot = Snapshot(modules_in(proof.reach))
        watch = _watch()

        def built(build: Callable[[], tuple[Any, int]]) -> tuple[Any, int, Effects]:
            kept: list[tuple[Any, int]] = []
            _seed()
            watch.during(lambda: None, snapshot)
            effects = watch.during(lambda: kept.append(build()), snapshot)
            return (*kept[0], effects)

        second, taken_again, wanted = built(lambda: self._built(self._build.build_ordinarily))
        state = torch.get_rng_state()
        _seed()
        draws = () if torch.equal(state, torch.get_rng_state()) else self._draws()
        if taken != taken_again:
            raise Refused(f"building registers {taken} hooks and then {taken_again}")
        self._require_same(first, second, "built a second time, ")
        made = self._pickled(second, proof, draws, taken)
        third, _, got = built(lambda: self._built_around(made))
        if missing := _missing(wanted.messages, got.messages):
            made = replace(made, messages=missing)
            third, _, got = built(lambda: self._built_around(made))
        self._require_same(second, third, "from a skeleton, ")
        if difference := _difference(wanted, got):
            logger.info("a class is examined again: %s", difference)
            return None
        return made

    def _first_built(self) -> tuple[Any, int, Trace]:
        """Return what `_built` does for an ordinary build, and a trace of it.

        Raises:
            Refused: the library needs the weights, of which the stand-ins have none; or a model has
                tensors that are made of others, as quantised ones may be.
        """
        try:
            with Trace() as trace:
                first, taken = self._built(self._build.build_ordinarily)
        except Exception as exc:
            raise Refused(f"building reads weights: {type(exc).__name__}: {exc}") from None
        for model in self._build.models_of(first).values():
            for key, tensor in model.state_dict().items():
                if next(plain_tensors(tensor)) is not tensor:
                    raise Refused(f"{type(model).__name__}: {key} is a {type(tensor).__name__}")
        return first, taken, trace

    def _pickled(self, pipe: Any, used: Proof, draws: tuple[Draw, ...], taken: int) -> Skeleton:
        """Return the skeleton of what was built over the stand-ins.

        Args:
            pipe: what was built.
            used: what building it uses.
            draws: the random numbers that this draws.
            taken: how many numbers of hooks it takes.

        Raises:
            Refused: the models cannot be pickled, or building reads or changes their weights.
        """
        models = self._build.models_of(pipe)
        self._require_untouched(models)
        try:
            pickled = pickle_models(models, self._stand_ins.holdings.open_files())
        except Exception as exc:  # a model may hold anything, and not everything can be pickled
            raise Refused(f"{_names(models)}: {exc}") from None
        return Skeleton(
            source=self._request.given,
            root=self._request.root,
            class_name=self._request.class_name or self._request.wanted or "",
            dtype=str(self._request.torch_dtype),
            models=pickled,
            conditions=used.conditions,
            modules=used.modules,
            draws=draws,
            hooks=taken,
            names=used.names,
        )

    def _built_around(self, made: Skeleton) -> tuple[Any, int]:
        """Return what `_built` does for a build around a skeleton.

        Raises:
            Refused: that fails.
        """
        try:
            return self._built(lambda: self._build.build_around(made))
        except Exception as exc:
            raise Refused(f"{made.class_name}: {type(exc).__name__}: {exc}") from None

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


def _watch() -> Watch:
    own = f"{SHM_DIR}/{name_prefix()}"
    return Watch(lambda path: path.startswith(own))


def _seed() -> None:
    """Set the random states, which a fork renews."""
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)


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
