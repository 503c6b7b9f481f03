"""What makes two programs need different templates, and what a process inherits of the kernel.

A template serves a program only if everything in `key_of_this_process` is the same for both: the
interpreter and its flags, the packages, the variables that libraries read on import, the cores, and
what the kernel lets the process do.

docs/run.md has the table of all that is inherited. A copy of a template has it of the template, and
a program started now would have it of its caller. So each thing is the same for both, or taken over
(`taking`), or different, and named on that page.
"""

import _ctypes  # what ctypes itself needs to import takes three times as long
import contextlib
import os
import resource
import select
import sys

from shmload._templates import place
from shmload._templates.messages import VERSION, Standing
from shmload._templates.variables import first_environment, read_on_import
from shmload._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# prctl(2): requests that need no more than their number.
_PR_GET_SECUREBITS, _PR_MCE_KILL_GET, _PR_GET_IO_FLUSHER = 27, 34, 58
_PR_GET_MDWE, _PR_GET_MEMORY_MERGE = 66, 68
# Those that write somewhere; the last one wants to know what, and of which process.
_PR_GET_TSC, _PR_GET_CHILD_SUBREAPER, _PR_SCHED_CORE = 25, 37, 62
# keyctl(2)
_GET_KEYRING_ID, _READ, _JOIN_SESSION, _LINK = 0, 11, 1, 8
_SESSION, _USER = -3, -4
_SERIAL_NBYTES = 4
_MAX_KEYS = 64
_COOKIE_NBYTES = 8

_CGROUP = "shmload-templates"
# What a process may do, of /proc/PID/status and /proc/PID/ns.
_FIELDS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
           "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass",
           "SpeculationIndirectBranch", "THP_enabled")  # fmt: skip
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time",
               "time_for_children", "user", "uts")  # fmt: skip

_NUMBERS = {
    "x86_64": {"keyctl": 250, "ioprio_set": 251, "ioprio_get": 252},
    "aarch64": {"keyctl": 219, "ioprio_set": 30, "ioprio_get": 31},
}  # fmt: skip
_LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # all that is loaded
_PRCTL, _SYSCALL = (_ctypes.dlsym(_LIBC, name) for name in ("prctl", "syscall"))


def key_of_this_process(name: str, environment: "dict[str, str] | None" = None) -> str:
    """Return the key of the template of a name for this process's programs.

    It stands for everything that the template must have in common with it.

    Args:
        name: of the template, as the user gave it.
        environment: the variables that imports shall find; None for this process's first ones.
    """
    session, terminal = session_and_terminal()
    facts = (
        (__version__, VERSION, name),
        _interpreter(),
        sorted(read_on_import(environment or first_environment()).items()),
        # Libraries choose the size of their thread pools when they are loaded.
        sorted(os.sched_getaffinity(0)),
        # Of the first thread the kernel sets it up at exec, and never again.
        resource.getrlimit(resource.RLIMIT_STACK),
        sorted((name, read()) for name, read in _SAID.items()),
        None if can_enter_cgroup() else said_of("self", "cgroup"),
        rights_of(),
        session if terminal else None,
    )
    return place.key_of(repr(facts))


def _interpreter() -> tuple[object, ...]:
    """Return what this interpreter is, with its flags and packages."""
    entries = sys.path if sys.flags.safe_path else sys.path[1:]
    is_unbuffered = getattr(sys.stdout, "write_through", None)  # no flag says so
    return (
        (sys.executable, sys.prefix, sys.version),
        (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions, is_unbuffered),
        [(entry, _installed(entry)) for entry in entries],
    )


def _installed(folder: str) -> int | None:
    """Return when packages were last installed in a directory of them; None for another one.

    A template looks by itself whether the files that it has imported are unchanged.
    """
    if not folder.endswith(("site-packages", "dist-packages")):
        return None
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None


def flags_of_this_process() -> list[str]:
    """Return the options with which this interpreter was started, as they were given."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return before[:-1] if before[-1:] in (["-m"], ["-c"]) else before


def session_and_terminal() -> tuple[int, int]:
    """Return this process's session, and its controlling terminal's number; 0 for none."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[3]), int(fields[4])


# What the kernel says of any process -------------------------------------------------------------


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


# What the kernel says of this process only to itself --------------------------------------------


def control(request: int, *arguments: "int | bytes") -> int:
    """Read or set what prctl(2) lists, of this process; return -1 where the kernel refuses."""
    rest = (*arguments, 0, 0, 0, 0)[:4]
    return int(_ctypes.call_function(_PRCTL, (request, *rest)))


