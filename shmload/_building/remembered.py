"""What a load or a mix has built: built by one process, and given to all others.

The first process builds it with the library. It is kept in a segment whose name is a digest of all
that it depends on: files, arguments, versions, settings. Later processes attach that segment. What
cannot be kept whole has its models kept, and the library builds the rest around them. If not even
that is possible, the segment says so, and each process builds.

Guarantee: an object whose files, arguments, libraries or classes have changed is not recalled. A
process that dies while it builds leaves nothing, and one of those that wait builds.
"""

import contextlib
import copy
import enum
import hashlib
import json
import logging
import os
import platform
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._building.keywords import (
    BYPASSING_KEYWORDS,
    CHOOSING_KEYWORDS,
    FINDING_KEYWORDS,
    QUANTISING_KEYWORDS,
)
from shmload._building.maker import Maker
from shmload._building.options import Options
from shmload._checkpoints.source import Source
from shmload._compat import is_in_mode
from shmload._host.collector import forget_locals
from shmload._host.fingerprint import files_below, fingerprint
from shmload._segments.metadata import built_metadata
from shmload._segments.names import built_name
from shmload._segments.part import Awaited, Part, acquire
from shmload._segments.removal import remove_idle
from shmload._segments.roots import weights_below
from shmload._segments.segment import Segment, attach
from shmload._settings import settings
from shmload._version import __version__
from shmload._wording import logger_of
from shmload.errors import CapacityError, PublicationBroken, ShmloadError

if TYPE_CHECKING:
    import torch

logger = logger_of(__name__)

Models = Mapping[str, "torch.nn.Module"]
Make = Callable[[Models], Any]
"""Builds an object with the library, around the models that are there already."""

# Increment it when objects are kept or restored in another way.
_VERSION = 1
_VARIABLES = ("ATEN_", "DIFFUSERS_", "TRANSFORMERS_")
# Of this much the first process does not stay with its private copy, in bytes.
_MUCH_NBYTES = 1 << 20
# Of a single file.
_CONFIGS = ("config", "original_config")
# Plain values that have the library run other code, or return something else.
_MEANS_MORE = {"from_flax", "output_loading_info", "trust_remote_code"}


class Level(enum.Enum):
    """How much of an object is kept; a segment's header says it, and why not more."""

    WHOLE = "whole"
    MODELS = "models"
    NOTHING = "nothing"


class Key(NamedTuple):
    """What tells an object from all others."""

    name: str
    """Of its segment."""
    file: str
    """A file of its weights: the segment belongs to the model of that file."""


def key_of_load(
    cls: type | str | None,
    source: Source,
    maker: Maker,
    dtype: object,
    options: Options,
    kwargs: Mapping[str, Any],
) -> Key | None:
    """Return the key of what a load makes; None if an equal load might make something else.

    Args:
        cls: the class that was asked for, or its name; None for the source's own.
        source: what is loaded.
        maker: of it.
        dtype: as given.
        options: how it is loaded.
        kwargs: for `from_pretrained`.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    is_quantised = not QUANTISING_KEYWORDS.isdisjoint(given)
    # With links, files lie in no segment.
    is_asked = is_quantised or (settings().remember and not options.may_link)
    # diffusers chooses a configuration by a file's keys, in the hub.
    is_chosen = source.root.is_file() and "config" not in given
    configs = [given[name] for name in _CONFIGS if name in given]
    if (
        is_chosen
        or not (is_asked and options.leaves_on_host)
        or not all(_is_comparable(name, value) for name, value in given.items())
        or not all(isinstance(each, str | Path) and os.path.exists(each) for each in configs)
    ):
        return None
    facts = {
        "class": [type(maker).__name__, maker.name or cls, source.class_name],
        # Components that are left out are there as None.
        "components": [source.components, source.shards, source.unread, sorted(kwargs)],
        "configs": [stamps_of(Path(each)) for each in configs],
        "folders": {name: stamps_of(each) for name, each in source.folders.items()},
        # The models note it.
        "given_as": [os.fspath(source.given), isinstance(source.given, str), maker.takes_path],
        "dtype": _spelled(dtype),
        "given": given,
    }
    return key_of(source.root, facts, next(iter(source.shards), None))


def own_quantisers(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with copies of the configurations, to which the library adds.

    The next call with one would seem to ask for something else.
    """
    return {
        name: copy.deepcopy(value) if name in QUANTISING_KEYWORDS else value
        for name, value in kwargs.items()
    }


