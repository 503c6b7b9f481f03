"""Control groups: that of a template outlives the programs of its first caller.

Where the user may move processes (a delegated part of the tree), a template moves to a group of its
own, beside its caller's. Elsewhere it stays, since it would escape limits and clean-up that are
not its own to lift, and ends once it is alone in the group: nothing then keeps that from going.
"""

import contextlib
import os

from shmload._templates.rights import said_of

_NAME = "shmload-templates"


def leave_or_find() -> str | None:
    """Move this process to a group of its own; return the group's directory if it stays.

    Returns:
        None if it has moved, or is in the root of the tree.
    """
    for line, folder in cgroup_folders(said_of("self", "cgroup") or "").items():
        if line.rpartition(":")[2] != "/" and os.path.exists(f"{folder}/cgroup.procs"):
            return None if line.startswith("0::") and move_beside(folder) else folder
    return None


def move_beside(folder: str) -> bool:
    """Move this process to a group beside this one, where this user may; tell whether it has."""
    if os.geteuid() == 0:
        return False  # it could move anywhere, but the tree has another keeper
    target = f"{os.path.dirname(folder)}/{_NAME}"
    with contextlib.suppress(OSError):
        os.makedirs(target, exist_ok=True)
        with open(f"{target}/cgroup.procs", "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
        return True
    return False


def is_alone_in(folder: str | None) -> bool:
    """Tell whether a control group has no process but this one and its descendants."""
    if folder is None:
        return False
    try:
        with open(f"{folder}/cgroup.procs", encoding="ascii") as file:
            members = {int(line) for line in file}
        own = {os.getpid()}
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                waiting += (children := list(map(int, file.read().split())))
            own |= set(children)
    except (OSError, ValueError):
        return False
    return bool(members) and members <= own


def can_enter_cgroup() -> bool:
    """Tell whether another process of this user could be moved to this process's control group."""
    folders = cgroup_folders(said_of("self", "cgroup") or "")
    return all(os.access(f"{folder}/cgroup.procs", os.W_OK) for folder in folders.values())


def cgroup_folders(text: str) -> dict[str, str]:
    """Return the directories of the control groups that /proc/PID/cgroup lists, by its lines."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        base = "/sys/fs/cgroup"
        if controllers:  # version 1 has a tree for each set of controllers
            base = f"{base}/{controllers.removeprefix('name=')}"
        elif not os.path.exists(f"{base}/cgroup.procs"):
            base = f"{base}/unified"  # beside those of version 1, if it is mounted at all
            if not os.path.isdir(base):
                continue
        found[line] = f"{base}{path}".rstrip("/")
    return found
