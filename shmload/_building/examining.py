"""Examining one request: making a skeleton, and finding out whether it can stand for a build."""

import contextlib
import gc
import importlib
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from msgspec.structs import replace
from tqdm import tqdm

from shmload._building.build import Build
from shmload._building.conditions import Trace, conditions_of, without_unmet
from shmload._building.draws import Draw, Draws, next_number, renumber
from shmload._building.effects import Effects, Message, Watch, set_seeds
from shmload._building.limited import in_child
from shmload._building.mapped import Spans, plain_tensors
from shmload._building.parts import modules
from shmload._building.pickling import Models, PickledModels, pickle_models
from shmload._building.queued import Refused, Request
from shmload._building.sameness import Comparison
from shmload._building.skeletons import Skeleton
from shmload._building.snapshot import Snapshot, is_memo
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._compat import lazy_names
from shmload._host.pagemap import is_modified
from shmload._host.procfs import mappings
from shmload._host.shm import SHM_DIR, write_at
from shmload._loading.holdings import Holdings
from shmload._segments.names import name_prefix
from shmload._segments.part import Hollow
from shmload._segments.segment import Stay

if TYPE_CHECKING:
    from shmload._loading.load import Load

# Whether code has read a larger tensor is told by the kernel's page table.
_SMALL_NBYTES = 160 << 10
# Any float of these bytes is a small number other than zero.
_PATTERN = b"\x21\x3c"


def examine(request: Request) -> Skeleton:
    """Return the skeleton that a request asks for, or one that says why there is none.

    Raises:
        ShmloadError: a file cannot be read.
    """
    maker, dtype = request.maker, request.dtype
    source = maker.import_classes(request.source)
    rules = {each.component: maker.rule(each, dtype) for each in source.checkpoints}
    with contextlib.closing(StandIns()) as files:
        files.make(source, rules)
        load = cast("Load", types.SimpleNamespace(holdings=files))
        build = Build(source, maker, rules, load, dtype, dict(request.kwargs))
        try:
            if build.skeleton_key() != request.key:
                raise Refused("the judge found something else than the load")
            examination = Examination(request, build, files)
            made = in_child(examination.make)
            return in_child(lambda: examination.prove(made))
        except Refused as exc:
            return Skeleton.of(request, reason=str(exc))


