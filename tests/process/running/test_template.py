"""Templates: how they end, whom they serve, and what they cost where the system has no room."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from running_place import Running, wait_until_gone

from shmload._host.procfs import command_of
from shmload._segments.listing import describe_user
from shmload._templates import messages

_DEADLINE_S = 60.0


@pytest.fixture
def template(running):
    """Return the process id of a template."""
    return running.start_template(["json"])


def listed(running):
    return json.loads(running.shmload("template", "ls", "--json").stdout)["templates"]


# How it ends -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_template_that_is_told_to_end_stays_until_its_last_program_has(
    running, template, start, number
):
    caller = start("import os; print('up', flush=True); print(os.getpid(), flush=True); input()")
    program = int(caller.stdout.readline())
    assert running.shmload("template", "stop").returncode == 0
    other = running.start_template(["json"])
    assert other != template
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""
    os.kill(program, number)
    assert caller.wait(_DEADLINE_S) == -number
    wait_until_gone(template)
    assert [found["pid"] for found in listed(running)] == [other]


def test_template_whose_folder_was_removed_leaves_the_next_one_alone(running, template):
    shutil.rmtree(running.folder / "shmload")
    other = running.start_template(["json"])
    assert other != template
    os.kill(template, signal.SIGTERM)
    wait_until_gone(template)
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""


def test_program_of_a_template_is_called_by_its_command(template):
    assert describe_user(template, command_of(template)).program == "shmload run"


_DEAF = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM])
os.environ.pop("LC_CTYPE", None)  # which Python itself may have set
os.execv(sys.executable, [sys.executable, "-m", "shmload", *sys.argv[1:]])
"""


def test_signals_of_the_first_caller_are_not_those_of_the_template(place):
    """It would not learn of the end of its programs, nor be told to end."""
    place.environment["SHMLOAD_RUN_IMPORTS"] = "json.tool"
    place.run([sys.executable, "-c", _DEAF, "run", "-c", "pass"], check=True)
    (template,) = place.wait_for_templates(
        lambda found: [each.state for each in found] == ["ready"]
    )
    ended = place.shmload("run", "-v", "-c", "import sys; sys.exit(5)")
    assert (ended.returncode, ended.stderr) == (5, "")
    os.kill(template.pid, signal.SIGTERM)
    wait_until_gone(template.pid)


# What makes it unfit -------------------------------------------------------------------------

_UNFIT = {
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), "
                "daemon=True).start()", "an import has left threads running"),
    "crashes": ("import os; os.abort()", "has ended while it imported"),
    "memory": ("import mmap; SHARED = mmap.mmap(-1, 4096)", "memory that all programs"),
    "connection": ("import socket; PAIR = socket.socketpair()", "socket that all programs"),
    "raises": ("raise ValueError('no, thanks')", "ValueError: no, thanks"),
}  # fmt: skip


@pytest.fixture
def place():
    """A place for templates of its own, where packages can be installed in `site-packages`."""
    opened = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    opened.packages = opened.folder / "site-packages"
    opened.packages.mkdir()
    opened.environment["PYTHONPATH"] = str(opened.packages)
    opened.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    yield opened
    opened.shmload("template", "stop")
    opened.close()


@pytest.mark.parametrize("name", _UNFIT)
def test_module_that_makes_a_template_unfit_is_said(place, name):
    code, why = _UNFIT[name]
    (place.packages / f"{name}.py").write_text(code)
    place.environment["SHMLOAD_RUN_IMPORTS"] = f"json.tool,{name}"
    warm = place.shmload("template", "warm")
    assert warm.returncode == 1
    assert why in warm.stderr
    ended = place.shmload("run", "-v", "-c", "print(1)")
    assert ended.stdout == "1\n"
    assert why in ended.stderr


# Whom it serves ----------------------------------------------------------------------------------