def _spelled(dtype: object) -> object:
    """Return a dtype as its name, also by component: both mean the same."""
    if isinstance(dtype, Mapping):
        return {name: _spelled(each) for name, each in dtype.items()}
    return str(dtype).removeprefix("torch.")


def _is_comparable(name: str, value: object) -> bool:
    """Tell whether equal values of a keyword of `from_pretrained` mean the same to each load."""
    if name in QUANTISING_KEYWORDS or name in FINDING_KEYWORDS or name in _CONFIGS:
        return True
    is_harmless = name not in _MEANS_MORE.union(BYPASSING_KEYWORDS, CHOOSING_KEYWORDS)
    return is_harmless and isinstance(value, bool | int | float)


def key_of(root: Path, facts: Mapping[str, object], shard: Path | None = None) -> Key | None:
    """Return the key of an object; None if it depends on what cannot be compared.

    Args:
        root: the directory or file that it is loaded from; all files below count.
        facts: what else counts.
        shard: a file of its weights; None for the first one below `root`.
    """
    file = str(shard or next((each.path for each in weights_below(str(root))), root))
    defaults = _defaults()
    if defaults is None or not os.path.isfile(file):
        return None
    known = {
        **facts,
        "version": [_VERSION, __version__],
        "source": os.path.realpath(root),
        "files": stamps_of(root),
        "defaults": defaults,
        "python": [sys.version, sys.prefix, platform.machine()],
        "packages": sorted({name for folder in sys.path for name in _distributions(folder)}),
        "variables": sorted(each for each in os.environ.items() if each[0].startswith(_VARIABLES)),
    }
    try:
        text = json.dumps(known, default=_plain, sort_keys=True)
    except (_Unknown, TypeError, ValueError):
        return None
    return Key(built_name(hashlib.blake2b(text.encode()).hexdigest()), file)


# One builds, all others recall --------------------------------------------------------------------


def once(key: Key | None, make: Make, *, keep: bool, meanwhile: Callable[[], object] = bool) -> Any:
    """Return what is remembered; otherwise make it, and remember it if it is to be kept.

    Args:
        key: of the object; None to make it in any case.
        make: makes it.
        keep: remember it, and wait for a process that makes it now, up to `SHMLOAD_WAIT_TIMEOUT_S`.
        meanwhile: done before that wait, such as imports.
    """
    if key is None:
        return make({})
    with contextlib.ExitStack() as closing:
        found = _open(key, meanwhile, keep=keep)
        closing.enter_context(found or contextlib.nullcontext())
        if isinstance(found, Segment):
            if kept := _recall(found, key):
                return kept.thing if kept.level is Level.WHOLE else make(vars(kept.thing))
            if not keep:
                return make({})
            found.close()
            remove_idle([key.name])
            found = _open(key, meanwhile, keep=keep)
            closing.enter_context(found or contextlib.nullcontext())
        if not isinstance(found, Part):  # another process still uses what does not hold any more
            return make({})
        before = _random_state()
        return _keep(found, key, make({}), before)


def _open(key: Key, meanwhile: Callable[[], object], *, keep: bool) -> Segment | Part | None:
    """Attach an object's segment, or begin it; None if that is not wanted, or not possible."""
    try:
        if not keep:
            return attach(key.name)
        held = acquire(key.name)
        if isinstance(held, Awaited):
            with held:
                logger.info("%s: another process builds it", key.file)
                meanwhile()
                return held.wait(settings().wait_timeout_s)
    except ShmloadError as exc:
        logger.info("%s: this process builds it for itself: %s", key.file, str(exc))
        return None
    return held


class _Kept(NamedTuple):
    level: Level
    thing: Any
    """The object, or a namespace of its models."""


def _recall(segment: Segment, key: Key) -> _Kept | None:
    """Return what a segment keeps; None if it does not hold any more."""
    level = Level(segment.read_metadata().kept.partition(":")[0])
    if level is Level.NOTHING:
        return _Kept(level, types.SimpleNamespace())
    from shmload._building.stored import opened, restore

    try:
        with opened(key.file, segment) as record:
            return _Kept(level, restore(record))
    except PublicationBroken as exc:
        # str(exc): a handler that keeps log records must not keep the traceback's mappings.
        logger.info("%s: not recalled: %s", key.file, str(exc))
        forget_locals(exc, None)
        return None


