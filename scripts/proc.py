"""What /proc says of processes; of one that has ended, nothing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """A process's state."""

    state: str
    """A letter, such as Z for a zombie."""
    parent: int
    cpu_s: float
    """Processor time of it and of its children that have ended."""


def pids_with(mark: bytes, *, file: str) -> Iterator[int]:
    """Yield the processes whose `cmdline` or `environ` has some bytes."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/{file}").read_bytes():
                yield int(pid)


def stat_of(pid: int) -> Stat | None:
    """Return a process's state; None if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Stat(fields[0], int(fields[1]), sum(map(int, fields[11:15])) * _TICK_S)
    return None


def children(pid: int | str) -> list[int]:
    """Return the pids of a process's children, oldest first."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found.update(map(int, path.read_text().split()))
    return sorted(found)


def open_files(pid: int | str) -> list[str]:
    """Return what a process has open: paths, and the kernel's names of what has none."""
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, as the list itself is
                found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
    return found
