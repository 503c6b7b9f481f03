"""What a template knows of its callers: nothing but what all of them have in common."""

import contextlib
import os
import re
from pathlib import Path

import pytest

_SECRET = "a-secret-of-one-caller"


def memory_of(pid):
    """Return what a process has written, and its first variables and command line."""
    found = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            range_, rights = line.split()[:2]
            if "w" not in rights:
                continue
            low, high = (int(part, 16) for part in range_.split("-"))
            memory.seek(low)
            with contextlib.suppress(OSError):
                found.append(memory.read(high - low))
    return b"".join(found)


@pytest.fixture
def template(running):
    """A template that a caller with a secret has started, and that has run a program of it."""
    running.environment["TOKEN_OF_A_CALLER"] = _SECRET
    running.start_template(["json"])
    ended = running.shmload("run", "-v", "-c", "import os; print(os.environ['TOKEN_OF_A_CALLER'])")
    assert (ended.stdout, ended.stderr) == (f"{_SECRET}\n", "")
    del running.environment["TOKEN_OF_A_CALLER"]
    (found,) = running.wait_for_templates(lambda found: not found[0].programs)
    return found.pid


def test_no_secret_of_a_caller_is_in_the_template(template):
    memory = memory_of(template)
    assert b"PATH=" in memory
    assert not re.search(_SECRET.encode(), memory)


# KEYCTL_SEARCH and add_key, in the session keyring.
_KEYS = """
import ctypes
call = ctypes.CDLL(None).syscall
print(call(250, 10, -3, b"user", b"of a caller", 0))
call(248, b"user", b"of a caller", b"secret", 6, -3)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other numbers of system calls")
@pytest.mark.usefixtures("template")
def test_no_key_of_another_caller_is_in_the_keyring_of_a_program(running):
    found = [running.shmload("run", "-v", "-c", _KEYS) for _ in range(2)]
    assert [(ended.stdout, ended.stderr) for ended in found] == [("-1\n", "")] * 2