# A process that calls a template, whatever it may do itself.
_LIAR = """
import ctypes, os, sys
from shmload._templates import messages
folder = os.open(os.path.dirname(sys.argv[1]), os.O_PATH)
libc = ctypes.CDLL(None)
{confine}
os.fchdir(folder)
channel = messages.connect(os.path.basename(sys.argv[1]), 60)
print(messages.receive(channel).decode())
"""
_CONFINED = {
    "no_new_privs": ("libc.prctl(38, 1, 0, 0, 0)", "NoNewPrivs"),
    "capability": ("libc.prctl(24, 23, 0, 0, 0)", "CapBnd"),
    "namespace": ("libc.unshare(0x04000000)", "uts"),
    "root": ("os.chroot('/dev')", "root directory"),
}
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a right to lose")


def socket_of(running, template):
    return next(found["socket"] for found in listed(running) if found["pid"] == template)


def lie(running, template, confine):
    path = socket_of(running, template)
    return running.run([sys.executable, "-c", _LIAR.format(confine=confine), path])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "no_new_privs" else _needs_root) for name in _CONFINED],
)
def test_confined_process_gets_no_template_outside(running, template, name):
    confine, field = _CONFINED[name]
    ended = lie(running, template, confine)
    assert f"it differs from the template in {field}" in ended.stdout, ended.stderr
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""


@_needs_root
def test_another_priority_has_a_template_of_its_own(running):
    code = "from shmload._templates import identity; print(identity.key_of({}))"
    asked = [["chrt", "-f", priority, sys.executable, "-c", code] for priority in ("10", "20")]
    one, other = (running.run(each, check=True).stdout for each in asked)
    assert one != other


_LOSES_DEV = """
import os, subprocess, time
from shmload._templates import look
subprocess.run(["mount", "-t", "tmpfs", "none", "/dev"], check=True)
while os.getppid() in [found.pid for found in look.templates()]:
    time.sleep(0.1)
"""


@pytest.mark.slow
@_needs_root
@pytest.mark.usefixtures("template")
def test_template_that_cannot_go_on_tells_of_its_last_programs(running):
    """It looks at /dev/shm every five seconds."""
    both = '"$0" -m shmload template warm >&2 && exec "$0" -m shmload run -v -c "$1"'
    ended = running.run(["unshare", "-m", "sh", "-c", both, sys.executable, _LOSES_DEV])
    assert ended.returncode == 0, ended.stderr
    assert "ordinary" not in ended.stderr


@_needs_root
def test_program_runs_without_proc(running):
    hide = 'mount -t tmpfs none /proc && exec "$0" -m shmload run -c "print(1)"'
    ended = running.run(["unshare", "-m", "sh", "-c", hide, sys.executable], check=True)
    assert ended.stdout == "1\n"


# What it costs -----------------------------------------------------------------------------------


def test_connection_that_says_nothing_delays_no_program(running, template):
    path = socket_of(running, template)
    silent = [messages.connect(path, _DEADLINE_S) for _ in range(5)]
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""
    for channel in silent:
        channel.close()


@pytest.mark.parametrize("packet", [b"", b"x", b"{}", b"{'program': 1}", b"(" * 9999, b"\xff"])
def test_packet_that_is_no_call_is_refused(running, template, packet):
    channel = messages.connect(socket_of(running, template), _DEADLINE_S)
    assert messages.receive(channel) == messages.HELLO
    channel.send(packet)
    assert messages.receive(channel).startswith(b"refused ")
    assert messages.receive(channel) == b"ended 0"  # the copy
    assert messages.receive(channel) == b""
    channel.close()
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""


@pytest.mark.parametrize("limit", ["-n 5", "-v 4000000", "-s 1000"])
@pytest.mark.usefixtures("template")
def test_caller_with_little_room_starts_in_the_ordinary_way(running, limit):
    ended = running.run(
        ["bash", "-c", f'ulimit {limit}; "$0" -m shmload run -v -c "print(1)"', sys.executable]
    )
    assert (ended.stdout, ended.returncode) == ("1\n", 0), ended.stderr
    assert "in the ordinary way" in ended.stderr
