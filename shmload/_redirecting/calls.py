"""Answers one call of a method that loads: through shared memory, or else by the library."""

import logging
import os
import sys
import time
from typing import Any

import torch

from shmload._building.libraries import inside, is_inside, libraries_lock
from shmload._compat import is_in_mode
from shmload._redirecting.arguments import InDoubt, read_call, require_known_source
from shmload._redirecting.patches import OF_PIPELINES, Options, Patch, logger
from shmload._wording import printing
from shmload.errors import (
    CapacityError,
    ProtocolError,
    SegmentError,
    ServiceError,
    WorkerError,
)
from shmload.integrations.diffusers import load_pipeline
from shmload.integrations.models import load_model

# Not the source's fault, nor the arguments': the user should know.
_FAILURES = (CapacityError, ProtocolError, SegmentError, ServiceError, WorkerError)
_BUILD_TIMEOUT_S = 30.0
_TRUE = ("1", "true", "yes", "on", "y", "t")


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
    generator_state = torch.get_rng_state()
    try:
        made = _load(patch, options, cls, args, kwargs)
    except InDoubt as exc:
        _say(options, logging.INFO, f"{what}: by the library: {exc}")
    except Exception as exc:  # the library may do better; else its own error is the right one
        torch.set_rng_state(generator_state)  # the library will draw the numbers of a failed load
        level = logging.WARNING if isinstance(exc, _FAILURES) else logging.INFO
        _say(options, level, f"{what}: by the library: {type(exc).__name__}: {exc}")
    else:
        taken_s = time.monotonic() - began_at
        _say(options, logging.INFO, f"{what}: through shmload, in {taken_s:.2f} s")
        return made
    with inside():
        return patch.call_original(cls, args, kwargs)


def _load(
    patch: Patch, options: Options, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Load by shmload.

    Raises:
        InDoubt: the call is left to the library.
        Exception: the load has failed.
    """
    if not patch.answers(cls):
        raise InDoubt(f"{cls.__name__} has a {patch.method} of its own")
    call = read_call(patch.kind, patch.path_argument, args, kwargs)
    _require_ordinary_surroundings()
    require_known_source(patch.kind, call)
    given = {"dtype": call.dtype, "keep": options.keep, "share": False, "progress": False}
    with inside():
        if patch.kind in OF_PIPELINES:
            return load_pipeline(call.source, pipeline_class=cls, **given, **call.kwargs)
        return load_model(cls, call.source, **given, **call.kwargs)


def _require_ordinary_surroundings() -> None:
    """Check that models made here are ordinary ones, in memory of the host.

    While another thread builds for shmload, the libraries have changed torch for all threads. So
    the check waits for the end of that.

    Raises:
        InDoubt: a mode of torch, or of a library, is on; or the other build takes long.
    """
    if not libraries_lock.acquire(timeout=_BUILD_TIMEOUT_S):
        raise InDoubt("another thread builds a model")
    try:
        # accelerate's init_empty_weights replaces this method for a time.
        is_patched = torch.nn.Module.register_parameter.__module__ != torch.nn.Module.__module__
        is_float32 = torch.get_default_dtype() == torch.float32
        if is_patched or not is_float32 or torch.is_inference_mode_enabled() or is_in_mode():
            raise InDoubt("a mode of torch is on, such as another default device or dtype")
    finally:
        libraries_lock.release()
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        raise InDoubt("DeepSpeed ZeRO-3 is on")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE:
        raise InDoubt("FSDP is on")


def _say(options: Options, level: int, text: str) -> None:
    if options.is_verbose:
        print(f"shmload: {printing(text)}", file=sys.stderr, flush=True)
        level = logging.INFO
    logger.log(level, text)
