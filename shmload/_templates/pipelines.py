"""The pipelines that programs load: told to the template, and loaded ahead by its branches."""

import contextlib
import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from shmload._templates import messages, place, wire
from shmload._templates.freshness import Freshness
from shmload._templates.imports import Output, Unfit, in_copy, require_fitness
from shmload._templates.messages import Noted
from shmload._templates.neutral import Snapshot, settings
from shmload._templates.recorder import Recorder
from shmload._templates.stash import Stash
from shmload._templates.variables import note_variables

_DOOR = "shmload._building.prepared"
_LOADS = "shmload._preparing"
_CODE = "shmload._building.unchanged"
_CALLED = "shmload.integrations.diffusers"
_MAX_PIPELINES = 4
# Programs inherit low numbers; what is opened ahead gets higher ones.
_FIRST_NUMBER = 128
_TELL_TIMEOUT_S = 0.2
# Each program has a new one, or is told of it by the load itself.
_FREE = {"the way that processes start", "the level of logging", "the state of random",
         "numpy's random state", "torch's random state"}  # fmt: skip
# Of these, of what they need or can use, and of what that needs, a load may import modules beside
# those of the template.
_LIBRARIES = ("accelerate", "bitsandbytes", "diffusers", "ftfy", "gguf", "kernels",
              "optimum-quanto", "peft", "protobuf", "scipy", "sentencepiece", "tiktoken", "torch",
              "torchao", "torchvision", "transformers", "xformers")  # fmt: skip


class Pipelines:
    """The pipelines of a template's programs; make it before the modules are hidden.

    Args:
        key: of the template.
        modules: those that it has imported, by name.
        stash: hides them from programs.
        recorder: of their imports.
    """

    def __init__(
        self, key: str, modules: Mapping[str, Any], stash: Stash, recorder: Recorder
    ) -> None:
        self._door: Any = modules.get(_DOOR)
        """The module that gives programs what was loaded; None if it was not imported."""
        self._loads: Any = modules.get(_LOADS)
        self._socket = place.socket_of(key)
        self._stash = stash
        self._recorder = recorder
        self._program = ""
        self._requests: list[str] = []
        self._template = 0
        self.freshness: Freshness | None = None
        """Of the modules that were imported for pipelines here."""
        self.loaded = 0
        """How many pipelines are loaded here."""
        self.why_not = ""
        """Why one is not, though it could be; its modules are imported nevertheless."""
        self.descriptors: set[int] = set()
        """What has to stay open for the pipelines that are loaded here."""
        if self.can_load:
            modules[_CODE].note_code()

    @property
    def can_load(self) -> bool:
        """Whether copies of this process can load pipelines."""
        return self._door is not None and self._loads is not None

    # In a branch ----------------------------------------------------------------------------------

    def load(self, requests: Sequence[str], noted: Sequence[Collection[str]]) -> None:
        """Load pipelines, and give their segments up; the modules are hidden before and after.

        What is not resident is not loaded; what its load imports is imported nevertheless.

        Args:
            requests: the pipelines.
            noted: what the load of each has imported in a program, as far as that is known.

        Raises:
            Unfit: a load is not fit to be made ahead.
            Exception: a load has raised it.
        """
        # In copies, which that may spoil: this process is to be like one that has done nothing.
        decodes = json.loads(in_copy(lambda: self._which_decode(requests)))
        imported = json.loads(in_copy(lambda: self._rehearse(requests, decodes, noted)))
        self._stash.show_all()
        self._recorder.start()
        with _high_numbers(), _no_output() as output:
            self._recorder.drain = output.drain
            for text, must_decode, (names, why_not) in zip(
                requests, decodes, imported, strict=True
            ):
                for name in names:
                    with contextlib.suppress(ImportError):  # put into `sys.modules` by hand
                        importlib.import_module(name)
                self.why_not = self.why_not or why_not
                if not must_decode and not why_not:
                    request = self._door.decode(text, names)
                    self.descriptors |= self._loads.prepare(request)
                    self.loaded += 1
        self._recorder.stop()
        require_fitness("the load")
        self.freshness = Freshness(but=self._stash.names)
        # A program for which one of these has another value gets a template of its own next time.
        note_variables(self._recorder.variables)
        self._stash.hide()
        self._door.note_versions()

    def _which_decode(self, requests: Sequence[str]) -> str:
        self._stash.show_all()
        return json.dumps([self._loads.decodes(self._door.decode(each)) for each in requests])

    def _rehearse(
        self, requests: Sequence[str], decodes: Sequence[bool], noted: Sequence[Collection[str]]
    ) -> str:
        """Load pipelines as a program does.

        Returns:
            As JSON, for each: what its load has imported; and why it cannot be loaded ahead, since
            it writes something or leaves something changed, or "".

        Raises:
            Unfit: its imports are of no library, or change a setting.
        """
        self._stash.begin([])
        importlib.import_module(_CALLED)
        found = []
        for text, must_decode, names in zip(requests, decodes, noted, strict=True):
            request = self._door.decode(text)
            before = {*sys.modules, "__mp_main__"}  # which is the program
            settings_before = settings()
            with _no_output():  # of an import, a program hears when it makes that
                if must_decode:
                    _require_libraries(names, self._stash.names)
                    for name in names:
                        with contextlib.suppress(ImportError):
                            importlib.import_module(name)
                else:
                    self._loads.load(request)
            imported = [name for name in list(sys.modules) if name not in before]
            _require_libraries(imported, self._stash.names)
            now = settings()
            changes = [n for n, v in settings_before.items() if n not in _FREE and now.get(n) != v]
            if changes:
                raise Unfit(f"what its load imports changes {'; '.join(changes)}")
            found.append((imported, "" if must_decode else self._why_not_ahead(request)))
        return json.dumps(found)

    def _why_not_ahead(self, request: Any) -> str:
        """Load a pipeline once more, with all its modules there; return why not ahead, or ""."""
        snapshot = Snapshot()
        with _no_output() as output:
            self._loads.load_ahead(request)
            said = output.drain()
        changes = snapshot.changes()
        if changes:
            return f"its load changes what other programs see: {'; '.join(changes[:5])}"
        return "its load writes or warns" if said else ""

    # In a program ---------------------------------------------------------------------------------

    def begin(self, name: str, *, prepares: bool) -> None:
        """Have a program take what is loaded, and tell of its loads.

        Args:
            name: of the program.
            prepares: it takes and tells; else neither.
        """
        if self._door is None:
            return
        if not prepares:
            self._door.drop()
            return
        self._program = name
        self._template = os.getppid()
        self._door.on_load = self._tell
        self._door.hidden = self._stash

    def _tell(self, request: Any, way: str) -> None:
        """Tell the template what this program has loaded."""
        try:
            text = self._door.encode(request)
        except UnicodeEncodeError:  # the name of a file or directory is not UTF-8
            return
        self._requests = [*self._requests, text][:_MAX_PIPELINES]
        # One that was loaded ahead for another program is noted for this one, too.
        modules = [] if way == "prepared" else [*request.modules]
        noted = Noted(self._program, self._requests, modules, self._template, int(way == "stale"))
        tell(self._socket, noted)


