"""The ordinary way to run a program: an interpreter of its own."""

import os
import sys
from typing import Any, NoReturn

from shmload._templates import wire
from shmload._templates.kind import first_environment


def flags_of_this_process() -> list[str]:
    """Return the options with which this interpreter was started, as they were given."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return before[:-1] if before[-1:] == ["-m"] else before


def command_of(call: dict[str, Any]) -> list[bytes]:
    """Return the command that runs a call's program."""
    kind = call["kind"]
    option = {"module": [b"-m"], "code": [b"-c"]}.get(kind, [])
    texts = [*call["flags"], call["value"], *call["arguments"]]
    flags, rest = texts[: len(call["flags"])], texts[len(call["flags"]) :]
    return [
        os.fsencode(sys.executable),
        *map(wire.as_bytes, flags),
        *option,
        *map(wire.as_bytes, rest),
    ]


def run_plainly(call: dict[str, Any]) -> NoReturn:
    """Replace this process by an ordinary Python that runs the program."""
    os.execve(sys.executable, command_of(call), first_environment())
