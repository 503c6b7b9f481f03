"""Every setting that users may change.

Each field is read from the environment variable `SHMLOAD_` plus its name in capitals.
"""

import math
import os
import re
from collections.abc import Iterable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shmload._wording import nearest
from shmload.errors import ArgumentError

PREFIX = "SHMLOAD_"
# The Hugging Face libraries' variable for the same thing; ours wins.
_HUGGINGFACE_WORKERS = "HF_PARALLEL_LOADING_WORKERS"
# Number of ranks on this host, as torchrun, Open MPI, Intel MPI and MVAPICH call it.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
# This process's number among them, from 0, as the same call it.
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
)
# No budget is smaller than this, in bytes; a smaller number lacks its unit.
_LEAST_BUDGET = 1 << 20
# A day is 24 hours, whatever the clocks do.
_UNITS = {
    1: ("s", "sec", "second", "seconds"),
    60: ("m", "min", "minute", "minutes"),
    3600: ("h", "hour", "hours"),
    86400: ("d", "day", "days"),
}
_SECONDS = {unit: seconds for seconds, units in _UNITS.items() for unit in units}
# Where nothing can be read or written: the directories of a user without a home.
_NO_HOME = Path("/dev/null/no-home")
Size = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
# poll(2) counts milliseconds in 31 bits: 24 days.
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2_000_000)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Values that hold for the whole process; see `docs/operate.md` for the reasons."""

    workers: Count | None = None
    """Worker processes for one load; None means one for each core that the parent does not need."""

    inline_nbytes: int = 64 << 20
    """The caller decodes by itself, without workers, if it reads no more bytes than this.

    A worker takes about 0.1 s to start; in that time one process decodes some 200 MiB.
    """

    stall_timeout_s: Seconds = 60.0
    """How long a worker may make no progress before it is replaced, in seconds."""

    start_timeout_s: Seconds = 60.0
    """How long a load waits for its first worker to be ready, in seconds."""

    wait_timeout_s: Seconds = 600.0
    """How long to wait for a segment that another process is decoding, or for room in the budget
    while other loads decode, in seconds."""

    remote_timeout_s: Seconds = 60.0
    """How long a request to a bucket or web server is made again after errors, in seconds."""

    budget: Size | None = None
    """Limit for resident segments in bytes, where no service runs; None for no limit."""

    remember: bool = True
    """Whether loads with `keep` keep what they have built, for other processes and later loads."""

    headroom: Fraction = 0.1
    """The fraction of each accelerator's memory that a strategy leaves to activations."""

    page_locked: Size | None = None
    """The most bytes of waiting weights that a process keeps pinned; None for half of the memory
    of the machine, or of the process's control groups."""

    trace: Path | None = None
    """The file that gets where the time of each load goes; None for none."""

    cache_dir: Path = msgspec.field(default_factory=lambda: _base_dir("XDG_CACHE_HOME", "~/.cache"))
    """Where dtype rules of model classes are cached."""


@cache
def settings() -> Settings:
    """Return the settings of this process, read from the environment once.

    Raises:
        ArgumentError: a variable has a value of the wrong kind; the message names it.
    """
    given = {}
    for field in msgspec.structs.fields(Settings):
        variable = PREFIX + field.name.upper()
        if field.name == "workers" and not os.environ.get(variable):
            variable = _HUGGINGFACE_WORKERS
        if os.environ.get(variable):
            given[field.name] = _parse(variable, field.type)
    return Settings(**given)


def _parse(variable: str, kind: object) -> Any:
    text = os.environ[variable]
    if kind in (Path, Path | None):
        path = os.path.expanduser(text)
        if path.startswith("~"):
            raise ArgumentError(
                f"the environment variable {variable} is {text!r}, but no such home directory is "
                "known; give the whole path"
            )
        return Path(path)
    if kind == Size | None:
        try:
            return parse_budget(text)
        except ValueError as exc:
            raise ArgumentError(f"the environment variable {variable}: {exc}") from exc
    try:
        return msgspec.convert(text, kind, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:
        raise ArgumentError(
            f"the environment variable {variable} is {text!r}, which it cannot be: {exc}"
        ) from exc


# Of `shmload run`, which reads no settings: the imports of a template, and --redirect.
_OTHERS = (PREFIX + "RUN_IMPORTS", PREFIX + "REDIRECT")
_KNOWN = tuple(PREFIX + field.name.upper() for field in msgspec.structs.fields(Settings))


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that begins like a setting's and is none.

    Args:
        environment: names of variables.
    """
    return [
        f"{variable} is no setting{nearest(variable, _KNOWN)}"
        for variable in sorted(environment)
        if variable.startswith(PREFIX) and variable not in _KNOWN + _OTHERS
    ]


def parse_nbytes(text: str) -> int:
    """Read a size in bytes, such as `40GiB`, `16e9` or `512 MB`.

    Raises:
        ValueError: it is not a size.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise ValueError(f"{text!r} is not a size; write it like 40GiB or 16e9")
    number, prefix, binary = found.groups()
    try:
        return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))
    except (ValueError, OverflowError) as exc:  # two points, or too large for a float
        raise ValueError(f"{text!r} is not a size; write it like 40GiB or 16e9") from exc


