"""What the service warms at its start: a list of sources in a file, one a line.

    # SOURCE [DTYPE], in the quotes of a shell where a path has spaces
    ~/models/flux bfloat16
    "/models/my lora.safetensors"

Guarantee: a list with a mistake is refused whole, before anything is done.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shmload._checkpoints.dtypes import parse_dtype
from shmload._decoding.coordinator import DecodeCancelled
from shmload._loading.verbs import warm
from shmload._segments.listing import segments
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, ShmloadError

if TYPE_CHECKING:
    from shmload._service.state import ServiceState

logger = logging.getLogger(__name__)


class Wanted(msgspec.Struct, frozen=True):
    """A source that is to be resident."""

    line: int
    source: str
    dtype: str | None


def read_list(path: Path) -> list[Wanted]:
    """Read a file of sources.

    Raises:
        ArgumentError: a line has a mistake; the message names it by its number.
    """
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            words = shlex.split(line.decode(), comments=True)
            if len(words) > 2:
                raise ArgumentError("more than SOURCE and DTYPE; put quotes around spaces")
            if words:
                dtype = words[1] if len(words) == 2 else None
                if dtype is not None:
                    parse_dtype(dtype)
                found.append(Wanted(number, os.path.expanduser(words[0]), dtype))
        except UnicodeDecodeError as exc:
            raise ArgumentError(f"{path}, line {number}: it is not UTF-8") from exc
        except ValueError as exc:
            raise ArgumentError(f"{path}, line {number}: {exc}") from exc
    return found


def preload(wanted: Sequence[Wanted], state: "ServiceState") -> None:
    """Make a list of sources resident, as far as that can be done; errors are logged.

    Ends early when the service does.
    """
    made: dict[str, Wanted] = {}
    for each in wanted:
        if state.is_stopping:
            return
        try:
            report = warm(
                each.source, torch_dtype=each.dtype, progress=False, service=state.as_service()
            )
        except DecodeCancelled:
            return  # the service ends
        except ShmloadError as exc:  # the others are of use without it
            logger.error("line %d cannot be preloaded: %s", each.line, exc)
            continue
        logger.info("preloaded %s: %s", each.source, format_nbytes(report.resident_nbytes))
        made.update(dict.fromkeys(report.segments, each))
        _report_evicted(made, each)


def _report_evicted(made: dict[str, Wanted], latest: Wanted) -> None:
    """Say so where the latest source has taken the place of earlier ones, and forget those."""
    lost = made.keys() - {info.name for info in segments()}
    gone = {made.pop(name) for name in lost}
    for each in sorted(gone, key=lambda wanted: wanted.line):
        logger.error(
            "the list does not fit the budget: line %d, %s, was evicted for line %d",
            each.line,
            each.source,
            latest.line,
        )
