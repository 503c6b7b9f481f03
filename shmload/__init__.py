"""Loads diffusion pipelines through shared memory.

Worker processes decode the shards of a checkpoint once, into POSIX shared memory. Every process
then attaches them in milliseconds and shares the one copy. Importing this package does not import
torch.
"""

import sys

__version__ = "0.1.0"

TYPE_CHECKING = False  # as type checkers know it; `typing` takes longer to import than all of this
if TYPE_CHECKING:  # each name `as` itself: so type checkers take it for public
    from typing import Any

    from shmload import errors as errors
    from shmload._building.placing import to_device as to_device
    from shmload._building.publishing import Published as Published
    from shmload._building.publishing import publish as publish
    from shmload._loading.plan import Action as Action
    from shmload._loading.plan import Plan as Plan
    from shmload._loading.plan import ShardPlan as ShardPlan
    from shmload._loading.plan import plan as plan
    from shmload._loading.state_dict import load_state_dict as load_state_dict
    from shmload._loading.verbs import WarmReport as WarmReport
    from shmload._loading.verbs import view as view
    from shmload._loading.verbs import warm as warm
    from shmload._loading.view_directory import view_directory as view_directory
    from shmload._placement.placement import Placement as Placement
    from shmload._redirecting.patches import redirect as redirect
    from shmload._segments.listing import SegmentInfo as SegmentInfo
    from shmload._segments.listing import segments as segments
    from shmload._segments.models import Model as Model
    from shmload._segments.table import models as models
    from shmload._segments.upkeep import collect_garbage as collect_garbage
    from shmload._segments.upkeep import evict as evict
    from shmload._segments.upkeep import pin as pin
    from shmload._segments.upkeep import unpin as unpin
    from shmload._segments.upkeep import verify as verify
    from shmload.errors import *  # noqa: F403 every error is public, and `errors` lists them
    from shmload.integrations.handles import Handle as Handle
    from shmload.integrations.handles import share as share
    from shmload.integrations.loads import load_model as load_model
    from shmload.integrations.loads import load_pipeline as load_pipeline
    from shmload.integrations.mixing import mix as mix
    from shmload.integrations.switching import Switcher as Switcher
    from shmload.integrations.switching import SwitcherFigures as SwitcherFigures
    from shmload.integrations.updating import Updated as Updated
    from shmload.integrations.updating import newest as newest
    from shmload.integrations.updating import update as update

# The modules of the names above. They are imported on first use: `import shmload` stays light.
_HOMES = {
    "Action": "shmload._loading.plan",
    "Handle": "shmload.integrations.handles",
    "Model": "shmload._segments.models",
    "Placement": "shmload._placement.placement",
    "Plan": "shmload._loading.plan",
    "Published": "shmload._building.publishing",
    "SegmentInfo": "shmload._segments.listing",
    "ShardPlan": "shmload._loading.plan",
    "Switcher": "shmload.integrations.switching",
    "SwitcherFigures": "shmload.integrations.switching",
    "Updated": "shmload.integrations.updating",
    "WarmReport": "shmload._loading.verbs",
    "collect_garbage": "shmload._segments.upkeep",
    "evict": "shmload._segments.upkeep",
    "load_model": "shmload.integrations.loads",
    "load_pipeline": "shmload.integrations.loads",
    "load_state_dict": "shmload._loading.state_dict",
    "mix": "shmload.integrations.mixing",
    "models": "shmload._segments.table",
    "newest": "shmload.integrations.updating",
    "pin": "shmload._segments.upkeep",
    "plan": "shmload._loading.plan",
    "publish": "shmload._building.publishing",
    "redirect": "shmload._redirecting.patches",
    "segments": "shmload._segments.listing",
    "share": "shmload.integrations.handles",
    "to_device": "shmload._building.placing",
    "unpin": "shmload._segments.upkeep",
    "update": "shmload.integrations.updating",
    "verify": "shmload._segments.upkeep",
    "view": "shmload._loading.verbs",
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
_ONLY_COMMANDS = ("doctor", "run", "serve", "shutdown", "template")


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
