"""Requests for skeletons: what a load leaves for the judge, and how the judge is started.

A request is a file in a folder of this user. One process per user, the judge, works them off; it
holds a lock meanwhile. A load that finds the lock free starts it, and does not wait.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._host.changes import forks_wait
from shmload._host.files import TEMPORARY_SUFFIX, replacing
from shmload._host.owned import open_folder, read_own
from shmload._settings import settings
from shmload._wording import logger_of

logger = logger_of(__name__)

# The judge's program. The path is the load's, which may have found its packages by changing it.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from shmload.integrations._building.judging import main
main()
"""
# A shell that ends at once: the judge is then nobody's child.
_DETACH = '"$@" &'
_FOLDER = "skeletons-asked"
_LOCK = "lock"


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
    """Leave a request, and start the judge unless it runs; if that fails, only the log says so."""
    try:
        folder = requests_folder()
        with replacing(folder / request.key, mode=0o600) as file:
            file.write(msgspec.json.encode(request))
        with judging(folder) as is_mine:
            if not is_mine:
                return  # it runs, and looks for requests once more before it ends
        _start()
    except (OSError, TypeError, ValueError) as exc:
        logger.info("no skeleton is asked for: %s", exc)


def requests_folder() -> Path:
    """Return the folder of the requests; make it if it is missing.

    Raises:
        OSError: it cannot be made, or another user could write to it.
    """
    folder = settings().cache_dir / _FOLDER
    open_folder(folder, make=True).close()
    return folder


@contextlib.contextmanager
def judging(folder: Path) -> Iterator[bool]:
    """Hold the judge's lock during a block; yields False if another process has it."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def oldest_request(folder: Path) -> Path | None:
    """Return the file of the request that waits the longest; None if there is none."""
    found = [each for each in folder.iterdir() if each.suffix != TEMPORARY_SUFFIX]
    waiting = [each for each in found if each.name != _LOCK]
    return min(waiting, key=lambda each: each.stat().st_mtime_ns, default=None)


def read_request(path: Path) -> Request:
    """Read a request.

    Raises:
        OSError: another user could have written it.
        msgspec.DecodeError: it is damaged.
    """
    with open_folder(path.parent) as folder:
        return msgspec.json.decode(read_own(path.name, folder), type=Request)


def _start() -> None:
    """Start the judge as nobody's child."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    path = msgspec.json.encode(sys.path).decode()
    judge = [sys.executable, *flags, "-c", _PROGRAM, path]
    with forks_wait():
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *judge],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
            timeout=10,
        )


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
