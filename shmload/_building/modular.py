"""Modular pipelines: the library makes the pipeline, and shmload loads its models.

Everything else, such as tokenizers, the library loads, as its `load_components` does.
"""

import inspect
import os
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import diffusers
import msgspec
import torch

from shmload._building.classes import find_class
from shmload._checkpoints.library import inside, making, whole_libraries
from shmload._checkpoints.modular import component_failed, is_absent, is_foreign
from shmload._checkpoints.source import no_component
from shmload._checkpoints.wanted import Wanted
from shmload._compat import component_specs, dtype_keyword
from shmload.errors import (
    ArgumentError,
    CapacityError,
    LibraryError,
)

# How the repository and its components are found. Not the revision: each spec has its own.
_OF_BOTH = frozenset({"cache_dir", "force_download", "local_files_only", "proxies", "token"})
_PATH = "pretrained_model_name_or_path"
_TRUST = "trust_remote_code"


class LoadModel(Protocol):
    """Loads the model of one component."""

    def __call__(self, component: str, cls: Any, source: str, **given: Any) -> Any:
        """Return what the class loads from a source."""


def make_modular(
    wanted: Wanted,
    pipeline_class: type | str | None,
    kwargs: Mapping[str, Any],
    placed: Collection[object],
    load_model: LoadModel,
) -> Any:
    """Return a modular pipeline with its components.

    Args:
        wanted: the repository, the dtype, and the components with weights that are loaded.
        pipeline_class: a class of modular pipelines, its name, or None.
        kwargs: for `from_pretrained` of the pipeline, and of its components; and components and
            configuration values that it is to have.
        placed: names of components that are to have a device of their own, or `default`.
        load_model: loads a model.

    Raises:
        CheckpointError: a component is missing, or cannot be loaded.
        LibraryError: diffusers 0.35 has other specs.
        UnknownComponent: the pipeline has no component of a name.
        Exception: of the library, for the pipeline itself.
    """
    if _PATH not in diffusers.ComponentSpec.loading_fields():
        version = str(diffusers.__version__)
        raise LibraryError(
            f"diffusers {version} has no modular pipelines as shmload knows them; install "
            "diffusers 0.36 or later"
        )
    cls: Any = pipeline_class or diffusers.ModularPipeline
    if isinstance(cls, str):
        cls = find_class(cls, "pipeline_class", [diffusers])
    named = {*inspect.signature(cls.from_pretrained).parameters, "revision"}
    own = {name: value for name, value in kwargs.items() if name in named | _OF_BOTH}
    with whole_libraries(), making(), inside():
        pipe = cls.from_pretrained(wanted.source, **own)
    held = {*component_specs(pipe), *pipe.config}
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
    _load(pipe, _chosen(pipe, wanted, passed, placed), wanted, given, load_model)
    return pipe


def _chosen(
    pipe: Any, wanted: Wanted, passed: Collection[str], placed: Collection[object]
) -> list[Any]:
    """Return the specs of the components to load: without weights all, with weights the wanted.

    Raises:
        UnknownComponent: the pipeline has no component of a name.
    """
    specs, only = component_specs(pipe), wanted.components
    by_name = wanted.dtype if isinstance(wanted.dtype, Mapping) else {}
    for name in {*(only or ()), *by_name, *placed} - {"default", *specs}:
        raise no_component(str(name), wanted.source, specs)
    return [
        specs[name]
        for name in pipe.pretrained_component_names
        if name not in passed
        and getattr(pipe, name, None) is None
        and (only is None or name in only or not _is_model(specs[name].type_hint))
        and not (os.path.isdir(_source_of(specs[name])) and _is_left_out(specs[name], wanted))
    ]


def _load(
    pipe: Any, specs: list[Any], wanted: Wanted, given: dict[str, Any], load_model: LoadModel
) -> None:
    """Load models, and have the library load the other components."""
    models = {}
    for spec in specs:
        source = _source_of(spec)
        if not source or not _is_model(spec.type_hint) or is_foreign(source):
            continue
        try:
            model = load_model(
                spec.name,
                spec.type_hint or diffusers.AutoModel,
                source,
                **_arguments_of(spec, given, is_own=source == str(wanted.source)),
            )
        except (ArgumentError, CapacityError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as exc:
            if _is_left_out(spec, wanted):  # of a repository that is here by now
                continue
            said = "; ".join([str(exc), *getattr(exc, "__notes__", ())])
            raise component_failed(spec.name, source, said) from exc
        # As `ComponentSpec.load` and `load_components` note what they have loaded.
        spec.type_hint = spec.type_hint or type(model)
        model._diffusers_load_id = spec.load_id
        models[spec.name] = model
    pipe.register_components(**models)
    others = [spec for spec in specs if spec.name not in models and not _is_left_out(spec, wanted)]
    with whole_libraries(), making(), inside():
        pipe.load_components([spec.name for spec in others], **given)
    for spec in others:  # the library only warns of one that it cannot load
        if _source_of(spec) and spec.type_hint and getattr(pipe, spec.name, None) is None:
            raise component_failed(spec.name, _source_of(spec), "the library's warning says why")


def _arguments_of(spec: Any, given: Mapping[str, Any], *, is_own: bool) -> dict[str, Any]:
    """Return the arguments of one component, as `load_components` and its spec choose them.

    Args:
        spec: of the component; what it loads by is changed by what is given.
        given: values, or dicts of them by component.
        is_own: it lies in the pipeline's repository; no other one's code is trusted.
    """
    found = {}
    for name, value in given.items():
        if not isinstance(value, dict):
            found[name] = value
        elif spec.name in value or "default" in value:
            found[name] = value.get(spec.name, value.get("default"))
    if not is_own:
        found.pop(_TRUST, None)
    for field in spec.loading_fields():
        if field in found:
            setattr(spec, field, found[field])
        elif field != _PATH and (value := getattr(spec, field)) is not None:
            found[field] = value
    return found


def _source_of(spec: Any) -> str:
    """Return the repository, directory or file that a spec names; empty if it names none."""
    return str(getattr(spec, _PATH) or "")


def _is_left_out(spec: Any, wanted: Wanted) -> bool:
    """Tell whether a pipeline was saved without a component that the call does not name."""
    hub = msgspec.structs.replace(wanted.hub, revision=spec.revision)
    return (
        spec.type_hint is None
        and spec.name not in (wanted.components or ())
        and is_absent(_source_of(spec), spec.subfolder, hub)
    )


def _is_model(hint: type | None) -> bool:
    return hint is None or (
        isinstance(hint, type) and issubclass(hint, (torch.nn.Module, diffusers.AutoModel))
    )
