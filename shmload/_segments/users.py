"""The processes that use segments: with a lease, or by a mapping without one.

A program that opened a segment by a path, through a view, has no lease once the view is gone. Its
mapping keeps the memory: to remove the name would only hide that.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from shmload._host.descriptors import Inode, inode_of
from shmload._host.procfs import command_of, lock_holders, mappers
from shmload._host.shm import shm_stat


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A process that uses a model."""

    pid: int
    command: str
    """Its command line; empty if the kernel hides it."""
    program: str
    """The program in it without its directory: a script or module rather than `python`."""


def describe_users(known: Mapping[str, Collection[int]]) -> dict[str, tuple[User, ...]]:
    """Describe the processes that `users_of` or `holders` has found, by segment."""
    users = {pid: describe_user(pid, command_of(pid)) for pid in set().union(*known.values())}
    return {name: tuple(users[pid] for pid in sorted(pids)) for name, pids in known.items()}


def describe_user(pid: int, command: Sequence[str]) -> User:
    """Describe a process by the words of its command line."""
    program = command[0].rpartition("/")[2] if command else ""
    if program.startswith("python"):
        # The module or script that Python runs, not one of its options.
        rest = list(itertools.dropwhile(lambda word: re.fullmatch("-[^cm].*", word), command[1:]))
        if rest and rest[0] == "-m":
            rest = rest[1:]
        if rest and not rest[0].startswith("-"):
            program = rest[0].rpartition("/")[2]
        # A program in a copy of a template has the template's command line.
        if rest and "/shmload" in rest[0] and program.endswith(".pyc"):
            program = "shmload run"
    return User(pid=pid, command=" ".join(command), program=program)


def name_users(users: Collection[User]) -> str:
    """Write the first user for a table, and how many more there are; empty for none."""
    if not users:
        return ""
    first = min(users, key=lambda user: user.pid)
    more = f" +{len(users) - 1}" if len(users) > 1 else ""
    return str(first.pid) + (f" {first.program}" if first.program else "") + more


def holders(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the ids of the processes that have leases on segments, by segment.

    Reads one file; the result lacks processes in another pid namespace and processes that
    inherited a lease.
    """
    locks = lock_holders()
    return {name: locks[inode] for name, inode in _inodes(names).items() if inode in locks}


def users_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the ids of the processes that have leases on segments or map them, by segment.

    Reads the mappings of all processes of this user: 0.1 ms for each, 1 ms with torch in it. The
    result lacks processes in another pid namespace.
    """
    inodes = _inodes(names)
    locks, maps = lock_holders(), mappers(inodes.values())
    found = {n: locks.get(inode, set()) | maps.get(inode, set()) for n, inode in inodes.items()}
    return {name: pids for name, pids in found.items() if pids}


def _inodes(names: Iterable[str]) -> dict[str, Inode]:
    """Return the inodes of the segments that exist."""
    return {name: inode_of(found) for name in names if (found := shm_stat(name))}
