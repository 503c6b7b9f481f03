"""Makes modular pipelines: the library reads the specs, and models are loaded by `load_model`.

    from_pretrained ──▶ load_components ──▶ what replaces the class of a spec
                                                 │                 │
                                            of a model           others
                                                 ▼                 ▼
                                            load_model         the class

Guarantee: the pipeline is the one that the library makes. But a component that is missing is an
error, where the library warns and goes on without it.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import diffusers
import msgspec
import torch

from shmload._building.keywords import KEYWORDS
from shmload._building.libraries import inside, libraries
from shmload._building.maker import find_class_named
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.modular import is_absent, is_foreign
from shmload._checkpoints.wanted import Wanted, require_known
from shmload._compat import component_specs, dtype_keyword
from shmload._host.collector import forget_locals
from shmload.errors import (
    CheckpointError,
    ComponentFailed,
    LibraryMissing,
    LibraryTooOld,
    ShmloadError,
    SourceNotFound,
    UnknownComponent,
)

# How the repository and its components are found. Not the revision: each spec has its own.
_OF_BOTH = frozenset({"cache_dir", "force_download", "local_files_only", "proxies", "token"})
_PATH = "pretrained_model_name_or_path"
_TRUST = "trust_remote_code"
# The methods that the library calls on a spec's class.
_METHODS = ("from_pretrained", "from_single_file")


class LoadModel(Protocol):
    """Loads the model of one component."""

    def __call__(self, component: str, cls: Any, source: str, **given: Any) -> Any:
        """Return what the class loads from a source."""


def make_modular(
    wanted: Wanted,
    pipeline_class: type | str | None,
    kwargs: Mapping[str, Any],
    placed: Collection[object],
    function: Any,
    load_model: LoadModel,
) -> Any:
    """Return a modular pipeline with its components.

    Args:
        wanted: the repository, the dtype, and the components with weights that are loaded.
        pipeline_class: a class of modular pipelines, its name, or None.
        kwargs: for `from_pretrained` of the pipeline, and of its components; and components and
            configuration values that it is to have.
        placed: names of components that are to have a device of their own, or `default`.
        function: the public function, for errors.
        load_model: loads a model.

    Raises:
        ComponentFailed: a component is missing, or cannot be loaded.
        LibraryTooOld: diffusers 0.35 has other specs.
        UnknownArgument, UnknownComponent: the pipeline has nothing of that name.
        Exception: of the library, for the pipeline itself.
    """
    if _PATH not in diffusers.ComponentSpec.loading_fields():
        version = str(diffusers.__version__)
        raise LibraryTooOld("diffusers", version, "0.36", "modular pipelines as shmload knows them")
    cls: Any = pipeline_class or diffusers.ModularPipeline
    if isinstance(cls, str):
        cls = find_class_named(cls, "pipeline_class", [diffusers])
    named = {*inspect.signature(cls.from_pretrained).parameters, "revision"}
    own = {name: value for name, value in kwargs.items() if name in named | _OF_BOTH}
    with whole_libraries(), libraries(), inside():
        pipe = cls.from_pretrained(wanted.source, **own)
    held = {*component_specs(pipe), *pipe.config}
    require_known(kwargs, function, KEYWORDS.keys() | named | held)
    passed = {name: value for name, value in kwargs.items() if name in held}
    pipe.update_components(**passed)
    given = {
        name: value
        for name, value in kwargs.items()
        if name not in held and (name not in named or name == _TRUST)
    }
    if wanted.dtype is not None:
        # The library knows a dtype by component only as a dict.
        dtype = wanted.dtype
        given[dtype_keyword()] = dict(dtype) if isinstance(dtype, Mapping) else dtype
    replace_class = functools.partial(_replacement, wanted=wanted, load_model=load_model)
    _load(pipe, _chosen(pipe, wanted, passed, placed), given, replace_class)
    return pipe


def _chosen(
    pipe: Any, wanted: Wanted, passed: Collection[str], placed: Collection[object]
) -> list[str]:
    """Return the names of the components to load: without weights all, with weights the wanted.

    Raises:
        UnknownComponent: the pipeline has no component of a name.
    """
    specs, only = component_specs(pipe), wanted.components
    by_name = wanted.dtype if isinstance(wanted.dtype, Mapping) else {}
    for name in {*(only or ()), *by_name, *placed} - {"default", *specs}:
        raise UnknownComponent(str(name), wanted.source, specs)
    return [
        name
        for name in pipe.pretrained_component_names
        if name not in passed
        and getattr(pipe, name, None) is None
        and (only is None or name in only or not _is_model(specs[name].type_hint))
        and not (_is_here(specs[name]) and _is_left_out(specs[name], wanted))
    ]


class _Stopped(BaseException):
    """Passes through `load_components`, which makes a warning of any other error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _load(
    pipe: Any, names: list[str], given: dict[str, Any], replace_class: Callable[[Any], type]
) -> None:
    """Have the library load components, with a replacement for the class of each spec."""
    specs = [component_specs(pipe)[name] for name in names]
    replacements = [
        (spec, spec.type_hint, replace_class(spec))
        for spec in specs
        if spec.type_hint is None or isinstance(spec.type_hint, type)
    ]
    stopped: Exception | None = None
    before = sys.exception()
    try:
        for spec, _, replacement in replacements:
            spec.type_hint = replacement
        with whole_libraries():
            pipe.load_components(names, **given)
    except _Stopped as exc:
        stopped = exc.error
        forget_locals(exc, before)  # the library's hold the models
    finally:
        for spec, hint, replacement in replacements:  # those that were not loaded
            if spec.type_hint is replacement:
                spec.type_hint = hint
    if stopped:  # not above: that error's traceback keeps the models alive
        raise stopped
    for spec in specs:
        where = spec.pretrained_model_name_or_path
        if where and spec.type_hint and getattr(pipe, spec.name, None) is None:
            raise ComponentFailed(spec.name, where, "the library's warning says why")


