"""What `ps` and /proc show of a program: its own command line and first variables.

They lie in the process's memory, where the kernel was told when it was started. It can be told of
another place (prctl(2), PR_SET_MM_MAP); a kernel that refuses shows those of the template.
"""

import ctypes
from collections.abc import Sequence

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


# Where they are in /proc/self/stat, counted after the command's name.
_FIELDS = {"start_code": 23, "end_code": 24, "start_stack": 25, "start_data": 42, "end_data": 43,
           "start_brk": 44}  # fmt: skip


def show(command: Sequence[bytes], environ: bytes) -> bool:
    """Have the kernel show a command line and variables as this process's; tell whether it does.

    Args:
        command: the words of the command line.
        environ: the variables, as /proc/PID/environ has them.
    """
    arguments = b"".join(word + b"\0" for word in command)
    memory = ctypes.create_string_buffer(arguments + environ)
    start = ctypes.addressof(memory)
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_uint64
    shown = _Map(**{name: int(fields[at]) for name, at in _FIELDS.items()})
    shown.brk = libc.sbrk(0)
    shown.arg_start, shown.arg_end = start, start + len(arguments)
    shown.env_start, shown.env_end = shown.arg_end, shown.arg_end + len(environ)
    shown.exe_fd = _NO_FILE
    answer = libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(shown), ctypes.sizeof(shown), 0)
    if answer == 0:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # the kernel reads it from now on
    return bool(answer == 0)
