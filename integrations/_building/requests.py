"""Requests for skeletons: what a load tells the judge of itself."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.integrations._building import queued

logger = logger_of(__name__)


class AskedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A `Checkpoint` whose paths are texts."""

    component: str
    folder: str
    library: str
    class_name: str
    config: dict[str, Any]
    shards: tuple[str, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One load whose models shall get a skeleton."""

    key: str
    """Name of the skeleton's file."""
    given: str
    is_path: bool
    """Whether the user gave a `Path` and not a text."""
    takes_path: bool
    """Whether the library gets a `Path`, which it notes in a model."""
    root: str
    class_name: str
    components: tuple[str, ...]
    checkpoints: tuple[AskedCheckpoint, ...]
    variant: str | None
    maker: str
    """`pipeline` or `model`."""
    wanted: str | None
    """The class that the user named."""
    left_out: tuple[str, ...]
    dtype: Any
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    directory: str
    """The working directory."""

    @property
    def source(self) -> Source:
        """The source."""
        return Source(
            given=Path(self.given) if self.is_path else self.given,
            root=Path(self.root),
            class_name=self.class_name,
            components=self.components,
            checkpoints=tuple(
                Checkpoint(
                    component=each.component,
                    folder=Path(each.folder),
                    library=each.library,
                    class_name=each.class_name,
                    config=each.config,
                    shards=tuple(map(Path, each.shards)),
                )
                for each in self.checkpoints
            ),
            variant=self.variant,
        )

    @property
    def torch_dtype(self) -> object:
        """The dtype as the user gave it."""
        return _decode_dtype(self.dtype)


def make_request(
    key: str,
    source: Source,
    *,
    maker: str,
    wanted: str | None,
    left_out: tuple[str, ...],
    takes_path: bool,
    dtype: object,
    kwargs: Mapping[str, Any],
) -> Request:
    """Return the request of a load; the arguments are its fields."""
    return Request(
        key=key,
        given=os.fspath(source.given),
        is_path=not isinstance(source.given, str),
        takes_path=takes_path,
        root=os.fspath(source.root),
        class_name=source.class_name,
        components=source.components,
        checkpoints=tuple(
            AskedCheckpoint(
                component=each.component,
                folder=os.fspath(each.folder),
                library=each.library,
                class_name=each.class_name,
                config=each.config,
                shards=tuple(map(os.fspath, each.shards)),
            )
            for each in source.checkpoints
        ),
        variant=source.variant,
        maker=maker,
        wanted=wanted,
        left_out=left_out,
        dtype=_encode_dtype(dtype),
        # A token is secret, and nothing is downloaded.
        kwargs={name: value for name, value in kwargs.items() if name != "token"},
        directory=os.getcwd(),
    )


def ask(request: Request) -> None:
    """Ask the judge for a skeleton; if that fails, only the log says so."""
    cache = settings().cache_dir
    try:
        cache.mkdir(parents=True, exist_ok=True)
        queued.ask(
            queued.Work(
                kind="skeleton",
                key=request.key,
                group=f"{request.class_name} {request.wanted}",
                cache=os.path.abspath(cache),
                program=queued.Program.of_this_process(),
                content=msgspec.json.encode(request),
            )
        )
    except (OSError, TypeError, ValueError, subprocess.SubprocessError) as exc:
        logger.info("no skeleton is asked for: %s", exc)


def _encode_dtype(dtype: object) -> Any:
    if isinstance(dtype, torch.dtype):
        return {"torch": str(dtype).removeprefix("torch.")}
    if isinstance(dtype, Mapping):
        return {"by component": {name: _encode_dtype(each) for name, each in dtype.items()}}
    return dtype


def _decode_dtype(encoded: Any) -> object:
    match encoded:
        case {"torch": name}:
            return getattr(torch, name)
        case {"by component": dtypes}:
            return {name: _decode_dtype(each) for name, each in dtypes.items()}
    return encoded