def _replacement(spec: Any, *, wanted: Wanted, load_model: LoadModel) -> type:
    """Return a class that loads a component as its spec's class, which it then puts back.

    Args:
        spec: of the component.
        wanted: the pipeline; no other repository is trusted.
        load_model: as for `make_modular`.
    """
    hint = spec.type_hint

    def load(method: str, source: str, **given: Any) -> Any:
        spec.type_hint = hint
        if str(source) != str(wanted.source):
            given.pop(_TRUST, None)
        try:
            if _is_model(hint) and not is_foreign(source):
                made = load_model(spec.name, hint or diffusers.AutoModel, source, **given)
            else:
                with libraries(), inside():
                    made = getattr(hint, method)(source, **given)
        except Exception as exc:
            if _is_left_out(spec, wanted):  # of a repository that is here by now
                raise
            raise _Stopped(_explained(exc, spec.name, source)) from None
        spec.type_hint = hint or type(made)
        return made

    bases = (diffusers.AutoModel,) if _is_model(hint) else ()
    methods = {name: staticmethod(functools.partial(load, name)) for name in _METHODS}
    return type("Replacement", bases, methods)


def _explained(error: Exception, component: str, source: str) -> Exception:
    """Return the error of one component; of arguments and of room as it is."""
    about_source = (CheckpointError, SourceNotFound, LibraryMissing)
    full = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if full or (isinstance(error, ShmloadError) and not isinstance(error, about_source)):
        return error
    said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    found = ComponentFailed(component, source, said)
    found.__cause__ = error
    return found


def _is_here(spec: Any) -> bool:
    """Tell whether a spec names a directory; of another repository all may not be here yet."""
    return os.path.isdir(str(spec.pretrained_model_name_or_path))


def _is_left_out(spec: Any, wanted: Wanted) -> bool:
    """Tell whether a pipeline was saved without a component, which nobody has asked for by name."""
    hub = msgspec.structs.replace(wanted.hub, revision=spec.revision)
    return (
        spec.type_hint is None
        and spec.name not in (wanted.components or ())
        and is_absent(str(spec.pretrained_model_name_or_path), spec.subfolder, hub)
    )


def _is_model(hint: type | None) -> bool:
    return hint is None or issubclass(hint, (torch.nn.Module, diffusers.AutoModel))
