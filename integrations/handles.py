"""Handles: a few hundred bytes with which any process of this host attaches a shared pipeline."""

import contextlib
import os
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Self

import msgspec

from shmload._building.makers import PipelineMaker
from shmload._building.recipe import Recipe, identity_of
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.modular import find_whole_source
from shmload._checkpoints.source import Source
from shmload._checkpoints.wanted import Wanted
from shmload._host.changes import add_lock, limit_inherited_threads
from shmload._host.collector import paused_gc
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import complete_load, find_with_rules
from shmload._segments.lease import Lease
from shmload._segments.removal import remove_leftovers
from shmload._segments.segment import Stay
from shmload.errors import ArgumentError, SourceChanged, SourceNotFound
from shmload.integrations.diffusers import load_pipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

# The pipelines of this process, by their handles' text.
_loaded: "dict[str, DiffusionPipeline]" = {}
_loading = add_lock("the pipelines of handles")


class Handle:
    """A shared pipeline, for any process of this user on this host.

    It pickles to a few hundred bytes, however large the pipeline is: it says where the segments
    are, and does not contain them. The handle that `share` returns holds the segments until it is
    closed. Its copies in other processes hold nothing until they are loaded.

    A context that closes the handle.
    """

    def __init__(self, recipe: Recipe, leases: Collection[Lease] = ()) -> None:
        self._recipe = recipe
        self._closing = weakref.finalize(self, _close_all, leases)
        self._closing.atexit = False  # leases see to that themselves

    def load(self) -> Any:
        """Return the pipeline, attached to the shared segments.

        The first call in a process builds the pipeline; later calls return the same object, so it
        is cheap to call for every item. A forked child has the pipeline that its parent loaded. If
        torch's threads were running at the fork, torch uses one thread in the child: it lacks
        those threads and would wait for them forever.

        Components with weights that were not shared are None.

        If no process holds the segments any more, they are decoded and shared again. After `close`
        the handle keeps no pipeline: each call builds another one.

        Raises:
            SourceChanged: the source's files have changed since they were shared.
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
        """Give back the leases that this handle holds; a second call does nothing.

        Pipelines loaded from it, here or in other processes, stay valid and shared. This process
        forgets its pipeline, which lives on as long as other code refers to it.
        """
        _loaded.pop(self.text, None)
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The handle as one line of JSON, for an environment variable or a message."""
        return msgspec.json.encode(self._recipe).decode()

    @property
    def identity(self) -> str:
        """A digest of the source's files, the same on each host that has them in a hub cache.

        Any change of a file gives another one, but for a blob of a hub cache that keeps its name
        and its size: its bytes are not compared.
        """
        return self._recipe.identity

    @property
    def facts(self) -> dict[str, str]:
        """What the pipeline's results depend on, as text by name."""
        recipe = self._recipe
        named = {"pipeline_class": recipe.pipeline_class} if recipe.pipeline_class else {}
        return named | {
            "pipeline": recipe.identity,
            # Under its older name, or a folder of results that was begun before would not go on.
            "torch_dtype": msgspec.json.encode(recipe.dtype).decode(),
            "components": "all" if recipe.components is None else ",".join(recipe.components),
        }

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the handle with a text that `text` gave.

        Raises:
            ArgumentError: the text is not that of a handle.
        """
        try:
            return cls(msgspec.json.decode(text, type=Recipe))
        except msgspec.MsgspecError as exc:
            raise ArgumentError(f"{text[:80]!r} is not the text of a handle: {exc}") from exc

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str],
        *,
        pipeline_class: type | str | None = None,
        dtype: object = None,
        components: Collection[str] | None = None,
        variant: str | None = None,
        **hub_kwargs: Any,
    ) -> Self:
        """Return a handle without decoding: the first process that loads it decodes.

        Args:
            source: as for `share`.
            pipeline_class: as for `share`.
            dtype: as for `share`.
            components: as for `share`.
            variant: as for `share`.
            hub_kwargs: as for `share`.

        Raises:
            SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError.
            ArgumentError: there is no class of that name, or no other process can import it.
        """
        maker = PipelineMaker(pipeline_class)
        wanted = Wanted.parse(
            source, dtype, components, variant, hub_kwargs, function=cls.of, is_pipeline=True
        )
        found = find_whole_source(wanted)
        _require_pipeline(found)
        with whole_libraries():
            maker.import_classes(found)
        return cls(Recipe.of(wanted, found, pipeline_class))

    def __reduce__(self) -> tuple[Any, ...]:
        # A plain function: datasets hashes what it pickles, and would hash a method's code too.
        return _revive, (self.text,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self._recipe == other._recipe

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"<shmload.Handle {self.text}>"

    def _load(self) -> "DiffusionPipeline":
        wanted = self._recipe.wanted
        dtype: Any = wanted.dtype
        pipe = load_pipeline(
            wanted.source,
            pipeline_class=self._recipe.pipeline_class,
            dtype=dtype,
            components=wanted.components,
            variant=wanted.variant,
            share=True,
            **wanted.hub.kwargs,
        )
        # After the load, which itself notices a file that changes while it reads: if the files are
        # unchanged now, they were unchanged during the load.
        if identity_of(find_whole_source(wanted), wanted.components) != self._recipe.identity:
            raise SourceChanged(wanted.source)
        return pipe


def _revive(text: str) -> Handle:
    return Handle.from_text(text)


def share(
    source: str | os.PathLike[str],
    *,
    pipeline_class: type | str | None = None,
    dtype: object = None,
    components: Collection[str] | None = None,
    variant: str | None = None,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **hub_kwargs: Any,
) -> Handle:
    """Decode a pipeline's weights once, for all processes that get the handle.

    The segments stay as long as this handle is open or any process has them; no clean-up is
    needed. If all these processes are killed at once, the next load of the same pipeline uses the
    segments, or `shmload gc` removes them.

    Args:
        source: a pipeline's directory, or a hub id.
        pipeline_class: as for `load_pipeline`; other processes must be able to import it. Only the
            components that it takes are decoded.
        dtype: as for `load_pipeline`.
        components: only these of the components with weights; None for all.
        variant: as for `from_pretrained`.
        workers: as for `warm`.
        verify: as for `warm`.
        progress: as for `warm`.
        hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`. A token
            does not go into the handle.

    Raises:
        As `warm`; and ArgumentError if there is no class of that name.
    """
    maker = PipelineMaker(pipeline_class)
    wanted = Wanted.parse(
        source, dtype, components, variant, hub_kwargs, function=share, is_pipeline=True
    )
    with (
        paused_gc(),
        Progress(progress, wanted.title) as counter,
        contextlib.ExitStack() as ending,
    ):
        # With a class all components are found here, and narrowed down below.
        found, rules = find_with_rules(wanted, counter)
        _require_pipeline(found)
        recipe = Recipe.of(wanted, found, pipeline_class)
        with whole_libraries():
            taken = maker.import_classes(found)
        load = ending.enter_context(
            complete_load(taken, rules, counter, Stay.SHARED, workers, verify)
        )
        # Not inherited by forked children: copies in other processes hold nothing either.
        leases = [Lease(segment, crosses_forks=False) for segment in load.holdings.segments()]
    remove_leftovers()  # not earlier: the load may have used leftovers of the same pipeline
    return Handle(recipe, leases)


def _close_all(leases: Collection[Lease]) -> None:
    for lease in leases:
        lease.close()


def _require_pipeline(source: Source) -> None:
    if not source.is_pipeline:
        raise SourceNotFound(
            source.given,
            "not a pipeline (no model_index.json or modular_model_index.json); give a directory or "
            "hub id of one",
        )
