"""What a load or a mix has built: built by one process, and given to all others.

The first process builds it with the library. It is kept in a segment whose name is a digest of all
that it depends on: files, arguments, versions, settings. Later processes attach that segment. What
cannot be kept whole has its models kept, and the library builds the rest around them. If not even
that is possible, the segment says so, and each process builds.

Guarantee: an object whose files, arguments, libraries or classes have changed is not recalled. A
process that dies while it builds leaves nothing, and one of those that wait builds.
"""

import contextlib
import enum
import logging
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shmload._building.keys import Key
from shmload._checkpoints.library import is_inside
from shmload._compat import takes_connected
from shmload._host.collector import forget_locals, resumed_gc
from shmload._loading.trace import Phase, during
from shmload._segments.metadata import built_metadata
from shmload._segments.part import Awaited, Part, acquire
from shmload._segments.removal import remove_expired, remove_idle
from shmload._segments.segment import Segment, attach
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import CapacityError, PublicationError, SegmentError, ShmloadError

if TYPE_CHECKING:
    import torch

logger = logger_of(__name__)

Models = Mapping[str, "torch.nn.Module"]
Make = Callable[[Models], Any]
"""Builds an object with the library, around the models that are there already."""

# If what is kept does not hold any more, it is removed once, and built anew.
_TRIES = 2
# From this size on, in bytes, the first process drops its private copy and maps what it kept.
_MUCH_NBYTES = 1 << 20


class Level(enum.Enum):
    """How much of an object is kept; a segment's header says it, and why not more."""

    WHOLE = "whole"
    MODELS = "models"
    NOTHING = "nothing"


class _Making(threading.local):
    """The names that this thread builds: a load of the same within must not wait for itself."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_making = _Making()


def once(
    key: Key | None,
    make: Make,
    *,
    keep: bool,
    meanwhile: Callable[[], object] = bool,
    on_recall: Callable[[int], object] = bool,
) -> Any:
    """Return what is remembered; otherwise make it, and remember it if it is to be kept.

    Args:
        key: of the object; None to make it in any case.
        make: makes it.
        keep: remember it, and wait for a process that makes it now, up to `SHMLOAD_WAIT_TIMEOUT_S`.
            A load within a build does not wait, and makes what another process makes now.
        meanwhile: done before that wait, such as imports.
        on_recall: called with the size of the segments that a whole object was recalled from, in
            bytes.
    """
    if key is None or key.name in _making.names:
        return make({})
    for _ in range(_TRIES):
        with _open(key, meanwhile, keep=keep) or contextlib.nullcontext() as found:
            if found is None:
                return make({})
            if isinstance(found, Part):
                return _make(found, key, make)
            with during(Phase.RECALL):
                kept = _recall(found, key)
            if kept:
                if kept.level is not Level.WHOLE:
                    return make(vars(kept.thing))
                on_recall(kept.nbytes)
                remove_expired()  # as a `Load` does; not earlier: what was recalled stays
                return kept.thing
        if not keep:
            break
        remove_idle([key.name])
    return make({})  # another process still uses what does not hold any more


def _make(part: Part, key: Key, make: Make) -> Any:
    """Make an object, and keep it as far as it can be."""
    before = _random_state()
    _making.names.add(key.name)
    try:
        made = make({})
    finally:
        _making.names.discard(key.name)
    with during(Phase.REMEMBER):
        return _keep(part, key, made, before)


def _open(key: Key, meanwhile: Callable[[], object], *, keep: bool) -> Segment | Part | None:
    """Attach an object's segment, or begin it; None if that is not wanted, or not possible."""
    try:
        if not keep:
            return attach(key.name)
        held = acquire(key.name)
        if isinstance(held, Awaited):
            with held:
                logger.info("%s: another process builds it", key.file)
                # A load within a build waits for no builder, and builds for itself: that builder
                # may wait for what this thread builds.
                if _making.names and is_inside():
                    return None
                with during(Phase.IMPORT):
                    meanwhile()
                with during(Phase.WAIT), resumed_gc():
                    return held.wait(settings().wait_timeout_s)
    except ShmloadError as exc:
        logger.info("%s: this process builds it for itself: %s", key.file, str(exc))
        return None
    return held