def parse_size(argument: str, value: object) -> int:
    """Read a number of bytes, or a size such as `512MiB`.

    Args:
        argument: for the error.
        value: of the argument.

    Raises:
        ArgumentError: it is neither.
    """
    try:
        return parse_nbytes(str(value))
    except ValueError as exc:
        raise ArgumentError(f"{argument}: {exc}") from exc


def parse_budget(text: str) -> int:
    """Read a budget in bytes; as `parse_nbytes`, but a small number lacks its unit.

    Raises:
        ValueError: it is not a size, or below 1 MiB and not 0.
    """
    nbytes = parse_nbytes(text)
    if 0 < nbytes < _LEAST_BUDGET:
        if text.strip().isdigit():
            raise ValueError(f"{text} is {nbytes} bytes; is a unit missing, as in {text}GiB?")
        raise ValueError(f"{text} is below 1 MiB, the least; write it like 40GiB")
    return nbytes


def parse_keep_for(given: float | str | timedelta) -> int:
    """Read how long an idle segment stays, such as `2h`, `1d 12h`, `forever` or a number.

    Returns:
        The time in whole seconds, at least 1; 0 for `forever`.

    Raises:
        ArgumentError: it is no such time.
    """
    seconds: float | None
    if isinstance(given, timedelta):
        seconds = given.total_seconds()
    elif isinstance(given, str):
        if given.strip().lower() == "forever":
            return 0
        seconds = _parse_seconds(given)
    else:
        seconds = given
    if seconds is None or not 0 < seconds < math.inf:
        raise ArgumentError(
            f"{given!r} is no time to keep something; write it like 2h, 90min or 1d12h, or forever"
        )
    return math.ceil(seconds)


def _parse_seconds(text: str) -> float | None:
    """Return a text such as `1h30min` in seconds; None if it is none."""
    parts = re.findall(r"([0-9.]+)\s*([a-z]+)\s*", text.lower())
    if not parts or "".join(map("".join, parts)) != re.sub(r"\s", "", text.lower()):
        return None
    try:
        return sum(float(number) * _SECONDS[unit] for number, unit in parts)
    except (KeyError, ValueError):  # an unknown unit, or two points
        return None


def local_world_size() -> int:
    """Return how many ranks of this job run on this host; 1 outside of such a job.

    torchrun, `accelerate launch` and MPI set it in each rank's environment.
    """
    return max(1, _first_number(_LOCAL_SIZES) or 1)


def local_rank() -> int | None:
    """Return this process's number among the ranks of this host; None outside of such a job."""
    return _first_number(_LOCAL_RANKS)


def _first_number(variables: Iterable[str]) -> int | None:
    """Return the value of the first of some variables that is a whole number; None if none is."""
    for variable in variables:
        text = os.environ.get(variable, "")
        if text.isdecimal():
            return int(text)
    return None


def _base_dir(variable: str, below_home: str) -> Path:
    """Return a directory of the XDG base directory specification."""
    try:
        return Path(os.environ.get(variable) or below_home).expanduser() / "shmload"
    except RuntimeError:  # HOME is not set, and the user has no entry in passwd
        return _NO_HOME


def worker_count(*, parent_is_busy: bool) -> int:
    """Return how many workers to start.

    Args:
        parent_is_busy: whether the parent imports or builds during the load; it then keeps a core:
            on two cores a second worker slows the imports by a second.
    """
    chosen = settings().workers
    if chosen is not None:
        return max(1, chosen)
    cores = len(os.sched_getaffinity(0))
    # With far fewer than 16 processes page allocation is already the limit.
    return max(1, min(16, cores - 1 if parent_is_busy else cores))
