"""Answers one call of a method that loads: through shared memory, or else by the library.

The arguments that shmload takes are listed here. A call with any other argument, or another value,
is the library's.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import torch

from shmload._checkpoints.hub import find_cached
from shmload._checkpoints.library import inside, is_inside, libraries_lock
from shmload._checkpoints.wanted import HUB_ARGUMENTS, Hub
from shmload._checkpoints.weights import format_with_quants
from shmload._compat import dtype_keyword, is_in_mode
from shmload._redirecting.patches import (
    LIBRARIES,
    OF_FILES,
    OF_PIPELINES,
    Kind,
    Options,
    Patch,
    logger,
)
from shmload._wording import printing
from shmload.errors import (
    CapacityError,
    ProtocolError,
    SegmentError,
    ServiceError,
    WorkerError,
)
from shmload.integrations.loads import load_model, load_pipeline

# Not the source's fault, nor the arguments': the user should know.
_FAILURES = (CapacityError, ProtocolError, SegmentError, ServiceError, WorkerError)
_BUILD_TIMEOUT_S = 30.0
_TRUE = ("1", "true", "yes", "on", "y", "t")
_PATH = (str, PosixPath)
# By what the class loads: the types of the values that go to shmload. None is the default of each.
_TAKEN: dict[str, tuple[type, ...]] = {
    "cache_dir": _PATH,
    "local_files_only": (bool,),
    "revision": (str,),
    "token": (str, bool),
}
_OF_FOLDERS = {"variant": (str,), "use_safetensors": (bool,)}
_OF_MODELS = {"subfolder": (str,), "output_loading_info": (bool,)}
_OF_THE_FILES = {"config": _PATH, "original_config": _PATH, "subfolder": (str,)}
_TAKEN_OF: dict[Kind, dict[str, tuple[type, ...]]] = {
    "pipeline": {**_TAKEN, **_OF_FOLDERS, "requires_safety_checker": (bool,)},
    "diffusers model": {**_TAKEN, **_OF_FOLDERS, **_OF_MODELS},
    "transformers model": {
        **_TAKEN,
        **_OF_FOLDERS,
        **_OF_MODELS,
        "attn_implementation": (str,),
    },
    "pipeline file": {**_TAKEN, **_OF_THE_FILES},
    "diffusers model file": {**_TAKEN, **_OF_THE_FILES},
}
# Values that change nothing: defaults, and what `transformers.pipeline` passes.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "adapter_kwargs": (None,),
    "code_revision": (None,),
    "config": (None,),
    "custom_pipeline": (None,),
    "device_map": (None,),
    "force_download": (False,),
    "low_cpu_mem_usage": (True,),
    "quantization_config": (None,),
    "subfolder": ("",),
    "trust_remote_code": (False, None),
}
# What `transformers.pipeline` tells: its task, for the hub's statistics; in transformers 4 also the
# commit in which it found the configuration.
_HINTS = ("_from_pipeline", "_commit_hash")
_DTYPE_NAMES = ("auto", "bfloat16", "float16", "float32")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 10.0


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


# The arguments ------------------------------------------------------------------------------------


class InDoubt(Exception):
    """Whether shmload would do as the library does is not known; str says why."""


class Call(NamedTuple):
    """One `from_pretrained`, as `load_pipeline` or `load_model` take it."""

    source: str | PosixPath
    dtype: Any
    kwargs: dict[str, Any]


def read_call(
    kind: Kind, path_argument: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Read the arguments of a call.

    Args:
        kind: what the class loads.
        path_argument: the name of the argument that says what to load.
        args: after the class.
        kwargs: stay as they are.

    Raises:
        InDoubt: an argument is left to the library.
    """
    left = dict(kwargs)
    if isinstance(revision := left.get("revision"), str):
        left["revision"] = getattr(revision, "resolved", revision)  # of huggingface_hub's own type
    if args and path_argument not in left:
        left[path_argument] = args[0]
        args = args[1:]
    source = left.pop(path_argument, None)
    if args:
        raise InDoubt("it has more than one argument without a name")
    if not isinstance(source, _PATH) or str(source)[:1] in ("", "~"):
        raise InDoubt(f"it loads {source!r}")
    dtype = _read_dtype(kind, left)
    given = {name: value for name, value in left.items() if _is_passed(kind, name, value)}
    return Call(source, dtype, given)