def system_call(name: str, *arguments: "int | bytes | None") -> int:
    """Make a system call that libraries of C lack; return -1 where the kernel refuses."""
    number = _NUMBERS.get(os.uname().machine, {}).get(name)
    return -1 if number is None else int(_ctypes.call_function(_SYSCALL, (number, *arguments)))


def _written_by(request: int, *arguments: int) -> bytes:
    """Return what a request of prctl(2) writes where its last argument says."""
    found = bytes(_COOKIE_NBYTES)  # a new object, so the kernel may write there
    control(request, *arguments, found)
    return found


def own_standing() -> Standing:
    """Return what only this process can say of its standing."""
    status = read_status()
    return Standing(
        blocked=int(status["SigBlk"], 16),
        ignored=int(status["SigIgn"], 16),
        timer_slack=said_of("self", "timerslack_ns") or "",
        umask=int(status["Umask"], 8),
        is_subreaper=int(is_subreaper()),
    )


def is_subreaper() -> bool:
    """Tell whether orphans below this process become its children."""
    return any(_written_by(_PR_GET_CHILD_SUBREAPER))


def renew_session_keyring() -> None:
    """Give this process a session keyring of its own, if the one that it has is as any new one.

    Templates serve callers with such a keyring alike, and none may see the keys of another.
    """
    found = _session_keyring()
    if found in (_PLAIN, _EMPTY):
        system_call("keyctl", _JOIN_SESSION, None)
        if found == _PLAIN:
            system_call("keyctl", _LINK, _USER, _SESSION)


_PLAIN, _EMPTY = "with the user's keyring", "empty"


def _session_keyring() -> "int | str | None":
    """Return the session keyring's number, or what is in it if that is nothing of its own."""
    keyring = system_call("keyctl", _GET_KEYRING_ID, _SESSION, 0)
    content = bytes(_SERIAL_NBYTES * _MAX_KEYS)  # a new object, so the kernel may write there
    nbytes = system_call("keyctl", _READ, keyring, content, len(content)) if keyring > 0 else -1
    if nbytes < 0:
        return keyring if keyring > 0 else None
    if nbytes == 0:
        return _EMPTY
    user = system_call("keyctl", _GET_KEYRING_ID, _USER, 0)
    first = int.from_bytes(content[:_SERIAL_NBYTES], "little")
    return _PLAIN if nbytes == _SERIAL_NBYTES and first == user else keyring


def _memory_policy() -> "str | None":
    """Return the policy of what has none of its own; numa_maps(5) shows it for each range."""
    try:
        with open("/proc/self/numa_maps", "rb", buffering=0) as file:
            return file.read(1 << 12).split()[1].decode("latin-1")
    except (OSError, IndexError):
        return None


_SAID: "dict[str, Callable[[], object]]" = {
    "personality": lambda: said_of("self", "personality"),
    "securebits": lambda: control(_PR_GET_SECUREBITS),
    "memory-deny-write-execute": lambda: control(_PR_GET_MDWE),
    "merging of memory": lambda: control(_PR_GET_MEMORY_MERGE),
    "time stamp counter": lambda: _written_by(_PR_GET_TSC),
    "core scheduling": lambda: _written_by(_PR_SCHED_CORE, 0, 0, 0),
    "I/O flusher": lambda: control(_PR_GET_IO_FLUSHER),
    "policy for memory errors": lambda: control(_PR_MCE_KILL_GET),
    "memory policy": _memory_policy,
    "session keyring": _session_keyring,
}


# Control groups ----------------------------------------------------------------------------------
#
# Where the user may move processes (a delegated part of the tree), a template moves to a group of
# its own, beside its caller's, so that it outlives the programs there. Elsewhere it stays, since it
# would escape limits and clean-up that are not its own to lift, and ends once it is alone in the
# group: nothing then keeps that from going.


def leave_or_find() -> str | None:
    """Move this process to a group of its own; return the group's directory if it stays.

    Returns:
        None if it has moved, or is in the root of the tree.
    """
    for line, folder in cgroup_folders(said_of("self", "cgroup") or "").items():
        if line.rpartition(":")[2] != "/" and os.path.exists(f"{folder}/cgroup.procs"):
            return None if line.startswith("0::") and _move_beside(folder) else folder
    return None


def _move_beside(folder: str) -> bool:
    """Move this process to a group beside this one, where this user may; tell whether it has."""
    if os.geteuid() == 0:
        return False  # it could move anywhere, but the tree has another keeper
    target = f"{os.path.dirname(folder)}/{_CGROUP}"
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
