"""The list of sources that `warm --list` and `serve --preload` warm: a file, one per line.

    # SOURCE [DTYPE] [COMPONENT=DTYPE]... [pin | keep-for=TIME] [OPTION=VALUE]...,
    # quoted as in a shell
    ~/models/flux bfloat16 pin
    ~/models/sdxl half keep-for=2h variant=fp16 component=unet component=vae
    ~/models/sd15 bfloat16 vae=float32
    "/models/my lora.safetensors"

Guarantee: a list with a mistake is refused as a whole, before anything is warmed.
"""

import difflib
import os
import shlex
from pathlib import Path

import msgspec

from shmload._checkpoints.dtypes import AUTO, dtype_by_component, parse_dtype
from shmload._cli.sources import SELECTING
from shmload._settings import parse_keep_for
from shmload.errors import ArgumentError, UnknownDtype

_MAX_NBYTES = 16 << 20  # /dev/zero has no end
# Words of a line.
_PIN = "pin"
_KEEP_FOR = "keep-for="
_DTYPE = "dtype="  # may stand before what is a dtype without it
# Words with a value that are options of `shmload warm`, by these names.
_OPTIONS = tuple(option for option in SELECTING if option != "cache-dir")


class ListedSource(msgspec.Struct, frozen=True):
    """A source to warm: a line of the list, or one of the command line."""

    line: int
    """Its number; 0 for the command line."""
    source: str
    options: tuple[str, ...] = ()
    """Of `shmload warm`: those that do what the line says."""

    @property
    def fields(self) -> dict[str, object]:
        """What a log as JSON says of it beside a message."""
        return {"line": self.line, "source": self.source}


def read_list(path: Path) -> list[ListedSource]:
    """Read a file of sources.

    Raises:
        ArgumentError: a line has a mistake; the message has its number.
    """
    found = []
    with open(path, "rb") as file:  # perhaps a pipe
        content = file.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        raise ArgumentError(f"{path} has more than {_MAX_NBYTES} bytes: it is no list of sources")
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if b"\0" in line:
                raise ValueError("no name has a NUL character")
            words = shlex.split(line.decode(), comments=True)
            if words:
                found.append(_read_words(number, *words))
        except UnicodeDecodeError as exc:
            raise ArgumentError(f"{path}, line {number}: it is not UTF-8") from exc
        except ValueError as exc:
            raise ArgumentError(f"{path}, line {number}: {exc}") from exc
    return found


def _read_words(line: int, source: str, *words: str) -> ListedSource:
    """Read the words of one line.

    Raises:
        ArgumentError: a word has a mistake.
    """
    times = [word.removeprefix(_KEEP_FOR) for word in words if word.startswith(_KEEP_FOR)]
    others = [f"--{word}" for word in words if word.partition("=")[0] in _OPTIONS and "=" in word]
    dtypes = [
        word.removeprefix(_DTYPE)
        for word in words
        if word != _PIN and not word.startswith(_KEEP_FOR) and f"--{word}" not in others
    ]
    for dtype in dtypes:
        _require_dtype(dtype)
    general = [dtype for dtype in dtypes if "=" not in dtype]
    if len(general) > 1:
        raise ArgumentError(
            f"{' and '.join(general)} are two dtypes; that of one component is COMPONENT=DTYPE"
        )
    dtype_by_component(dtypes)  # none is given twice
    if len(times) > 1:
        raise ArgumentError(f"{_KEEP_FOR} stands there {len(times)} times")
    for time in times:
        parse_keep_for(time)
    if _PIN in words and times:
        raise ArgumentError("pin and keep-for exclude each other: what is pinned stays when idle")
    options = [
        *(f"--dtype={dtype}" for dtype in dtypes),
        *(["--pin"] if _PIN in words else []),
        *(f"--keep-for={time}" for time in times),
        *others,
    ]
    return ListedSource(line, os.path.expanduser(source), tuple(options))


def _require_dtype(word: str) -> None:
    """Check a word that is none of the others: DTYPE or COMPONENT=DTYPE.

    Raises:
        ArgumentError: it is neither.
    """
    component, _, dtype = word.rpartition("=")
    meant = difflib.get_close_matches(component, _OPTIONS, 1)
    if meant:
        raise ArgumentError(f"{component}= is none of the options; did you mean {meant[0]}=?")
    try:
        if dtype != AUTO:
            parse_dtype(dtype)
    except UnknownDtype as exc:
        others = ", ".join(f"{name}=" for name in _OPTIONS)
        among = f"{component}=: {exc}" if component else str(exc)
        raise ArgumentError(
            f"{among}; nor is {word!r} pin, keep-for=TIME, COMPONENT=DTYPE, or one of "
            f"{others}; put quotes around a path with spaces"
        ) from exc
