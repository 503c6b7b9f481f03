"""`publish`: a finished pipeline or model under a name of its own, for all of a user's processes.

A tensor whose bytes are those of a segment stays there, and the publication needs that segment. All
others are copied once, into the publication's own segment, with the structure. To load it is to
restore that structure over its segments.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from shmload._building.keeping import store, why_not_kept
from shmload._building.mapped import models_in
from shmload._building.stored import restore
from shmload._checkpoints.rule import RAW
from shmload._segments.metadata import make_metadata
from shmload._segments.publications import Publication
from shmload._segments.removal import attached
from shmload._wording import format_nbytes, logger_of
from shmload.errors import ArgumentError, PublicationError, ShmloadError


def load_published(source: str, given: Mapping[str, object] | None = None) -> Any:
    """Return the pipeline or model of a publication.

    Args:
        source: `shm:NAME`, for the newest version, or `shm:NAME@VERSION`.
        given: the other arguments of the call; each must be None or False.

    Raises:
        SegmentNotFound: there is no such publication.
        PublicationError: it cannot be loaded here; says why.
        ArgumentError: an argument that a publication does not take.
    """
    asked = given or {}
    if others := sorted(
        name for name, value in asked.items() if value is not None and value is not False
    ):
        raise ArgumentError(
            f"{source} is loaded as it was published: leave out {', '.join(others)}"
        )
    version, own = Publication.parse(source).attach()
    return restore(version.source, own)[0]


logger = logger_of(__name__)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a publication."""

    name: str
    version: int
    """1 for the first under the name."""
    nbytes: int
    """Size of what was copied: the tensors that lie in no other segment, and the structure."""
    shared_nbytes: int
    """Size of the tensors that stay in the segments that they were loaded to."""
    needs: tuple[str, ...]
    """Names of these segments."""

    @property
    def source(self) -> str:
        """What `load_pipeline`, `load_model` and the command line take: `shm:NAME@VERSION`."""
        return Publication(self.name, self.version).source

    def load(self) -> Any:
        """Load this version, as `load_pipeline(self.source)` does."""
        return load_published(self.source)


def publish(thing: Any, name: str) -> Published:
    """Give a pipeline or a model, as it is now, a name in shared memory.

    `load_pipeline("shm:NAME")` and `load_model(cls, "shm:NAME")` then return one like it, in any
    process of this user, by attaching. Later changes to `thing` do not change it. The version is
    pinned: it stays until `shmload rm shm:NAME@VERSION` or a reboot. Earlier versions of the name
    lose their pins, and go when room is needed and no process uses them.

    Args:
        thing: a pipeline of diffusers, or a model. It is pickled without its weights: LoRA, fused
            or loaded, quantised weights, schedulers and tokenizers are kept as they are. Weights on
            devices are copied to the host. Of a compiled model, the original is published.
        name: up to 100 letters, digits, `.`, `_` and `-`; `shm:` may stand before it.

    Returns:
        The version, with how much was copied.

    Raises:
        PublicationError: a part of it cannot be kept, such as the hooks of an offloading call.
        ArgumentError: the name is none, or has a version.
        CapacityError: there is no room for what has to be copied.
    """
    asked = Publication.parse(name)
    if asked.version is not None:
        raise ArgumentError(f"{name!r}: publish gives the version; leave it out")
    made = publish_version(thing, asked, is_pinned=True)
    *earlier, _ = asked.versions().values() or [""]
    for name in earlier:
        with attached(name) as segment:
            if segment:
                segment.unpin()
    return made


def publish_version(thing: Any, asked: Publication, *, is_pinned: bool) -> Published:
    """Publish a pipeline or a model, and leave the earlier versions as they are.

    Args:
        thing: as for `publish`.
        asked: the name.
        is_pinned: whether it is never evicted.

    Raises:
        PublicationError, CapacityError: as `publish`.
    """
    if not isinstance(thing, torch.nn.Module) and not hasattr(thing, "components"):
        raise ArgumentError(f"a {type(thing).__name__} is neither a pipeline nor a model")
    number, part = asked.begin()
    source = Publication(asked.name, number).source
    try:
        with part:
            metadata = make_metadata(source, "", RAW.text)
            kept = store(part, thing, metadata, is_pinned=is_pinned, waits=True)
    except (ShmloadError, OSError, MemoryError):
        raise
    except Exception as exc:  # whatever a class does when it is restored
        reason = why_not_kept(exc)
        remedy = _remedy(thing, reason)
        first = f"; {remedy}, and publish again" if remedy else ""
        raise PublicationError(
            f"{asked.source} cannot be published: {reason}{first}", reason=reason
        ) from exc
    with kept.segment as segment:
        nbytes = segment.nbytes
    logger.info("published %s: %s copied", source, format_nbytes(nbytes))
    return Published(
        name=asked.name,
        version=number,
        nbytes=nbytes,
        shared_nbytes=kept.shared_nbytes,
        needs=kept.needs,
    )


def _remedy(thing: Any, reason: str) -> str:
    """Return what takes away the hooks that are the reason; empty if it is another one."""
    if "add_hook_to_module" in reason:  # accelerate's, as the error of pickle calls them
        return "call `pipe.remove_all_hooks()`"
    if "HookRegistry" in reason:  # diffusers'
        for name, model in models_in(thing).items():
            if getattr(model, "is_cache_enabled", False):
                return f"call `pipe.{name}.disable_cache()`" if name else "call `disable_cache()`"
    return ""
