"""`redirect`: the classes whose loading is led through shared memory, and the patches that lead it.

A patch is a method in front of the library's own. Classes are patched while at least one
redirection is open: those that are imported at once, the others when they are imported.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal, NamedTuple, Self

from shmload._host.changes import add_lock
from shmload._wording import logger_of
from shmload.errors import ArgumentError

logger = logger_of("shmload.redirect")

Kind = Literal[
    "pipeline", "diffusers model", "transformers model", "pipeline file", "diffusers model file"
]
OF_FILES: tuple[Kind, ...] = ("pipeline file", "diffusers model file")
OF_PIPELINES: tuple[Kind, ...] = ("pipeline", "pipeline file")

CLASSES: dict[str, tuple[Kind, str]] = {
    "diffusers.pipelines.pipeline_utils": ("pipeline", "DiffusionPipeline"),
    "diffusers.pipelines.auto_pipeline": ("pipeline", "AutoPipelineFor"),
    "diffusers.models.modeling_utils": ("diffusers model", "ModelMixin"),
    "diffusers.models.auto_model": ("diffusers model", "AutoModel"),
    "diffusers.loaders.single_file": ("pipeline file", "FromSingleFileMixin"),
    "diffusers.loaders.single_file_model": ("diffusers model file", "FromOriginalModelMixin"),
    "transformers.modeling_utils": ("transformers model", "PreTrainedModel"),
    "transformers.models.auto.modeling_auto": ("transformers model", "AutoModel"),
}
"""By module: what its classes load, and how their names begin."""
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")
"""Packages whose code makes up the libraries' own methods."""


class Options(NamedTuple):
    """How calls are redirected."""

    keep: bool | str
    """As for `load_pipeline`."""
    is_verbose: bool
    """Say on standard error how each call goes."""


class Patch:
    """Puts a method in front of a class's own that loads, at once and until `undo`.

    Signature, documentation and name are those of the method behind it.

    Args:
        owner: the class, which has the method of its own.
        kind: what the class loads.
    """

    def __init__(self, owner: type, kind: Kind) -> None:
        self.owner = owner
        self.kind = kind
        self.method = _method_of(kind)
        self.original: classmethod[Any, Any, Any] = vars(owner)[self.method]
        function = self.original.__func__
        self.path_argument: str = inspect.unwrap(function).__code__.co_varnames[1]
        """The name of the argument that says what to load."""

        @functools.wraps(function)
        def load(cls: type, *args: Any, **kwargs: Any) -> Any:
            options = [*_open.values()][-1:]
            if not options:  # another program's patch still calls this one
                return self.call_original(cls, args, kwargs)
            # Not at the top: it imports what a program may not want to wait for when it starts.
            from shmload._redirecting.calls import answer

            return answer(self, options[0], cls, args, kwargs)

        self._descriptor: classmethod[Any, Any, Any] = classmethod(load)
        setattr(owner, self.method, self._descriptor)

    def undo(self) -> None:
        """Restore what was there. If another patch lies on top by now, that one stays."""
        if vars(self.owner).get(self.method) is self._descriptor:
            setattr(self.owner, self.method, self.original)

    def call_original(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what was there, for a class."""
        return self.original.__get__(None, cls)(*args, **kwargs)

    def answers(self, cls: type) -> bool:
        """Tell whether a class has no such method between itself and this patch."""
        return inspect.getattr_static(cls, self.method) is self._descriptor


def _method_of(kind: Kind) -> str:
    return "from_single_file" if kind in OF_FILES else "from_pretrained"


def classes_of(module: ModuleType) -> list[tuple[type, Kind]]:
    """Return the classes of a module whose own method is the library's and can be patched."""
    kind, prefix = CLASSES[module.__name__]
    return [
        (found, kind)
        for name, found in sorted(vars(module).items())
        if name.startswith(prefix)
        and isinstance(found, type)
        and found.__module__ == module.__name__
        and _is_of_library(vars(found).get(_method_of(kind)))
    ]


def _is_of_library(method: object) -> bool:
    """Tell whether a method, with all that wraps it, is the library's and no program's patch."""
    function: Any = method.__func__ if isinstance(method, classmethod) else None
    while function is not None:
        home = getattr(function, "__globals__", {}).get("__name__", "")
        if home.partition(".")[0] not in LIBRARIES:
            return False
        function = getattr(function, "__wrapped__", None)
    return isinstance(method, classmethod)


# On and off ---------------------------------------------------------------------------------------

_lock = add_lock()
_open: dict["Redirection", Options] = {}
"""The open redirections; the last one counts."""
_patches: dict[type, Patch] = {}


class Redirection:
    """An open redirection; a context that closes it. The first one patches."""

    def __init__(self, options: Options) -> None:
        _turn_on(self, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; the last one restores what was patched. A second call does nothing."""
        with _lock:
            _open.pop(self, None)
            if _open:
                return
            if _finder in sys.meta_path:
                sys.meta_path.remove(_finder)
            while _patches:
                _patches.popitem()[1].undo()


def redirect(
    *, keep: bool | Literal["converted"] = "converted", verbose: bool = False
) -> Redirection:
    """Lead `from_pretrained` of diffusers and transformers through shared memory.

    From now on pipelines, models of diffusers and models of transformers come from shared memory,
    also by `from_single_file`, where the result is the same, and from the library itself otherwise.
    It holds for the whole process, for libraries that are imported already and for those that will
    be. Calls nest: the options of the last one that is open count. It imports none of the
    libraries.

        shmload.redirect()                # for the rest of the process

        with shmload.redirect():          # or for a block
            pipe = DiffusionPipeline.from_pretrained(...)

    Each call is logged by `shmload.redirect` at the level INFO, with its way and the reason for it;
    at WARNING if shmload failed, so that the library had to load.

    Args:
        keep: as for `load_pipeline`. By default the segments that had to be made stay for the next
            process, until `shmload rm` or until a load needs their room.
        verbose: write these lines on standard error, too.

    Returns:
        The redirection, which is open until its `close`, or the end of a `with` block.

    Raises:
        ArgumentError: an argument has another type.
    """
    if not isinstance(keep, bool) and keep != "converted":
        raise ArgumentError(f"keep is {keep!r}; it must be True, False or 'converted'")
    if not isinstance(verbose, bool):
        raise ArgumentError(f"verbose is {verbose!r}; it must be True or False")
    return Redirection(Options(keep, verbose))


def _turn_on(opened: Redirection, options: Options) -> None:
    with _lock:
        _open[opened] = options
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    for name in CLASSES:
        module = sys.modules.get(name)
        if module and getattr(module.__spec__, "_initializing", False):
            module = importlib.import_module(name)  # waits for the thread that imports it
        if module:
            _patch(module)


def _patch(module: ModuleType) -> None:
    try:
        with _lock:
            for owner, kind in classes_of(module) if _open else ():
                if owner not in _patches:
                    _patches[owner] = Patch(owner, kind)
    except Exception:  # an import must not fail because of it
        logger.warning("%s is not redirected", module.__name__, exc_info=True)


class Finder:
    """Stands first in `sys.meta_path`, lets the others find a module, and waits for its end.

    Args:
        names: of the modules.
        loaded: is called with each module once it is executed. Must not raise.
    """

    def __init__(self, names: Collection[str], loaded: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls the function."""
        if fullname not in self._names:
            return None
        for finder in list(sys.meta_path):
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        """Have a loader, which is that of one module, call the function at its end."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._loaded(module)

        loader.exec_module = exec_module


_finder = Finder(CLASSES, _patch)