class _Kept(NamedTuple):
    level: Level
    thing: Any
    """The object, or a namespace of its models."""
    nbytes: int = 0
    """Size of its segments."""


def _recall(segment: Segment, key: Key) -> _Kept | None:
    """Return what a segment keeps; None if it does not hold any more."""
    with during(Phase.IMPORT):  # of torch
        from shmload._building.parts import CannotKeepHere
        from shmload._building.stored import restore

    outer = sys.exception()  # of the program
    try:
        level = Level(segment.read_metadata().kept.partition(":")[0])
        if level is Level.NOTHING:
            return _Kept(level, types.SimpleNamespace())
        kept = _Kept(level, *restore(key.file, segment))
        logger.info("%s: what an earlier load has built (%s)", key.file, level.value)
        return kept
    except (CannotKeepHere, OSError, MemoryError) as exc:  # it holds for others
        logger.info("%s: this process builds it for itself: %s", key.file, str(exc))
        forget_locals(exc, outer)
        return _Kept(Level.NOTHING, types.SimpleNamespace())
    except (SegmentError, ValueError) as exc:  # damaged, or of another time
        reason = exc.reason if isinstance(exc, PublicationError) else str(exc)
        logger.info("%s: not recalled: %s", key.file, reason)
        forget_locals(exc, outer)
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
    from shmload._building.code import code_of
    from shmload._building.keeping import keep_nothing, store, why_not_kept
    from shmload._building.mapped import models_in
    from shmload._building.parts import CannotKeepHere

    outer = sys.exception()  # of the program
    models = models_in(made)
    tries = {Level.WHOLE: made}
    if "" not in models:
        tries[Level.MODELS] = types.SimpleNamespace(**models)
    tries[Level.NOTHING] = None
    reason = ""
    for level, thing in tries.items():
        metadata = built_metadata(key.file, f"{level.value}: {reason}" if reason else level.value)
        try:
            if level is Level.NOTHING:
                keep_nothing(part, metadata)
                break
            _require_lasting(made, models, before)
            if level is Level.MODELS:  # another class's code may have changed them
                code_of([type(made)])
            if not key.holds():
                raise CannotKeepHere("its files have changed while it was built")
            kept = store(part, thing, metadata, checks_code=True)
        except (ShmloadError, OSError, MemoryError, CannotKeepHere) as exc:
            level_of_log = logging.WARNING if isinstance(exc, CapacityError) else logging.INFO
            logger.log(level_of_log, "%s: each process builds it: %s", key.file, str(exc))
            forget_locals(exc, outer)
            break
        except Exception as exc:  # as many kinds as there are objects
            reason = why_not_kept(exc).partition("\n")[0]
            forget_locals(exc, outer)
            continue
        with kept.segment as segment:
            if level is Level.WHOLE and kept.copied_nbytes >= _MUCH_NBYTES:
                recalled = _recall(segment, key)  # the one copy; what was made goes
                is_whole = recalled is not None and recalled.level is Level.WHOLE
                return recalled.thing if recalled and is_whole else made
        break
    return made


def _require_lasting(made: Any, models: Models, before: "torch.Tensor | None") -> None:
    """Check that models lie on the host, and that their weights are those of the source's files.

    Raises:
        CannotKeep: a later process could not get the same from the library.
    """
    import torch

    from shmload._building.mapped import is_in
    from shmload._building.parts import CannotKeep
    from shmload._host.procfs import mappings_of
    from shmload._segments.listing import names_by_inode

    if takes_connected(type(made)):
        raise CannotKeep("the library loads its prior from another repository")
    parameters = [each for model in models.values() for each in model.parameters()]
    if any(each.device.type != "cpu" for each in parameters):
        raise CannotKeep("its weights are on a device")
    state = torch.Generator().get_state() if before is None else before
    if torch.equal(state, torch.get_rng_state()):
        return
    mappings = mappings_of(names_by_inode().keys())
    if any(each.numel() and not is_in(mappings, each) for each in parameters):
        raise CannotKeep("the library draws some of its weights at random")


def _random_state() -> "torch.Tensor | None":
    """Return the state of torch's generator; None if torch is not imported yet."""
    torch = sys.modules.get("torch")
    return torch.get_rng_state() if torch and hasattr(torch, "get_rng_state") else None
