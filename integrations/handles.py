"""Handles: a few hundred bytes with which any process of this host attaches a shared pipeline."""

import contextlib
import hashlib
import json
import os
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from shmload._building.classes import name_class
from shmload._building.makers import PipelineMaker
from shmload._checkpoints.formats.known import format_named
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.modular import find_whole_source
from shmload._checkpoints.rule import settle_dtype
from shmload._checkpoints.source import Source, files_of
from shmload._checkpoints.wanted import Wanted
from shmload._host.changes import add_lock, limit_inherited_threads
from shmload._loading.progress import Callback
from shmload._segments.names import identify_anywhere
from shmload._segments.removal import remove_leftovers
from shmload.errors import ArgumentError, ShardChanged, SourceNotFound
from shmload.integrations.loads import load_pipeline

# Configurations and tokenizers are smaller; weights that are not safetensors files are larger.
_SMALL_NBYTES = 32 << 20

# The pipelines of this process, by their handles' text.
_loaded: dict[str, Any] = {}
# The texts of the handles that `share` returned and that are open.
_open: list[str] = []
_loading = add_lock()

_Said = tuple[dict[str, Any], str]
"""The arguments of `load_pipeline`, and a digest of the source's files."""


@dataclass(frozen=True)
class Handle(contextlib.AbstractContextManager["Handle"]):
    """A shared pipeline, for any process of this user on this host.

    It pickles to a few hundred bytes, however large the pipeline is: it says what to load, and
    contains no weights. The handle that `share` returns has loaded, and holds the segments until it
    is closed. Copies of a handle in other processes hold nothing until they load.

    A context that closes the handle.

    Raises:
        ArgumentError: the text is not that of a handle.
    """

    text: str
    """The handle as one line of JSON, for an environment variable or a message."""
    _closing: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """What closes the handle that `share` returned, once; else empty."""

    def __post_init__(self) -> None:
        self._read()

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
            source: a pipeline's directory, or a hub id.
            pipeline_class: as for `load_pipeline`; other processes must be able to import it.
            dtype: as for `load_pipeline`.
            components: only these of the components with weights; None for all.
            variant: as for `from_pretrained`.
            hub_kwargs: `revision`, `cache_dir`, `token`, `local_files_only`, `force_download`. A
                token does not go into the handle.

        Raises:
            SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError.
            ArgumentError: there is no class of that name, or no other process can import it.
        """
        wanted = Wanted.parse(
            source, dtype, components, variant, hub_kwargs, function=cls.of, is_pipeline=True
        )
        found = find_whole_source(wanted)
        if not found.is_pipeline:
            raise SourceNotFound(f"{found.given}: no pipeline; give a directory or hub id of one")
        dtype = settle_dtype(wanted.dtype, found)
        arguments = msgspec.structs.replace(wanted, dtype=dtype).arguments
        if pipeline_class is not None:
            with whole_libraries():
                PipelineMaker(pipeline_class).import_classes(found)
            arguments["pipeline_class"] = name_class(pipeline_class)
        return cls(_write((arguments, _digest(found, wanted.components))))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the handle with a text that `text` gave; raise as the constructor."""
        return cls(text)

    @property
    def facts(self) -> dict[str, str]:
        """What the pipeline's results depend on, as text by name.

        `pipeline` is a digest of the source's files, the same on each host that has them in a hub
        cache. Any change of a file gives another one, but for a blob of a hub cache that keeps its
        name and its size: its bytes are not compared. The arguments are JSON; those that were not
        given are left out.
        """
        given, digest = self._read()
        names = sorted(given.keys() & {"pipeline_class", "dtype", "components"})
        return {"pipeline": digest, **{name: _write(given[name]) for name in names}}

    def load(self, **how: Any) -> Any:
        """Return the pipeline, attached to the shared segments.

        The first call in a process builds the pipeline; later calls return the same object, so it
        is cheap to call for every item. A forked child has the pipeline that its parent loaded. If
        torch's threads were running at the fork, torch uses one thread in the child: it lacks
        those threads and would wait for them forever.

        Components with weights that were not shared are None.

        If no process holds the segments any more, they are decoded and shared again.

        Args:
            how: `workers`, `verify` and `progress`, as for `load_pipeline`; for the first call.

        Raises:
            ShardChanged: the source's files have changed since the handle was made.
            ShmloadError: as `load_pipeline`.
        """
        arguments, _ = self._read()
        limit_inherited_threads()
        with _loading:
            pipe = _loaded.get(self.text)
            if pipe is None:
                pipe = load_pipeline(**arguments, **how, share=True)
                # After the load, which itself notices a file that changes while it reads: if the
                # files are unchanged now, they were unchanged during the load.
                if Handle.of(**arguments) != self:
                    raise ShardChanged(
                        f"the weights of {arguments['source']} were replaced since they were "
                        "shared; share them again, and restart the processes that use the old ones",
                        path=arguments["source"],
                    )
                _loaded[self.text] = pipe
            return pipe

    def close(self) -> None:
        """Have this process forget the pipeline; a second call does nothing.

        An equal handle that `share` returned keeps it until that is closed, too. The pipeline stays
        valid, here and in other processes, as long as code refers to it. A later `load` loads it
        again.
        """
        for close in self._closing:
            close()
        _forget(self.text)

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.text,)

    def _read(self) -> _Said:
        try:
            said: _Said = msgspec.convert(json.loads(self.text), _Said)
        except ValueError as exc:
            raise ArgumentError(f"{self.text[:80]!r} is not the text of a handle: {exc}") from exc
        return said


def _write(said: object) -> str:
    """Write JSON in ASCII; a path need not be UTF-8."""
    return json.dumps(said, separators=(",", ":"))


def share(
    source: str | os.PathLike[str],
    *,
    workers: int | None = None,
    verify: bool = False,
    progress: Callback | bool | None = None,
    **arguments: Any,
) -> Handle:
    """Load a pipeline, so that its weights are decoded, for all processes that get the handle.

    The segments stay as long as this handle is open or any process has them; no clean-up is
    needed. If all these processes are killed at once, the next load of the same pipeline uses the
    segments, or `shmload gc` removes them.

    Args:
        source: a pipeline's directory, or a hub id.
        workers: as for `load_pipeline`.
        verify: as for `load_pipeline`.
        progress: as for `load_pipeline`.
        arguments: as for `Handle.of`: `pipeline_class`, `dtype`, `components`, `variant`, and those
            of the hub.

    Raises:
        As `Handle.of`, and as `load_pipeline`.
    """
    handle = Handle.of(source, **arguments)
    _open.append(handle.text)
    handle._closing.append(weakref.finalize(handle, _close, handle.text))
    handle._closing[0].atexit = False
    handle.load(workers=workers, verify=verify, progress=progress)
    remove_leftovers()  # not earlier: the load may have used leftovers of the same pipeline
    return handle


def _close(text: str) -> None:
    _open.remove(text)
    _forget(text)


def _forget(text: str) -> None:
    if text not in _open:
        _loaded.pop(text, None)


def _digest(source: Source, components: Collection[str] | None) -> str:
    """Return a digest of a pipeline's files, the same on any host that has them in a hub cache."""
    stamps = []
    for path in files_of(source, components):
        found = os.stat(path)
        stamp = identify_anywhere(path, found)
        if found.st_size <= _SMALL_NBYTES and not format_named(path.name):
            with contextlib.suppress(OSError):  # the library cannot read it either
                stamp = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        stamps.append((os.path.relpath(path, source.root), stamp))
    return hashlib.blake2b(repr(stamps).encode(), digest_size=16).hexdigest()