class StandIns(Holdings):
    """Files in place of a load's segments, of the same length and header, without the bytes.

    Models are built over them as over segments. They have no name and take no memory, but for
    headers and the pages that are touched. Models stay valid when they are closed.
    """

    def __init__(self) -> None:
        super().__init__(Stay.PRIVATE, is_hollow=True)

    def make(self, source: Source, rules: Mapping[str, Rule]) -> None:
        """Make a file for each shard.

        Args:
            source: what to build.
            rules: the rule of each component's checkpoint.

        Raises:
            CheckpointError: a shard cannot be opened, or its header is wrong.
        """
        self.open_shards(source, rules, None)
        for shard in self._shards:
            name = shard.plan.segment
            if name not in self._held:  # two paths may lead to one file
                self._held[name] = hollow = Hollow(name)
                hollow.prepare(shard.layout)

    def mark_small(self) -> None:
        """Write numbers other than zero into all tensors whose reading nothing else would show."""
        for name, fd in self.open_files():
            header = read_header(fd, name)
            for spec in header.tensors:
                if 0 < spec.nbytes <= _SMALL_NBYTES:
                    content = (_PATTERN * (spec.nbytes // 2 + 1))[: spec.nbytes]
                    write_at(fd, content, header.data_offset + spec.begin)


class Examination:
    """Examines the models of one load, in steps for processes of their own.

    Args:
        request: of the load.
        build: builds them over stand-ins.
        files: these; they stay the caller's.
    """

    def __init__(self, request: Request, build: Build, files: StandIns) -> None:
        self._request = request
        self._build = build
        self._files = files

    def make(self) -> Skeleton:
        """Build twice, and from the skeleton of that; return the skeleton, which is not proved yet.

        Raises:
            Refused: the models cannot be pickled, or are not the same each time.
        """
        imported, fetched = set(sys.modules), _fetched()
        first, taken, trace = self._first_built()
        self._files.mark_small()
        set_seeds()
        second, taken_again = self._built(self._build.build_ordinarily)
        state = torch.get_rng_state()
        set_seeds()
        draws = () if torch.equal(state, torch.get_rng_state()) else self._draws()
        if taken != taken_again:
            raise Refused(f"building registers {taken} hooks and then {taken_again}")
        self._require_same(first, second, "built a second time, ")
        models, named = self._pickled(self._build.models_of(second))
        made = Skeleton.of(
            self._request,
            models=models,
            conditions=conditions_of(trace, named),
            modules=tuple(sorted(_importable(set(sys.modules) - imported))),
            names={
                home: tuple(sorted(new))
                for home, names in _fetched().items()
                if (new := names - fetched.get(home, set()))
            },
            draws=draws,
            hooks=taken,
        )
        try:
            third, _ = self._built(lambda: self._build.build_around(made))
        except Exception as exc:
            raise Refused(f"{made.class_name}: {type(exc).__name__}: {exc}") from None
        self._require_same(second, third, "from a skeleton, ")
        return made

    def prove(self, made: Skeleton) -> Skeleton:
        """Compare what building leaves in a process with what the skeleton leaves.

        Watches this process from now on: call it in a child, which has built nothing.

        Args:
            made: the skeleton.

        Returns:
            The skeleton, perhaps with messages to repeat.

        Raises:
            Refused: the two differ in what cannot be repeated.
        """
        assert made.conditions is not None
        for module in made.modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        made = replace(made, conditions=without_unmet(made.conditions))
        gc.collect()
        gc.disable()  # objects of earlier work that it ends would count as changed by a build
        own = f"{SHM_DIR}/{name_prefix()}"
        snapshot, watch = Snapshot(), Watch(lambda path: path.startswith(own))

        def look(build: Callable[[], object]) -> list[Effects]:
            # A process's first bar leaves a thread, a lock and what they need. To have it later,
            # by the next bar, does no harm.
            with open(os.devnull, "w") as nowhere:
                tqdm(file=nowhere).close()
            list(snapshot.changes())  # what that and the fork have changed
            return [watch.effects(build, snapshot) for _ in range(2)]

        def effects(build: Callable[[], object]) -> list[Effects]:
            """Return what the first and the second build leave."""
            return in_child(lambda: look(build))

        wanted = effects(self._build.build_ordinarily)
        got = effects(lambda: self._build.build_around(made))
        if missing := _missing(wanted[0].messages, got[0].messages):
            made = replace(made, messages=missing)
            got = effects(lambda: self._build.build_around(made))
        # What is left each time comes first: it is the better reason.
        for number, when in ((1, "each time"), (0, "the first time")):
            if difference := _difference(wanted[number], got[number]):
                raise Refused(f"{difference} ({when})")
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

    def _pickled(self, models: Models) -> tuple[PickledModels, set[Any]]:
        """Pickle what was built over the stand-ins, and tell what the pickle names.

        Raises:
            Refused: the models cannot be pickled, or building reads or changes their weights.
        """
        self._require_untouched(models)
        try:
            return pickle_models(models, self._files.open_files())
        except Exception as exc:  # a model may hold anything, and not everything can be pickled
            raise Refused(f"{_names(models)}: {exc}") from None

    def _built(self, build: Callable[[], Any]) -> tuple[Any, int]:
        """Return what was built, its hooks numbered from 0, and how many numbers that took."""
        first = next_number()
        pipe = build()
        taken = next_number() - first
        renumber(self._build.models_of(pipe).values(), -first)
        return pipe, taken

    def _draws(self) -> tuple[Draw, ...]:
        """Return the random numbers that a build draws."""
        with Draws() as draws:
            self._build.build_ordinarily()
        return tuple(draws.found)

    def _require_same(self, one: Any, other: Any, how: str) -> None:
        spans = Spans(self._files.inodes())
        Comparison(spans).require_same(one, other, f"{how}{type(one).__name__}")

    def _require_untouched(self, models: Models) -> None:
        """Refuse models whose weights are read or changed while they are built."""
        inodes = self._files.inodes()
        if any(map(is_modified, mappings(inodes))):
            raise Refused(f"{_names(models)}: building changes weights")
        spans = Spans(inodes)
        for name, model in models.items():
            for key, tensor in model.state_dict().items():
                if spans.find(tensor) and not spans.holds_unread(tensor):
                    raise Refused(f"{name}: building reads the weight {key}")


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
    return tuple((Counter(wanted) - Counter(got)).elements())


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