def _keep(part: Part, key: Key, made: Any, before: "torch.Tensor | None") -> Any:
    """Keep what was made, as far as it can be; return it, or what lies in segments in its place.

    Args:
        part: of the segment; stays the caller's.
        key: of the object.
        made: the object.
        before: the state of torch's generator before it was made; None for that of a new process.
    """
    # Not at the top: they import torch and the libraries, and `make` imports them while it decodes.
    from shmload._building.keeping import keep_nothing, store, why_not_kept
    from shmload._building.structure import CannotKeepHere
    from shmload._building.weights import models_in

    models = models_in(made)
    tries = {Level.WHOLE: made}
    if "" not in models:
        tries[Level.MODELS] = types.SimpleNamespace(**models)
    reason = ""
    for level, thing in tries.items():
        says = f"{level.value}: {reason}" if reason else level.value
        try:
            _require_lasting(models, before)
            kept = store(part, thing, built_metadata(key.file, says), checks_code=True)
        except (ShmloadError, OSError, MemoryError, CannotKeepHere) as exc:
            level_of_log = logging.WARNING if isinstance(exc, CapacityError) else logging.INFO
            logger.log(level_of_log, "%s: each process builds it: %s", key.file, str(exc))
            forget_locals(exc, None)
            return made
        except Exception as exc:  # as many kinds as there are objects
            reason = why_not_kept(exc).partition("\n")[0]
            forget_locals(exc, None)
            continue
        with kept.segment as segment:
            if level is Level.WHOLE and kept.copied_nbytes >= _MUCH_NBYTES:
                recalled = _recall(segment, key)  # the one copy; what was made goes
                return recalled.thing if recalled else made
        return made
    keep_nothing(part, built_metadata(key.file, f"{Level.NOTHING.value}: {reason}"))
    return made


def _require_lasting(models: Models, before: "torch.Tensor | None") -> None:
    """Check that models lie on the host, and that none of their weights were drawn at random.

    Raises:
        CannotKeep: a later process could not get the same from the library.
    """
    import torch

    from shmload._building.mapped import Spans
    from shmload._building.structure import CannotKeep
    from shmload._segments.listing import names_by_inode

    parameters = [each for model in models.values() for each in model.parameters()]
    if any(each.device.type != "cpu" for each in parameters):
        raise CannotKeep("its weights are on a device")
    state = torch.Generator().get_state() if before is None else before
    if torch.equal(state, torch.get_rng_state()):
        return
    spans = Spans(set(names_by_inode()))
    if any(each.numel() and spans.find(each) is None for each in parameters):
        raise CannotKeep("the library draws some of its weights at random")


def _random_state() -> "torch.Tensor | None":
    """Return the state of torch's generator; None if torch is not imported yet."""
    torch = sys.modules.get("torch")
    return torch.get_rng_state() if torch and hasattr(torch, "get_rng_state") else None


# Facts --------------------------------------------------------------------------------------------


class _Unknown(Exception):
    """A value that may mean more than it shows."""


def stamps_of(path: Path) -> Sequence[object]:
    """Return what changes with any change of a file, or of the files below a directory."""
    files = files_below(path) if path.is_dir() else {str(path): fingerprint(path)}
    return sorted(files.items())


def _defaults() -> list[str] | None:
    """Return torch's defaults, those of a new process if it is not imported; None under a mode."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):  # another thread imports it
        return ["torch.float32", "True"]
    if torch.is_inference_mode_enabled() or is_in_mode():  # a default device is such a mode
        return None
    return [str(torch.get_default_dtype()), str(torch.is_grad_enabled())]


def _distributions(folder: str) -> list[str]:
    """Return name and version of the packages in a directory of `sys.path`."""
    try:
        return [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:
        return []


def _plain(value: object) -> object:
    """Return a value for JSON that is equal exactly if this one is.

    Raises:
        _Unknown: it may mean more than it shows.
    """
    if isinstance(value, type) and value.__module__ != "__main__":
        return f"{value.__module__}.{value.__qualname__}"
    torch = sys.modules.get("torch")
    if isinstance(value, Path) or (torch and isinstance(value, torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return dict(value)
    if type(value).__module__.partition(".")[0] in ("__main__", "builtins"):
        raise _Unknown
    return [f"{type(value).__module__}.{type(value).__qualname__}", vars(value)]
