"""Requests for skeletons that wait for the judge, and how the judge is started.

Each program that wants something of the judge leaves a file in a folder of this user. One judge per
user and machine works it off, whatever cache it is for: it holds a lock meanwhile. A program that
finds the lock free starts the judge, hands it the lock, and does not wait. If the lock is taken,
the work lies there until that judge, or the one that a later program starts, takes it.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shmload._building.maker import Maker
from shmload._checkpoints.source import Source
from shmload._host.changes import forks_wait
from shmload._host.descriptors import Lock
from shmload._host.files import TEMPORARY_SUFFIX, replacing
from shmload._host.own_folder import private_path, runtime_folder
from shmload._host.variables import is_of_import
from shmload._settings import settings
from shmload._wording import logger_of

logger = logger_of(__name__)

# The judge's program. The path is the program's, which may have found its packages by changing it.
_PROGRAM = """
import sys
if not sys.flags.safe_path:  # another user may write to the current directory
    sys.path[0] = sys.prefix
import json, os
own = os.environ.pop("_SHMLOAD_JUDGE")
sys.path[:] = json.loads(own)["path"]
from shmload._building.judging import main
main(own, sys.argv[1])
"""
# A shell that ends at once: the judge is then nobody's child.
_DETACH = '"$@" &'
_FOLDER = "judge"
_LOCK = "lock"
_TAKEN = "taken"
# What decides how models are built, other than the path; no secret is among it.
_VARIABLES = ("DIFFUSERS_", "SHMLOAD_", "TRANSFORMERS_")
# More is not kept, nor what no program has asked for again within this time, in seconds.
_MOST_WAITING = 64
_MOST_AGE_S = 3600.0


class Program(msgspec.Struct, frozen=True):
    """What a judge must be to stand for a program: it has the same code and settings."""

    executable: str
    flags: tuple[str, ...]
    path: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_process(cls) -> "Program":
        """Return this process's."""
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        variables = (each for each in os.environ.items() if each[0].startswith(_VARIABLES))
        kept = (each for each in variables if each[0] != "SHMLOAD_CACHE_DIR")
        path = tuple(map(os.path.abspath, sys.path))  # the judge is elsewhere
        return cls(sys.executable, tuple(flags), path, tuple(sorted(kept)))

    def command(self, lock: Lock) -> list[str]:
        """Return the command line of its judge, which inherits the lock."""
        return [self.executable, *self.flags, "-c", _PROGRAM, str(lock.fd)]

    @property
    def environment(self) -> dict[str, str]:
        """What this process's environment has for imports, with the program's variables.

        Of the rest a judge must know nothing: it outlives the program, and works for others.
        """
        own = msgspec.json.encode(self).decode()  # other users can read a command line
        others = {
            name: value
            for name, value in os.environ.items()
            if (is_of_import(name) or name == "PATH")
            and not name.startswith(_VARIABLES)
            and not name.endswith("TOKEN")
        }
        return others | dict(self.variables) | {"_SHMLOAD_JUDGE": own}


class Refused(Exception):
    """Raised when the models of a request can have no skeleton; its text is the reason."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One load whose models shall get a skeleton: what a `Build` is made of."""

    key: str
    """Name of the skeleton's file."""
    source: Source
    """As the maker takes it."""
    maker: Maker
    dtype: object
    """As the user gave it."""
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    directory: str
    """The working directory."""

    @property
    def class_name(self) -> str:
        """Name of the class of the pipeline or model."""
        return self.source.class_name or self.maker.name or ""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as it waits for the judge."""

    key: str
    """As in the request."""
    cache: str
    """The directory that the skeleton is for."""
    program: Program
    request: bytes
    """Pickled. It is trusted like code: it lies in a folder that no other user can write to."""

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.key}-{xxhash.xxh3_64_hexdigest(os.fsencode(self.cache))}"


class Queue:
    """The work that waits; newest first, since its program is the likeliest to come back.

    Args:
        folder: of this user.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def lock_path(self) -> Path:
        """Path of the judge's lock."""
        return self._folder / _LOCK

    def put(self, work: Work) -> None:
        """Leave work; what was asked before is asked anew.

        Raises:
            OSError: the file cannot be written.
        """
        with replacing(self._folder / work.name, mode=0o600) as file:
            file.write(msgspec.msgpack.encode(work))

    def waiting(self) -> Iterator[tuple[Path, Work]]:
        """Yield all work, newest first; remove what is too old, too much, or for no cache."""
        found = list[tuple[float, Path]]()
        for path in self._folder.iterdir():
            if path.name not in (_LOCK, _TAKEN) and path.suffix != TEMPORARY_SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime, path))
        oldest = time.time() - _MOST_AGE_S
        for number, (asked_at, path) in enumerate(sorted(found, reverse=True)):
            work = _read(path)
            if work and number < _MOST_WAITING and asked_at > oldest and os.path.isdir(work.cache):
                yield path, work
            else:
                path.unlink(missing_ok=True)

    def take(self, path: Path) -> Work | None:
        """Take work out, for the one that holds the lock; None if it is gone."""
        try:
            path.rename(self._folder / _TAKEN)
        except FileNotFoundError:
            return None
        return self.taken()

    def taken(self) -> Work | None:
        """Return what was taken and is not done: its process has died."""
        return _read(self._folder / _TAKEN)

    def done(self) -> None:
        """Forget what was taken."""
        (self._folder / _TAKEN).unlink(missing_ok=True)


def queue() -> Queue:
    """Return this user's queue; make its folder if it is missing.

    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    return Queue(Path(private_path(f"{runtime_folder()}/{_FOLDER}")))


def ask(request: Request) -> None:
    """Ask the judge for a skeleton; if that fails, only the log says so."""
    cache = settings().cache_dir
    # A token is secret, and nothing is downloaded.
    kwargs = {name: value for name, value in request.kwargs.items() if name != "token"}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        leave(
            Work(
                key=request.key,
                cache=os.path.abspath(cache),
                program=Program.of_this_process(),
                request=pickle.dumps(msgspec.structs.replace(request, kwargs=kwargs)),
            )
        )
    except Exception as exc:  # the load has succeeded, whatever it was given
        logger.info("no skeleton is asked for: %s", exc)


def leave(work: Work) -> None:
    """Leave work, and start the judge unless it runs.

    Raises:
        OSError: neither is possible.
    """
    waiting = queue()
    waiting.put(work)
    # It is handed over, and never free in between: or loads in the meantime would start one each.
    lock = Lock.try_take(waiting.lock_path)
    if lock:
        try:
            start(work.program, lock)
        finally:  # without freeing it: the judge may have started nevertheless
            lock.leave()


def start(program: Program, lock: Lock) -> None:
    """Start the judge, which inherits the lock and is no child of this process."""
    # A machine on which that takes so long has no time for a judge; the work waits for a later one.
    with forks_wait(), contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *program.command(lock)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
            timeout=10,
            pass_fds=[lock.fd],
            env=program.environment,
            cwd="/",
        )


def _read(path: Path) -> Work | None:
    """Read work; None if it cannot be read."""
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW)) as file:
            return msgspec.msgpack.decode(file.read(), type=Work)
    except (OSError, msgspec.DecodeError):
        return None
