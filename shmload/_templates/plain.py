"""The ordinary way to run a program: an interpreter of its own."""

import os
import sys

from shmload._templates.kind import first_environment
from shmload._templates.redirecting import variables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from shmload._templates.messages import Program


SHMLOAD = """\
import sys
if not sys.flags.safe_path:
    sys.path[0] = sys.prefix
from shmload.__main__ import run
run()
"""
"""The code of the program `shmload`. Unlike `-m` it imports nothing from the current directory."""


def flags_of_this_process() -> list[str]:
    """Return the options with which this interpreter was started, as they were given."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    return before[:-1] if before[-1:] in (["-m"], ["-c"]) else before


def command_of(program: "Program") -> list[bytes]:
    """Return the command that runs a program."""
    option = {"module": [b"-m"], "code": [b"-c"]}.get(program.kind, [])
    rest = [*option, program.value, *program.arguments]
    return [os.fsencode(sys.executable), *program.flags, *rest]


def run_plainly(program: "Program", environment: "Mapping[str, str] | None" = None) -> "NoReturn":
    """Replace this process by an ordinary Python that runs the program.

    Args:
        program: what it runs.
        environment: its variables, but those of `--redirect`; None for those with which this
            process was started.
    """
    given = dict(environment or first_environment())
    given |= variables(program.redirect, given)
    os.execve(sys.executable, command_of(program), given)
