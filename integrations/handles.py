"""Handles: what it takes to attach a pipeline in any process of this host, in a few bytes."""

import contextlib
import hashlib
import os
import threading
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from shmload._checkpoints.dtypes import TORCH_NAMES, parse_dtype
from shmload._checkpoints.formats.known import has_known_suffix
from shmload._checkpoints.hub import find_source
from shmload._checkpoints.identity import identify
from shmload._checkpoints.resolve import Source, files_of
from shmload._checkpoints.wanted import Hub, Wanted
from shmload._host.collector import paused_gc
from shmload._host.forks import limit_inherited_threads
from shmload._loading.complete import complete_load
from shmload._loading.progress import Callback
from shmload._loading.sources import find_with_rules
from shmload._segments.lease import Lease
from shmload._segments.removal import remove_leftovers
from shmload._segments.segment import Stay
from shmload.errors import ArgumentError, SourceChanged, SourceNotFound
from shmload.integrations.diffusers import load_pipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# Configurations and tokenizers have less, weights that are no safetensors files more.
_SMALL_NBYTES = 32 << 20
# The pipelines of this process, by their handles' text.
_loaded: "dict[str, DiffusionPipeline]" = {}
_loading = threading.Lock()


def _forget_lock() -> None:
    """Make the lock anew in a forked child, whose parent's threads may have held it."""
    global _loading
    _loading = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


