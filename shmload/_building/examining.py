"""Examining one request: making a skeleton, and finding out whether it can stand for a build."""

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from msgspec.structs import replace

from shmload._building.build import Build
from shmload._building.conditions import Trace, conditions_of, without_unmet
from shmload._building.draws import CannotRepeat, Draw, Draws, next_number, renumber
from shmload._building.effects import Effects, Message, Watch, set_seeds
from shmload._building.judging import Refused, in_child
from shmload._building.mapped import Spans, plain_tensors
from shmload._building.parts import modules
from shmload._building.pickling import Models, pickle_models
from shmload._building.proofs import (
    Proof,
    codes_of,
    modules_in,
    names_of,
    proof_memo,
    reach_of,
    recall_proof,
)
from shmload._building.queued import Request
from shmload._building.sameness import Comparison, Different
from shmload._building.skeletons import Skeleton
from shmload._building.snapshot import Snapshot, is_memo
from shmload._building.stand_ins import StandIns
from shmload._compat import lazy_names
from shmload._host.memo import Memo
from shmload._host.procfs import is_modified, mappings
from shmload._host.shm import SHM_DIR
from shmload._segments.names import name_prefix
from shmload._wording import logger_of

if TYPE_CHECKING:
    from shmload._loading.load import Load

logger = logger_of(__name__)


def examine(request: Request) -> Skeleton:
    """Return the skeleton that a request asks for, or one that says why there is none."""
    made, _ = derive(request)
    return made or examine_wholly(request)


def derive(request: Request) -> tuple[Skeleton | None, bool]:
    """Return the skeleton of a class that is proved, None otherwise.

    And whether this process has imported what the class needs.
    """
    try:
        with Examination(request) as examination:
            proof = recall_proof(examination.proof_memo)
            if proof is None:
                return None, False
            _import(proof.modules)
            return in_child(lambda: examination.derive(proof)), True
    except Refused as exc:
        return Skeleton.of(request, reason=str(exc)), True


def examine_wholly(request: Request) -> Skeleton:
    """As `examine`, by a look at all objects."""
    try:
        with Examination(request) as examination:
            made, used = in_child(examination.make)
            made, used = in_child(lambda: examination.prove(made, used))
            # What is proved stays proved for other dtypes.
            if not (used.reason and recall_proof(examination.proof_memo)):
                examination.proof_memo.write(used)
            return Skeleton.of(request, reason=used.reason) if used.reason else made
    except Refused as exc:
        return Skeleton.of(request, reason=str(exc))


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
        maker, dtype = request.maker, request.dtype
        source = maker.import_classes(request.source)
        rules = {each.component: maker.rule(each, dtype) for each in source.checkpoints}
        self._source = source
        self._stand_ins = StandIns(source, rules)
        load = cast("Load", self._stand_ins)
        self._build = Build(source, maker, rules, load, dtype, dict(request.kwargs))
        if self._build.skeleton_key() != request.key:
            raise Refused("the judge found something else than the load")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stand_ins.close()

    @property
    def proof_memo(self) -> Memo[Proof]:
        """What remembers the proof of these models' classes and configurations."""
        maker = self._request.maker
        return proof_memo(self._source, (maker.is_of_pipelines, maker.name))

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
        made, _, _ = self._made(first, taken, used, _unwatched)
        return made, used

    def prove(self, made: Skeleton, used: Proof) -> tuple[Skeleton, Proof]:
        """Compare what building leaves in a process with what the skeleton leaves.

        Watches this process from now on: call it in a child, which has built nothing.

        Args:
            made: the skeleton.
            used: what its build used.

        Returns:
            The skeleton, perhaps with messages to repeat, and the proof, with the reason why there
            is no skeleton if the two differ in what cannot be repeated.
        """
        _import(used.modules)
        conditions = without_unmet(used.conditions)
        made = replace(made, conditions=conditions)
        used = replace(used, conditions=conditions)
        gc.collect()
        snapshots = Snapshot(), Snapshot(modules_in(used.reach))
        watch = _watch()

        def effects(build: Callable[[], object]) -> list[Effects]:
            return [watch.effects(build, each) for each in snapshots]

        def effects_of_skeleton() -> list[Effects]:
            return in_child(lambda: effects(lambda: self._build.build_around(made)))

        wanted = in_child(lambda: effects(self._build.build_ordinarily))
        got = effects_of_skeleton()
        if missing := _missing(wanted[0].messages, got[0].messages):
            made = replace(made, messages=missing)
            got = effects_of_skeleton()
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
        snapshot, watch = Snapshot(modules_in(proof.reach)), _watch()
        look = functools.partial(watch.effects, snapshot=snapshot)
        made, wanted, got = self._made(first, taken, proof, look)
        if difference := _difference(wanted, got):
            logger.info("a class is examined again: %s", difference)
            return None
        return made

    def _made(
        self, first: Any, taken: int, used: Proof, look: Callable[[Callable[[], object]], Effects]
    ) -> tuple[Skeleton, Effects, Effects]:
        """Return the skeleton of what was built, and what an ordinary build and it have left.

        Args:
            first: what was built the first time.
            taken: how many numbers of hooks that took.
            used: what building uses.
            look: calls a function and returns what it left.

        Raises:
            Refused: the models cannot be pickled, or are not the same each time.
        """

        def built(build: Callable[[], Any]) -> tuple[Any, int, Effects]:
            kept: list[tuple[Any, int]] = []
            effects = look(lambda: kept.append(self._built(build)))
            return (*kept[0], effects)

        self._stand_ins.mark_small()
        second, taken_again, wanted = built(self._build.build_ordinarily)
        state = torch.get_rng_state()
        set_seeds()
        draws = () if torch.equal(state, torch.get_rng_state()) else self._draws()
        if taken != taken_again:
            raise Refused(f"building registers {taken} hooks and then {taken_again}")
        self._require_same(first, second, "built a second time, ")
        made = self._pickled(second, used, draws, taken)
        try:
            third, _, got = built(lambda: self._build.build_around(made))
            if missing := _missing(wanted.messages, got.messages):
                made = replace(made, messages=missing)
                third, _, got = built(lambda: self._build.build_around(made))
        except Exception as exc:
            raise Refused(f"{made.class_name}: {type(exc).__name__}: {exc}") from None
        self._require_same(second, third, "from a skeleton, ")
        return made, wanted, got

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
        return Skeleton.of(
            self._request,
            models=pickled,
            conditions=used.conditions,
            modules=used.modules,
            draws=draws,
            hooks=taken,
            names=used.names,
        )

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
        if any(map(is_modified, mappings(inodes))):
            raise Refused(f"{_names(models)}: building changes weights")
        spans = Spans(inodes)
        for name, model in models.items():
            for key, tensor in model.state_dict().items():
                if spans.find(tensor) and not spans.holds_unread(tensor):
                    raise Refused(f"{name}: building reads the weight {key}")


def _watch() -> Watch:
    gc.disable()  # what ends of earlier work would count as left by a build
    own = f"{SHM_DIR}/{name_prefix()}"
    return Watch(lambda path: path.startswith(own))


def _unwatched(build: Callable[[], object]) -> Effects:
    set_seeds()
    build()
    return Effects((), ())


def _kinds(models: Models) -> set[type]:
    return {type(module) for model in models.values() for module in model.modules()}


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)


def _names(models: Models) -> str:
    return ", ".join(type(model).__name__ for model in models.values())


def _fetched() -> dict[str, set[str]]:
    """Return, by module that imports names at their first use, those that it has."""
    return {
        home: set(vars(module)).intersection(names)
        for home, module in modules()
        if (names := lazy_names(module))
    }


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