def tell(path: str, noted: Noted) -> None:
    """Tell a template of pipelines; do without it if it does not listen at once."""
    with (
        contextlib.suppress(OSError),
        contextlib.closing(wire.connect(path, _TELL_TIMEOUT_S)) as channel,
    ):
        messages.send(channel, noted)


def _require_libraries(names: Collection[str], known: Collection[str]) -> None:
    """Check that modules are the libraries' own, or of what these need or can use.

    Raises:
        Unfit: one is another's.
    """
    tops = {name.partition(".")[0] for name in known} | sys.stdlib_module_names
    others = {name.partition(".")[0] for name in names} - tops
    if not others:
        return
    metadata = importlib.import_module("importlib.metadata")
    homes = metadata.packages_distributions()
    closure: set[str] = set()
    waiting = list(_LIBRARIES)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in closure:
            closure.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                waiting += [
                    re.split(r"[ <>=!~;\[]", each)[0]
                    for each in metadata.requires(name) or ()
                    # transformers, say, imports opentelemetry where it is installed.
                    if "extra ==" not in each or name in _LIBRARIES
                ]
    for top in sorted(others):
        if not {each.lower().replace("_", "-") for each in homes.get(top, ())} & closure:
            raise Unfit(f"its load imports {top}, which is of no library")


@contextlib.contextmanager
def _high_numbers() -> Iterator[None]:
    """Have what is opened in a block get descriptors from `_FIRST_NUMBER` on."""
    taken: list[int] = []
    try:
        while not taken or taken[-1] < _FIRST_NUMBER:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for number in taken:
            os.close(number)


@contextlib.contextmanager
def _no_output() -> Iterator[Output]:
    """Catch what is written to the standard streams in a block; the libraries show no bars."""
    bars = [
        vars(module)
        for name in ("diffusers.utils.logging", "transformers.utils.logging")
        if (module := sys.modules.get(name)) and hasattr(module, "_tqdm_active")
    ]
    were_active = [held["_tqdm_active"] for held in bars]
    for held in bars:
        held["_tqdm_active"] = False
    try:
        with Output({fd: os.memfd_create("shmload-said", os.MFD_CLOEXEC) for fd in (1, 2)}) as said:
            yield said
    finally:
        for held, was_active in zip(bars, were_active, strict=True):
            held["_tqdm_active"] = was_active
