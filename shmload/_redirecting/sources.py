"""Looks at what a call loads, and where: finds what only the library knows how to load."""

import os
import re
import sys
from pathlib import Path

import torch

from shmload._building.libraries import libraries_lock
from shmload._checkpoints.hub import find_cached
from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.resolve import resolve, resolve_model
from shmload._checkpoints.source import Checkpoint
from shmload._checkpoints.wanted import HUB_ARGUMENTS, Hub, Wanted
from shmload._checkpoints.weights import format_with_blocks, why_file_is_unread
from shmload._compat import is_in_mode
from shmload._redirecting.arguments import Call, InDoubt
from shmload._redirecting.patches import OF_FILES, Kind
from shmload.errors import ShmloadError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_TIMEOUT_S = 10.0


def require_known_source(kind: Kind, cls: type, call: Call) -> None:
    """Check that shmload finds the files that the library would, and that they are of known kinds.

    Args:
        kind: what the class loads.
        cls: the class.
        call: what it is to load.

    Raises:
        InDoubt: they are left to the library.
    """
    if kind in OF_FILES:
        _require_known_file(call)
        return
    folder = _find_folder(kind, call)
    variant = call.kwargs.get("variant")
    subfolder = None if kind == "pipeline" else call.kwargs.get("subfolder")
    wanted = Wanted(source=call.source, variant=variant, hub=Hub(subfolder=subfolder))
    try:
        if kind == "pipeline":
            _require_known_parts(folder, call)
            found = resolve(wanted, folder, call.kwargs)
        else:
            found = resolve_model(wanted, folder, call.kwargs)
    except (ShmloadError, OSError) as exc:
        raise InDoubt(str(exc)) from exc
    if not found.checkpoints or (variant and not found.is_complete):
        of_variant = f" of the variant {variant}" if variant else ""
        raise InDoubt(f"it takes no weights from files that shmload reads{of_variant}")
    for checkpoint in found.checkpoints:
        _require_plain(checkpoint)
        given = getattr(call.kwargs.get("config"), "model_type", None)
        if given not in (None, checkpoint.config.get("model_type")):
            raise InDoubt(f"config={given!r} is of another kind of model")


def _require_known_file(call: Call) -> None:
    """Check that a call loads a file of this machine, in a format that shmload reads.

    Raises:
        InDoubt: it does not, or it may have blocks, which need a `quantization_config`.
    """
    if not os.path.isfile(call.source):
        raise InDoubt("it is no file of this machine")
    try:
        why = why_file_is_unread(Path(call.source))
        blocked = None if why else format_with_blocks(call.source)
    except (ShmloadError, OSError) as exc:
        raise InDoubt(str(exc)) from exc
    if why:
        raise InDoubt(str(why))
    if blocked:
        raise InDoubt(f"it is a {blocked.name} file")


def _find_folder(kind: Kind, call: Call) -> Path:
    """Return the directory of the source: itself, or that of a hub id in the cache.

    Raises:
        InDoubt: it is none of these, or the hub has another version.
    """
    if os.path.isdir(call.source):
        return Path(call.source)
    given = call.source
    if not isinstance(given, str) or os.path.lexists(given) or not _HUB_ID.fullmatch(given):
        raise InDoubt("it is no directory")
    if kind == "transformers model" and os.environ.get("TRANSFORMERS_CACHE"):
        raise InDoubt("TRANSFORMERS_CACHE is set")
    hub = Hub(**{name: call.kwargs[name] for name in HUB_ARGUMENTS & call.kwargs.keys()})
    try:
        folder = find_cached(given, hub)
    except ShmloadError as exc:
        raise InDoubt(str(exc)) from exc
    if folder is None:
        raise InDoubt("it is not in the hub cache")
    _require_current(given, hub, folder)
    return folder


def _require_current(repo_id: str, hub: Hub, folder: Path) -> None:
    """Check that the cached version is the one that the hub has now, as the libraries do.

    Raises:
        InDoubt: it is another one.
    """
    if hub.local_files_only or is_offline() or _COMMIT.fullmatch(hub.revision or ""):
        return
    commit = commit_on_hub(repo_id, hub)
    if commit is not None and commit != folder.name:
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
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = HfApi().repo_info(
            repo_id, revision=hub.revision, token=hub.token, timeout=_TIMEOUT_S
        )
    except (HfHubHTTPError, ValueError) as exc:
        raise InDoubt(f"the hub refuses it: {str(exc).splitlines()[0]}") from exc
    except Exception:  # of the HTTP client, which changes with the hub's library: no network
        return None
    return str(found.sha)


def _require_known_parts(folder: Path, call: Call) -> None:
    """Check that a pipeline names classes of the libraries only.

    Raises:
        InDoubt: it does not.
        ShmloadError, OSError: its index cannot be read.
    """
    from diffusers import pipelines

    index = read_json(folder / "model_index.json")
    if not isinstance(index.get("_class_name"), str):
        raise InDoubt("the pipeline has a class of its own")
    for name, value in index.items():
        is_component = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
        if name[:1] == "_" or name in call.kwargs or not is_component:
            continue
        if value[0] not in ("diffusers", "transformers") and not hasattr(pipelines, value[0]):
            raise InDoubt(f"{name} is of {value[0]}")


def _require_plain(checkpoint: Checkpoint) -> None:
    """Check that a model is of a class of the libraries, whole, and not quantised.

    Raises:
        InDoubt: it is not.
    """
    name = checkpoint.component or "it"
    if (checkpoint.folder / "adapter_config.json").exists():
        raise InDoubt(f"{name} has an adapter")
    if checkpoint.config.get("auto_map"):
        raise InDoubt(f"{name} has code of its own")
    if checkpoint.config.get("quantization_config"):
        raise InDoubt(f"{name} has quantised weights")


# Surroundings -------------------------------------------------------------------------------------

_BUILD_TIMEOUT_S = 30.0
_TRUE = ("1", "true", "yes", "on", "y", "t")


def require_ordinary_surroundings() -> None:
    """Check that models made here are ordinary ones, in memory of the host.

    While another thread builds for shmload, the libraries have changed torch for all threads. So
    the check waits for the end of that.

    Raises:
        InDoubt: a mode of torch, or of a library, is on; or the other build takes long.
    """
    if not libraries_lock.acquire(timeout=_BUILD_TIMEOUT_S):
        raise InDoubt("another thread builds a model")
    try:
        _require_ordinary_torch()
    finally:
        libraries_lock.release()
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        raise InDoubt("DeepSpeed ZeRO-3 is on")
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in _TRUE:
        raise InDoubt("FSDP is on")


def _require_ordinary_torch() -> None:
    if torch.is_inference_mode_enabled():
        raise InDoubt("torch is in inference mode")
    if torch.get_default_dtype() != torch.float32:
        raise InDoubt("torch has another default dtype")
    if is_in_mode():
        raise InDoubt("a mode of torch is on, such as a default device")
    module = torch.nn.Module
    if any(
        getattr(getattr(module, name), "__module__", None) != module.__module__
        for name in ("register_parameter", "register_buffer", "__init__")
    ):
        raise InDoubt("torch.nn.Module is patched, as by init_empty_weights")