def _is_passed(kind: Kind, name: str, value: object) -> bool:
    """Tell whether an argument goes to shmload; one with its default value need not.

    Raises:
        InDoubt: it is left to the library.
    """
    if any(value is neutral for neutral in _NEUTRAL.get(name, ())):
        return False
    if types := _TAKEN_OF[kind].get(name):
        if value is None:
            return False
        if type(value) in types and value != "" and (name, value) != ("use_safetensors", False):
            return True
    elif name == "quantization_config":
        if _package_of(value) in LIBRARIES:
            return True
    elif kind == "transformers model":
        if name in _HINTS and isinstance(value, str | None):
            return False
        if name == "config" and _is_plain_config(value):
            return True
    elif kind in OF_PIPELINES and (value is None or hasattr(value, "save_pretrained")):
        return True  # a component, or none in its place
    raise InDoubt(f"{name}={_short(value)}")


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _is_plain_config(value: object) -> bool:
    """Tell whether a configuration is of a class of transformers, and quantises nothing."""
    is_theirs = _package_of(value) == "transformers" and hasattr(value, "model_type")
    return is_theirs and not getattr(value, "quantization_config", None)


def _read_dtype(kind: Kind, left: dict[str, Any]) -> Any:
    """Take the dtype out of the arguments and return it.

    Raises:
        InDoubt: it is left to the library.
    """
    given = {name: left.pop(name, None) for name in ("dtype", "torch_dtype")}
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        return None
    dtype = next(iter(named.values()))
    values = dtype.values() if kind == "pipeline" and isinstance(dtype, dict) else [dtype]
    if kind == "transformers model":
        is_plain = isinstance(dtype, torch.dtype) or dtype in _DTYPE_NAMES
    else:  # this version may not know the newer name
        is_plain = all(isinstance(each, torch.dtype) for each in values)
        is_plain = is_plain and ("dtype" not in named or dtype_keyword() == "dtype")
    if not is_plain or len(named) > 1:
        raise InDoubt(", ".join(f"{name}={_short(value)}" for name, value in named.items()))
    return dtype


def _short(value: object) -> str:
    """Write a value in a few words: its repr may be that of a whole model."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)[:60]
    return f"<{type(value).__name__}>"


# The source ---------------------------------------------------------------------------------------


def require_known_source(kind: Kind, call: Call) -> None:
    """Check that a call means what the same source means to `load_pipeline` and `load_model`.

    Raises:
        InDoubt: it is no directory or file of this machine, nor the hub's version in the cache; or
            a file of quantised blocks, of which the library makes what the arguments say.
        ShmloadError, OSError: it cannot be read.
    """
    if kind in OF_FILES:
        if not os.path.isfile(call.source):
            raise InDoubt("it is no file of this machine")
        if found := format_with_quants(call.source):
            raise InDoubt(f"it is a {found.name} file")
    elif not os.path.isdir(call.source):
        given = str(call.source)
        if os.path.lexists(given) or not _HUB_ID.fullmatch(given):
            raise InDoubt("it is no directory")
        hub = Hub(**{name: call.kwargs[name] for name in HUB_ARGUMENTS & call.kwargs.keys()})
        folder = find_cached(given, hub)
        if folder is None:
            raise InDoubt("it is not in the hub cache")
        _require_current(given, hub, folder)


def _require_current(repo_id: str, hub: Hub, folder: Path) -> None:
    """Check that the cached version is the one that the hub has now, as the libraries do.

    Raises:
        InDoubt: it is another one, or the hub refuses to tell.
    """
    if hub.local_files_only or is_offline() or _COMMIT.fullmatch(hub.revision or ""):
        return
    if commit_on_hub(repo_id, hub) not in (None, folder.name):
        raise InDoubt("the hub has another version than the cache")


def is_offline() -> bool:
    """Tell whether the hub must not be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def commit_on_hub(repo_id: str, hub: Hub) -> str | None:
    """Ask the hub for the commit of a revision; return None if it cannot be reached.

    Raises:
        InDoubt: the hub refuses the question.
    """
    from huggingface_hub import model_info
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return model_info(repo_id, revision=hub.revision, token=hub.token, timeout=_TIMEOUT_S).sha
    except (HfHubHTTPError, ValueError) as exc:
        raise InDoubt(f"the hub refuses it: {str(exc).splitlines()[0]}") from exc
    except Exception:  # of the HTTP client, which changes with the hub's library: no network
        return None
