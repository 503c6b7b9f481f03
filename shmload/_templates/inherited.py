"""The table of what a process inherits.

A copy of a template has all of this of the template, and a program started now would have it of its
caller. So each row is the same for both, or taken over, or named in docs/run.md. What exec resets
(timers, locks of memory, dumpable, handlers of signals) is no row: a new program has none of it.

    same     a template serves those callers only that have the same; others start one of their
             own, which inherits it. The kernel says it of any process, or of oneself only
    taken    the program is given its caller's; the kernel says it, or the caller itself
    named    docs/run.md names it
"""

import _ctypes  # what ctypes itself needs to import takes three times as long
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SAME, TAKEN, NAMED = "same", "taken", "named"
TABLE = {
    "user and groups": SAME,
    "capabilities": SAME,
    "no_new_privs": SAME,
    "filters of system calls": SAME,
    "speculation control": SAME,
    "transparent huge pages": SAME,
    "namespaces": SAME,
    "root directory": SAME,
    "label of a security module": SAME,
    "audit user": SAME,
    "personality": SAME,
    "securebits": SAME,
    "memory-deny-write-execute": SAME,
    "merging of memory": SAME,
    "time stamp counter": SAME,
    "I/O flusher": SAME,
    "policy for memory errors": SAME,
    "memory policy": SAME,
    "session keyring": SAME,
    "cores": SAME,
    "control group": TAKEN,
    "scheduling": TAKEN,
    "core scheduling": TAKEN,
    "I/O priority": TAKEN,
    "oom_score_adj": TAKEN,
    "coredump_filter": TAKEN,
    "timer slack": TAKEN,
    "limits": TAKEN,
    "child subreaper": TAKEN,
    "umask": TAKEN,
    "ignored signals": TAKEN,
    "blocked signals": TAKEN,
    "directory": TAKEN,
    "descriptors": TAKEN,
    "first variables": TAKEN,
    "parent": NAMED,
    "session and process group": NAMED,
    "audit session": NAMED,
    "parent-death signal": NAMED,
    "autogroup": NAMED,
    "timers": NAMED,
}
"""Each thing that is inherited, and its way."""

# prctl(2): requests that need no more than their number.
_PR_GET_TSC, _PR_GET_SECUREBITS, _PR_MCE_KILL_GET = 25, 27, 34
_PR_GET_IO_FLUSHER, _PR_GET_MDWE, _PR_GET_MEMORY_MERGE = 58, 66, 68
_PR_GET_CHILD_SUBREAPER = 37
# keyctl(2)
_GET_KEYRING_ID, _READ, _JOIN_SESSION, _LINK = 0, 11, 1, 8
_SESSION, _USER = -3, -4
_SERIAL_NBYTES = 4
_MAX_KEYS = 64

_NUMBERS = {
    "x86_64": {"keyctl": 250, "ioprio_set": 251, "ioprio_get": 252, "sched_setattr": 314,
               "sched_getattr": 315},
    "aarch64": {"keyctl": 219, "ioprio_set": 30, "ioprio_get": 31, "sched_setattr": 274,
                "sched_getattr": 275},
}  # fmt: skip
_LIBC = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # all that is loaded
_PRCTL, _SYSCALL = (_ctypes.dlsym(_LIBC, name) for name in ("prctl", "syscall"))


def control(request: int, *arguments: "int | bytes") -> int:
    """Read or set what prctl(2) lists, of this process; return -1 where the kernel refuses."""
    rest = (*arguments, 0, 0, 0, 0)[:4]
    return int(_ctypes.call_function(_PRCTL, (request, *rest)))


def system_call(name: str, *arguments: "int | bytes | None") -> int:
    """Make a system call that libraries of C lack; return -1 where the kernel refuses."""
    number = _NUMBERS.get(os.uname().machine, {}).get(name)
    return -1 if number is None else int(_ctypes.call_function(_SYSCALL, (number, *arguments)))


def said_of_this_process() -> "dict[str, object]":
    """Return the rows that are `SAME`, and that the kernel says of this process only to itself."""
    return {name: read() for name, read in _SAID.items()}


def is_subreaper() -> bool:
    """Tell whether orphans below this process become its children."""
    found = bytes(_SERIAL_NBYTES)  # a new object, so the kernel may write there
    control(_PR_GET_CHILD_SUBREAPER, found)
    return any(found)


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


def _time_stamp_counter() -> int:
    found = bytes(_SERIAL_NBYTES)  # a new object, so the kernel may write there
    control(_PR_GET_TSC, found)
    return found[0]


def _memory_policy() -> "str | None":
    """Return the policy of what has none of its own; numa_maps(5) shows it for each range."""
    try:
        with open("/proc/self/numa_maps", "rb", buffering=0) as file:
            return file.read(1 << 12).split()[1].decode("latin-1")
    except (OSError, IndexError):
        return None


def _personality() -> "str | None":
    try:
        with open("/proc/self/personality", "rb", buffering=0) as file:
            return file.read().decode("latin-1")
    except OSError:
        return None


_SAID: "dict[str, Callable[[], object]]" = {
    "personality": _personality,
    "securebits": lambda: control(_PR_GET_SECUREBITS),
    "memory-deny-write-execute": lambda: control(_PR_GET_MDWE),
    "merging of memory": lambda: control(_PR_GET_MEMORY_MERGE),
    "time stamp counter": _time_stamp_counter,
    "I/O flusher": lambda: control(_PR_GET_IO_FLUSHER),
    "policy for memory errors": lambda: control(_PR_MCE_KILL_GET),
    "memory policy": _memory_policy,
    "session keyring": _session_keyring,
}