class _Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The arguments of a load, and what was loaded."""

    source: str
    torch_dtype: str | dict[str, str | None] | None = None
    components: tuple[str, ...] | None = None
    variant: str | None = None
    revision: str | None = None
    cache_dir: str | None = None
    identity: str = ""
    """Digest of what its files were."""

    @classmethod
    def of(cls, wanted: Wanted, found: Source) -> Self:
        """Return the recipe of what was found."""
        given, hub = os.fspath(wanted.source), wanted.hub
        components = wanted.components
        return cls(
            # Whoever gets the handle may be in another directory.
            source=os.path.abspath(given) if os.path.exists(given) else given,
            torch_dtype=_dtype_names(wanted.dtype),
            # A set has no order, and equal handles are to have equal texts.
            components=None if components is None else tuple(sorted(set(components))),
            variant=wanted.variant,
            revision=hub.revision,
            cache_dir=None if hub.cache_dir is None else os.path.abspath(hub.cache_dir),
            identity=_identity(found, components),
        )

    @property
    def wanted(self) -> Wanted:
        """What to load: without a download, which the maker of the handle has done."""
        hub = Hub(
            revision=self.revision,
            cache_dir=self.cache_dir,
            local_files_only=not os.path.exists(self.source),
        )
        return Wanted(
            source=self.source,
            dtype=self.torch_dtype,
            components=self.components,
            variant=self.variant,
            hub=hub,
        )


class Handle:
    """A shared pipeline, to be given to any process of this user on this host.

    It pickles to a few hundred bytes, however large the pipeline is: what crosses is what it takes
    to find the segments, and not the segments. The handle that `share` has returned also holds them
    until it is closed; the copies that arrive elsewhere hold nothing before they are loaded.

    A context that closes it.
    """

    def __init__(self, recipe: _Recipe, leases: Collection[Lease] = ()) -> None:
        self._recipe = recipe
        self._closing = weakref.finalize(self, _close_all, leases)
        self._closing.atexit = False  # leases see to that themselves

    def load(self) -> "DiffusionPipeline":
        """Return the pipeline, attached to the shared segments.

        The first call in a process builds it, from then on it is the same object; so it may be
        called anew for every item. A forked child has the one that its parent has loaded. If that
        was forked with torch's threads running, which a child lacks and would wait for, torch gets
        one thread here.

        Components that were not named when it was shared, and have weights, are None.

        If nobody holds the segments any more they are decoded again, and shared again. A handle
        that was closed remembers nothing: each call then builds another pipeline.

        Raises:
            SourceChanged: the source's files are not those that were shared.
            ShmloadError: as `load_pipeline`.
        """
        key = self.text
        limit_inherited_threads()
        with _loading:
            if not self._closing.alive:
                return self._load()
            if key not in _loaded:
                _loaded[key] = self._load()
            return _loaded[key]

    def close(self) -> None:
        """Give back what this handle holds; again is fine.

        Pipelines that were loaded from it, here or elsewhere, stay valid and shared. This process
        forgets its own, which then lasts as long as somebody else refers to it.
        """
        _loaded.pop(self.text, None)
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The handle as text, for an environment variable or a message: JSON, of one line."""
        return msgspec.json.encode(self._recipe).decode()

    @property
    def identity(self) -> str:
        """A digest of what the source's files were; another one for every change of them."""
        return self._recipe.identity

    @property
    def facts(self) -> dict[str, str]:
        """What results that are computed with the pipeline depend on, as text by name."""
        recipe = self._recipe
        return {
            "pipeline": recipe.identity,
            "torch_dtype": msgspec.json.encode(recipe.torch_dtype).decode(),
            "components": "all" if recipe.components is None else ",".join(recipe.components),
        }

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the handle of a text.

        Raises:
            ArgumentError: it is none.
        """
        try:
            return cls(msgspec.json.decode(text, type=_Recipe))
        except msgspec.MsgspecError as exc:
            raise ArgumentError(f"{text[:80]!r} is not the text of a handle: {exc}") from exc

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str],
        *,
        torch_dtype: object = None,
        components: Collection[str] | None = None,
        variant: str | None = None,
        **hub_kwargs: Any,
    ) -> Self:
        """Return a handle of what nobody has decoded yet: whoever loads it first does.

        Args:
            source: as for `share`, like all others.
            torch_dtype: see there.
            components: see there.
            variant: see there.
            hub_kwargs: see there.
        """
        wanted = Wanted.parse(
            source, torch_dtype, components, variant, hub_kwargs, is_pipeline=True
        )
        found = find_source(wanted)
        _require_pipeline(found)
        return cls(_Recipe.of(wanted, found))

    def __reduce__(self) -> tuple[Any, ...]:
        # A plain function: datasets, which hashes what it pickles, would take in a method's code.
        return _revive, (self.text,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._recipe == other._recipe

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"<shmload.Handle {self.text}>"

    def _load(self) -> "DiffusionPipeline":
        wanted = self._recipe.wanted
        pipe = load_pipeline(
            wanted.source,
            torch_dtype=wanted.dtype,
            components=wanted.components,
            variant=wanted.variant,
            share=True,
            **wanted.hub.kwargs,
        )
        # Afterwards: what was the same before and after was the same meanwhile, or the load has
        # noticed.
        if _identity(find_source(wanted), wanted.components) != self._recipe.identity:
            raise SourceChanged(wanted.source)
        return pipe


def _revive(text: str) -> Handle:
    return Handle.from_text(text)


def share(
    source: str | os.PathLike[str],
    *,
    torch_dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> Handle:
    """Decode a pipeline's weights once, for all processes that get the handle.

    The segments stay for as long as this handle or some process has them: nothing has to be
    removed afterwards. If all of these are killed at once, the next load of the same pipeline uses
    what is left, or `shmload gc` removes it.

    Args:
        source: a pipeline's directory, or a hub id.
        torch_dtype: as for `load_pipeline`.
        components: of those with weights, only these; None for all.
        variant: as for `from_pretrained`.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `warm`.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`. A token is for this call
            alone.

    Raises:
        As `warm`.
    """
    wanted = Wanted.parse(source, torch_dtype, components, variant, hub_kwargs, is_pipeline=True)
    found, rules = find_with_rules(wanted)
    _require_pipeline(found)
    recipe = _Recipe.of(wanted, found)
    with (
        paused_gc(),
        complete_load(
            found, rules, stay=Stay.SHARED, workers=workers, verify=verify, progress=progress
        ) as load,
    ):
        # Not a forked child's: the copies that arrive elsewhere hold nothing either.
        leases = [Lease(segment, crosses_forks=False) for segment in load.holdings.segments()]
    remove_leftovers()  # not earlier: what is left of the same pipeline was of use
    return Handle(recipe, leases)


def _close_all(leases: Collection[Lease]) -> None:
    for lease in leases:
        lease.close()


def _require_pipeline(source: Source) -> None:
    if not source.is_pipeline:
        raise SourceNotFound(
            source.given, "not a pipeline (no model_index.json); share a whole one"
        )


def _dtype_names(torch_dtype: object) -> Any:
    """Return names in place of dtypes, alone or in a dict by component."""
    if isinstance(torch_dtype, Mapping):
        return {name: _dtype_names(dtype) for name, dtype in sorted(torch_dtype.items())}
    return None if torch_dtype is None else TORCH_NAMES[parse_dtype(torch_dtype)]


def _identity(source: Source, components: Collection[str] | None) -> str:
    """Return a digest of what a pipeline's files are."""
    files = (
        (os.path.relpath(path, source.root), _stamp(path)) for path in files_of(source, components)
    )
    return hashlib.blake2b(repr(list(files)).encode(), digest_size=16).hexdigest()


def _stamp(path: Path) -> str:
    """Tell files apart: small ones by what is in them, weights by what the kernel says of them."""
    found = os.stat(path)
    if found.st_size <= _SMALL_NBYTES and not has_known_suffix(path.name):
        with contextlib.suppress(OSError):  # what may not be read is not read by the library either
            return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return identify(path, found).key
