"""What the kernel lets a process do, as the kernel itself says: of this process, or of a peer.

A process that one has confined under the same user id (fewer capabilities, a filter of system
calls, a label, namespaces, another root) must not get a template that may do more. Its own word
counts for nothing: the template reads of each peer what it has read of itself, and compares.
"""

import _socket
import os
import select

from shmload._templates import wire

_FIELDS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
           "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass",
           "SpeculationIndirectBranch", "THP_enabled")  # fmt: skip
# Restrictions that say how many they are, but not which; see `_are_of_the_container`.
_NUMBERS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time",
               "time_for_children", "user", "uts")  # fmt: skip
# Linux 6.5; not in the module socket.
_SO_PEERPIDFD = 77


def rights_of(pid: int | str = "self") -> dict[str, object]:
    """Return what a process may do, as named values that two processes can be compared by.

    Args:
        pid: its process id, or "self".

    Raises:
        OSError: it has ended, or this process may not look at it.
    """
    status = read_status(pid)
    found: dict[str, object] = {field: status.get(field) for field in _FIELDS}
    for name in _NAMESPACES:
        try:
            found[name] = os.readlink(f"/proc/{pid}/ns/{name}")
        except FileNotFoundError:  # a kernel without it; a process that has ended fails above
            continue
    root = os.stat(f"/proc/{pid}/root")
    found["root directory"] = (root.st_dev, root.st_ino)
    found["label"] = said_of(pid, "attr/current")
    found["audit user"] = said_of(pid, "loginuid")
    return found


def read_status(pid: int | str = "self") -> dict[str, str]:
    """Return what the kernel says of a process, from /proc/PID/status.

    Raises:
        OSError: it has ended.
    """
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        text = file.read().decode("latin-1")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


class Peer:
    """The process at the other end of a socket, held so that its number stays its own.

    Args:
        channel: the socket, on which it has connected; owned by this, also if it raises.

    Raises:
        OSError: it has ended.
    """

    def __init__(self, channel: "wire.Socket") -> None:
        self.channel = channel
        try:
            self.pid, self.user = wire.peer_of(channel)
            try:
                # Of the very process that connected.
                self.fd = channel.getsockopt(_socket.SOL_SOCKET, _SO_PEERPIDFD)
            except OSError:
                self.fd = os.pidfd_open(self.pid)
        except OSError:
            channel.close()
            raise
        os.set_inheritable(self.fd, False)

    def close(self) -> None:
        """Part from it."""
        self.channel.close()
        os.close(self.fd)

    def how_it_differs(self, own: dict[str, object]) -> str:
        """Say why it may not do what this process may do, and no less; empty if it may.

        Args:
            own: `rights_of` this process.
        """
        if self.user != os.geteuid():
            return "it is another user's"
        try:
            found = rights_of(self.pid)
        except OSError as exc:
            return f"what it may do cannot be read: {exc}"
        if has_ended(self.fd):  # what was read may be of another process with its number
            return "it has ended"
        for name, wanted in own.items():
            if found.get(name) != wanted:
                return f"it differs from the template in {name}"
        if not _are_of_the_container(found):
            return "it has a filter of system calls of its own, or no_new_privs"
        return ""


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, by a signal or a debugger."""
    try:
        return read_status(pid)["State"].startswith(("T", "t"))
    except OSError:
        return False


def has_ended(pidfd: int) -> bool:
    """Tell whether a process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def said_of(pid: int | str, name: str) -> str | None:
    """Return what the kernel says of a process in a file of /proc; None if it says nothing."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:  # it has ended, or this kernel or its security module does not say it
        return None


def _are_of_the_container(found: dict[str, object]) -> bool:
    """Tell whether restrictions that cannot be told apart are those of all processes here.

    Two filters of system calls cannot be compared, only counted; Landlock shows in no_new_privs
    only. If the first process has as many, they are the container's.
    """
    own = [found[name] for name in _NUMBERS]
    if own == ["0", "0", "0"] or own == ["0", "0", None]:
        return True
    try:
        first = read_status(1)
    except OSError:
        return False
    return own == [first.get(name) for name in _NUMBERS]
