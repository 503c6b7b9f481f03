"""Loads diffusion pipelines through shared memory.

Worker processes decode the shards of a checkpoint once, into POSIX shared memory. Every process
then attaches them in milliseconds and shares the one copy. Importing this package does not import
torch.
"""

import sys

from shmload._version import __version__ as __version__

TYPE_CHECKING = False  # as type checkers know it; `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

    from shmload import errors
    from shmload._loading.plan import Action, Plan, ShardPlan
    from shmload._loading.state_dict import load_state_dict
    from shmload._loading.verbs import WarmReport, plan, view, warm
    from shmload._loading.view_directory import restore_view_directory, view_directory
    from shmload._placement.placement import Placement
    from shmload._segments.grouping import Model
    from shmload._segments.listing import SegmentInfo, segments
    from shmload._segments.models import models
    from shmload._segments.pins import pin, unpin
    from shmload._segments.standing_views import (
        ViewDirectory,
        remove_view_directory,
        view_directories,
    )
    from shmload._segments.upkeep import collect_garbage, evict, verify
    from shmload.errors import *  # noqa: F403 every error is public, and `errors` lists them
    from shmload.integrations.diffusers import load_pipeline
    from shmload.integrations.handles import Handle, share
    from shmload.integrations.models import load_model
    from shmload.integrations.placing import to_device
    from shmload.integrations.redirect import redirect

    __all__ = [
        "Action",
        "Handle",
        "Model",
        "Placement",
        "Plan",
        "SegmentInfo",
        "ShardPlan",
        "ViewDirectory",
        "WarmReport",
        "collect_garbage",
        "evict",
        "load_model",
        "load_pipeline",
        "load_state_dict",
        "models",
        "pin",
        "plan",
        "redirect",
        "remove_view_directory",
        "restore_view_directory",
        "segments",
        "share",
        "to_device",
        "unpin",
        "verify",
        "view",
        "view_directories",
        "view_directory",
        "warm",
    ]
    __all__ += errors.__all__

# The modules of the names above. They are imported on first use: `import shmload` stays light.
_HOMES = {
    "Action": "shmload._loading.plan",
    "Handle": "shmload.integrations.handles",
    "Model": "shmload._segments.grouping",
    "Placement": "shmload._placement.placement",
    "Plan": "shmload._loading.plan",
    "SegmentInfo": "shmload._segments.listing",
    "ShardPlan": "shmload._loading.plan",
    "ViewDirectory": "shmload._segments.standing_views",
    "WarmReport": "shmload._loading.verbs",
    "collect_garbage": "shmload._segments.upkeep",
    "evict": "shmload._segments.upkeep",
    "load_model": "shmload.integrations.models",
    "load_pipeline": "shmload.integrations.diffusers",
    "load_state_dict": "shmload._loading.state_dict",
    "models": "shmload._segments.models",
    "pin": "shmload._segments.pins",
    "plan": "shmload._loading.verbs",
    "redirect": "shmload.integrations.redirect",
    "remove_view_directory": "shmload._segments.standing_views",
    "restore_view_directory": "shmload._loading.view_directory",
    "segments": "shmload._segments.listing",
    "share": "shmload.integrations.handles",
    "to_device": "shmload.integrations.placing",
    "unpin": "shmload._segments.pins",
    "verify": "shmload._segments.upkeep",
    "view": "shmload._loading.verbs",
    "view_directories": "shmload._segments.standing_views",
    "view_directory": "shmload._loading.view_directory",
    "warm": "shmload._loading.verbs",
}

# What the command line and diffusers call the same; and the commands without a function.
_CALLED_ELSEWHERE = {
    "from_pretrained": "load_pipeline",
    "gc": "collect_garbage",
    "load": "load_pipeline",
    "ls": "models",
    "remove": "evict",
    "rm": "evict",
    "status": "models",
}
_ONLY_COMMANDS = ("demo", "doctor", "run", "serve", "shutdown", "template", "top")


def __getattr__(name: str) -> "Any":  # each name has its own type, see above
    """Import a public name's module on first use; `errors` has those that are not listed."""
    import importlib

    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        value.__module__ = __name__
    elif name in ("__path__", "__wrapped__"):  # asked of any module, and no name of ours
        raise AttributeError(name)
    else:
        errors = importlib.import_module("shmload.errors")
        if name == "errors":
            return errors
        if name == "__all__":
            value = [*sorted(_HOMES), *errors.__all__]
        elif name in errors.__all__:
            value = getattr(errors, name)
        else:
            hint = "" if name.startswith("_") else _hint(name)  # IPython asks for private names
            # With a name and no object Python itself adds no second hint.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return what may be meant by an unknown name; notebooks do not suggest any."""
    from shmload._wording import nearest

    if name in _CALLED_ELSEWHERE:
        return f"; did you mean {_CALLED_ELSEWHERE[name]!r}?"
    if name in _ONLY_COMMANDS:
        return f"; it is a command: `shmload {name}`"
    return nearest(name, [*_HOMES, "errors"])


def __dir__() -> list[str]:
    public = __getattr__("__all__")
    own = f"{__name__}."
    modules = {name for name in globals() if f"{own}{name}" in sys.modules and name[0] != "_"}
    return sorted({*public, *modules, *(name for name in globals() if name.startswith("__"))})
