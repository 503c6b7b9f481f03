"""Answers one call of a method that loads: through shared memory, or else by the library."""

import logging
import sys
import time
from typing import Any

from shmload._building.libraries import inside, is_inside
from shmload._compat import dtype_keyword, find
from shmload._redirecting.arguments import Call, InDoubt, names_known, read_call
from shmload._redirecting.patches import (
    LIBRARIES,
    OF_FILES,
    OF_PIPELINES,
    Kind,
    Options,
    Patch,
    method_of,
)
from shmload._redirecting.sources import (
    require_known_source,
    require_ordinary_surroundings,
)
from shmload._wording import logger_of, printing
from shmload.errors import (
    CapacityError,
    ProtocolError,
    SegmentError,
    ServiceError,
    WorkerError,
)
from shmload.integrations.diffusers import load_pipeline
from shmload.integrations.models import load_model

logger = logger_of("shmload.redirect")

# Not the source's fault, nor the arguments': the user should know.
_FAILURES = (CapacityError, ProtocolError, SegmentError, ServiceError, WorkerError)
_DEPRECATED = "`torch_dtype` is deprecated"


def answer(
    patch: Patch, options: Options, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what the class's own method returns.

    Raises:
        Exception: what the library raises.
    """
    if is_inside():
        return patch.call_original(cls, args, kwargs)
    began_at = time.monotonic()
    source = args[0] if args else kwargs.get(patch.path_argument)
    what = f"{cls.__name__}.{patch.method}({source!r})"
    level = logging.INFO
    try:
        call = _read(patch, cls, args, kwargs)
    except InDoubt as exc:
        reason = str(exc)
    except Exception as exc:  # whatever it is, the library can load
        reason = f"{type(exc).__name__}: {exc}"
    else:
        made, failure = _load(patch.kind, cls, call, options)
        if failure is None:
            _warn_as_the_library(patch.kind, kwargs)
            taken_s = time.monotonic() - began_at
            _say(options, level, f"{what}: through shmload, in {taken_s:.2f} s")
            return made
        reason = f"{type(failure).__name__}: {failure}"
        if isinstance(failure, _FAILURES):
            level = logging.WARNING
        del failure  # its traceback holds what was built
    _say(options, level, f"{what}: by the library: {reason}")
    with inside():
        return patch.call_original(cls, args, kwargs)


def _read(patch: Patch, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Read a call that shmload can answer.

    Raises:
        InDoubt: it is left to the library.
    """
    if not patch.is_on_library:
        raise InDoubt(f"another program has patched {patch.owner.__name__}.{patch.method}")
    if not patch.answers(cls):
        raise InDoubt(f"{cls.__name__} has a {patch.method} of its own")
    if patch.kind == "transformers model" and cls.__module__.partition(".")[0] not in LIBRARIES:
        raise InDoubt(f"{cls.__name__} is of neither library")
    known = names_known(patch.original.__func__, getattr(_base(patch), patch.method).__func__)
    if patch.kind != "transformers model" and dtype_keyword() == "torch_dtype":
        known -= {"dtype"}  # what this version calls otherwise, and hands to others by this name
    call = read_call(patch.kind, known, patch.path_argument, args, kwargs)
    require_ordinary_surroundings()
    require_known_source(patch.kind, cls, call)
    return call


def _base(patch: Patch) -> Any:
    """Return the class to whose method the automatic classes hand their arguments on."""
    kind = patch.kind
    if kind in OF_FILES:
        return patch.owner
    if kind == "pipeline":
        from diffusers import DiffusionPipeline

        return DiffusionPipeline
    if kind == "diffusers model":
        from diffusers import ModelMixin

        return ModelMixin
    from transformers import PreTrainedModel

    return PreTrainedModel


def _load(kind: Kind, cls: Any, call: Call, options: Options) -> tuple[Any, Exception | None]:
    """Load by shmload; return what was made, or what went wrong.

    Random numbers that a failed load has drawn are given back: the library will draw them.
    """
    import torch

    generator_state = torch.get_rng_state()
    given: dict[str, Any] = {"keep": options.keep, "share": False, "progress": False}
    with inside():
        try:
            if kind in OF_PIPELINES:
                made: Any = load_pipeline(
                    call.source, pipeline_class=cls, dtype=call.dtype, **given, **call.kwargs
                )
            else:
                made = load_model(cls, call.source, dtype=call.dtype, **given, **call.kwargs)
        except Exception as exc:  # the library may do better; else its own error is the right one
            torch.set_rng_state(generator_state)
            return None, exc
    return made, None


def _warn_as_the_library(kind: Kind, kwargs: dict[str, Any]) -> None:
    """Say what a library says of an old name, which shmload replaces by the new one."""
    if kwargs.get("torch_dtype") is None:
        return
    if kind == "pipeline":
        if resolve := find("diffusers.pipelines.pipeline_utils:_resolve_dtype"):
            resolve(None, kwargs["torch_dtype"])
    elif kind == "transformers model":
        from transformers import modeling_utils

        method = getattr(modeling_utils.PreTrainedModel, method_of(kind)).__func__
        for text in sorted(names_known(method)):
            if text.startswith(_DEPRECATED):
                modeling_utils.logger.warning_once(text)


def _say(options: Options, level: int, text: str) -> None:
    if options.is_verbose:
        print(f"shmload: {printing(text)}", file=sys.stderr, flush=True)
        level = logging.INFO
    logger.log(level, text)
