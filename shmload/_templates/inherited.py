"""What a process inherits, as far as the kernel says it to the process itself only.

docs/run.md has the table of all that is inherited. A copy of a template has it of the template, and
a program started now would have it of its caller. So each thing is the same for both, or taken over
(`taking`), or different, and named on that page.
"""

import _ctypes  # what ctypes itself needs to import takes three times as long
import os

from shmload._templates.messages import Standing
from shmload._templates.rights import read_status, said_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
    "x86_64": {"keyctl": 250, "ioprio_set": 251, "ioprio_get": 252},
    "aarch64": {"keyctl": 219, "ioprio_set": 30, "ioprio_get": 31},
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
    """Return what must be the same, and what the kernel says of this process only to itself."""
    return {name: read() for name, read in _SAID.items()}


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


_SAID: "dict[str, Callable[[], object]]" = {
    "personality": lambda: said_of("self", "personality"),
    "securebits": lambda: control(_PR_GET_SECUREBITS),
    "memory-deny-write-execute": lambda: control(_PR_GET_MDWE),
    "merging of memory": lambda: control(_PR_GET_MEMORY_MERGE),
    "time stamp counter": _time_stamp_counter,
    "I/O flusher": lambda: control(_PR_GET_IO_FLUSHER),
    "policy for memory errors": lambda: control(_PR_MCE_KILL_GET),
    "memory policy": _memory_policy,
    "session keyring": _session_keyring,
}
