"""The classes whose loading is led through shared memory, and the patches that lead it.

A patch is a method in front of the one that was there.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "pipeline", "diffusers model", "transformers model", "pipeline file", "diffusers model file"
]
OF_FILES: tuple[Kind, ...] = ("pipeline file", "diffusers model file")
OF_PIPELINES: tuple[Kind, ...] = ("pipeline", "pipeline file")

# A name that ends with a star stands for all classes of the module whose names begin so.
_CLASSES: dict[str, tuple[Kind, str]] = {
    "diffusers.pipelines.pipeline_utils": ("pipeline", "DiffusionPipeline"),
    "diffusers.pipelines.auto_pipeline": ("pipeline", "AutoPipelineFor*"),
    "diffusers.models.modeling_utils": ("diffusers model", "ModelMixin"),
    "diffusers.models.auto_model": ("diffusers model", "AutoModel"),
    "diffusers.loaders.single_file": ("pipeline file", "FromSingleFileMixin"),
    "diffusers.loaders.single_file_model": ("diffusers model file", "FromOriginalModelMixin"),
    "transformers.modeling_utils": ("transformers model", "PreTrainedModel"),
    "transformers.models.auto.modeling_auto": ("transformers model", "AutoModel*"),
}

MODULES = tuple(_CLASSES)
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")
"""Packages whose code makes up the libraries' own methods."""


def method_of(kind: Kind) -> str:
    """Return the name of the method by which classes of a kind load."""
    return "from_single_file" if kind in OF_FILES else "from_pretrained"


def classes_of(module: ModuleType) -> list[tuple[type, Kind]]:
    """Return the classes of a module that have a method of their own to patch."""
    kind, pattern = _CLASSES[module.__name__]
    prefix = pattern.removesuffix("*")
    return [
        (found, kind)
        for name, found in sorted(vars(module).items())
        if (name.startswith(prefix) if pattern.endswith("*") else name == pattern)
        and isinstance(found, type)
        and found.__module__ == module.__name__
        and isinstance(vars(found).get(method_of(kind)), classmethod)
    ]


class Options(NamedTuple):
    """How calls are redirected."""

    keep: bool | str
    """As for `load_pipeline`."""
    is_verbose: bool
    """Say on standard error how each call goes."""


# Patches ------------------------------------------------------------------------------------------

Router = Callable[["Patch", type, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the patch, the class that was asked, and the arguments; returns what the call returns."""


class Patch:
    """Puts a method in front of a class's own that loads, at once and until `undo`.

    Signature, documentation and name are those of the method behind it.

    Args:
        owner: the class, which has the method of its own.
        kind: what the class loads.
        route: answers the calls.
    """

    def __init__(self, owner: type, kind: Kind, route: Router) -> None:
        self.owner = owner
        self.kind = kind
        self.method = method_of(kind)
        self.original: classmethod[Any, Any, Any] = _without_ended(vars(owner)[self.method])
        """What was there: restored by `undo`."""
        self._descriptor = classmethod(_method(self, self.original.__func__, route))
        setattr(owner, self.method, self._descriptor)

    def undo(self) -> None:
        """Restore what was there. If another patch lies on top by now, that one stays."""
        if vars(self.owner).get(self.method) is self._descriptor:
            setattr(self.owner, self.method, self.original)
        else:
            _ended[id(self._descriptor)] = self

    def call_original(self, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call what was there, for a class."""
        return self.original.__get__(None, cls)(*args, **kwargs)

    def answers(self, cls: type) -> bool:
        """Tell whether a class has no such method between itself and this patch."""
        for each in cls.__mro__:
            if self.method in vars(each):
                return vars(each)[self.method] is self._descriptor
        return False

    @property
    def is_on_library(self) -> bool:
        """Whether what was there is the library's own code, and not another program's patch."""
        return all(
            str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] in LIBRARIES
            for function in layers(self.original.__func__)
        )

    @property
    def path_argument(self) -> str:
        """The name of the argument that says what to load."""
        innermost = layers(self.original.__func__)[-1]
        return str(innermost.__code__.co_varnames[1])


# Patches that another program's patch has outlived. When that one goes, it may put them back.
_ended: dict[int, Patch] = {}


def _without_ended(found: Any) -> Any:
    """Return what lies behind a patch that was undone, or else what was found."""
    while id(found) in _ended:
        found = _ended[id(found)].original
    return found


def _method(patch: Patch, function: Callable[..., Any], route: Router) -> Callable[..., Any]:
    @functools.wraps(function)
    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return route(patch, cls, args, kwargs)

    return load


def layers(function: Any) -> list[Any]:
    """Return a function and those that it wraps, the outermost first."""
    found = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        found.append(function)
    return found
