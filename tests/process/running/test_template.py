"""Templates: how they end, whom they serve, and what they cost where the system has no room."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from running_place import Running, wait_until_gone
from watching import until

from shmload._templates import messages, wire

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
    assert [(found["pid"], found["state"]) for found in listed(running)] == [(template, "draining")]
    other = running.start_template(["json"])
    assert other != template
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""
    os.kill(program, number)
    assert caller.wait(_DEADLINE_S) == -number
    wait_until_gone(template)
    assert [found["pid"] for found in listed(running)] == [other]


def test_template_ends_after_sigterm(template):
    os.kill(template, signal.SIGTERM)
    wait_until_gone(template)


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15),
    reason="the kernel tells a parent only how a process has ended",
)
def test_death_by_signal_is_told_without_the_template(template, start):
    caller = start()
    os.kill(template, signal.SIGKILL)
    wait_until_gone(template)
    caller.send_signal(signal.SIGTERM)
    assert caller.wait(_DEADLINE_S) == -signal.SIGTERM


@pytest.mark.slow
def test_service_holds_a_template_ready(running, template):
    """It starts one where there is none, with the imports of the last one."""
    service = subprocess.Popen(
        [sys.executable, "-m", "shmload", "serve", "--template", "default"],
        cwd=running.work,
        env=running.environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        os.kill(template, signal.SIGKILL)
        wait_until_gone(template)
        found = running.wait_for_templates(bool)
        assert [each["pid"] for each in listed(running)] == [found[0].pid]
        # In a new environment the first imports write bytecode, and it becomes another one.
        until(lambda: not running.shmload("run", "-v", "-c", "pass").stderr)
        status = json.loads(running.shmload("status", "--json").stdout)
        assert found[0].pid in [each["pid"] for each in status["templates"]]
        assert f"process {found[0].pid}, ready" in running.shmload("status").stdout
    finally:
        service.terminate()
        service.wait(_DEADLINE_S)


# What makes it unfit -------------------------------------------------------------------------

_UNFIT = {
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), "
                "daemon=True).start()", "has left threads running"),
    "crashes": ("import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()",
                "it ends the process: last words"),
    "starts": ("import subprocess; subprocess.Popen(['sleep', '999'])", "has started a process"),
    "raises": ("raise ValueError('no, thanks')", "no, thanks"),
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


def test_template_that_still_imports_is_shown(place):
    gate = (place.folder / "gate").open("w")
    fcntl.flock(gate, fcntl.LOCK_EX)
    waits = f"import fcntl; fcntl.flock(open({gate.name!r}), fcntl.LOCK_SH)"
    (place.packages / "slow.py").write_text(waits)
    command = [sys.executable, "-m", "shmload", "template", "warm", "--import=slow"]
    warm = subprocess.Popen(command, env=place.environment, cwd=place.work)

    def ls(*options):
        return place.shmload("template", "ls", *options).stdout

    until(lambda: json.loads(ls("--json"))["starting"] == 1)
    assert ls() == "1 template starting; ready in some seconds\n"
    said = place.shmload("template", "stop").stdout
    assert said == "ended 0 templates\n1 template still starting: stop again in some seconds\n"
    gate.close()
    assert warm.wait(_DEADLINE_S) == 0
    found = json.loads(ls("--json"))
    assert (len(found["templates"]), found["starting"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", _UNFIT)
def test_module_that_no_template_can_import_is_left_out_by_name(place, name):
    (place.packages / f"{name}.py").write_text(_UNFIT[name][0])
    warm = place.shmload("template", "warm", "--import=json.tool", f"--import={name}")
    assert warm.returncode == 1
    assert f"left out: {name}: " in warm.stderr
    assert _UNFIT[name][1] in warm.stderr
    assert f"left out: {name}: " in place.shmload("template", "ls").stdout
    ended = place.shmload("run", "-v", "-c", "import json.tool")
    assert (ended.returncode, ended.stderr) == (0, "")


# Whom it serves ----------------------------------------------------------------------------------

# A process that calls a template, whatever it may do itself.
_LIAR = """
import ctypes, os, sys
from shmload._templates import messages, wire
from shmload._templates.messages import Call, Program, Refused, SendFds
from shmload._templates.kind import own_standing
program = Program("code", b"pass", [], [], "")
call = Call(program, [], [0, 1, 2], 0, own_standing(), 0)
channel = wire.open_socket()
folder = os.open(os.path.dirname(sys.argv[1]), os.O_PATH)
libc = ctypes.CDLL(None)
{confine}
os.fchdir(folder)
channel.connect(os.path.basename(sys.argv[1]))
messages.send(channel, call)
print(messages.receive(channel, Refused, SendFds)[0])
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
    socket = socket_of(running, template)
    return running.run([sys.executable, "-c", _LIAR.format(confine=confine), socket])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "no_new_privs" else _needs_root) for name in _CONFINED],
)
def test_confined_process_gets_no_template_outside(running, template, name):
    confine, field = _CONFINED[name]
    ended = lie(running, template, confine)
    assert f"it differs from the template in {field}" in ended.stdout, ended.stderr
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""


@pytest.mark.parametrize("confine", ["unshare --mount", "setpriv --no-new-privs"])
@_needs_root
def test_process_with_other_rights_sees_a_template_and_ends_it(running, template, confine):
    """It needs the same user: what it may do otherwise matters to programs only."""
    if not shutil.which(confine.split()[0]):
        pytest.skip(f"there is no {confine}")

    def confined(*words):
        command = [*confine.split(), sys.executable, "-m", "shmload", "template", *words]
        given = {"cwd": running.work, "env": running.environment, "timeout": _DEADLINE_S}
        return subprocess.run(command, capture_output=True, check=True, text=True, **given).stdout

    found = json.loads(confined("ls", "--json"))["templates"]
    assert template in [each["pid"] for each in found]
    assert template in json.loads(confined("stop", "--json"))["stopped"]
    wait_until_gone(template)


def test_process_that_is_not_confined_is_served(running, template):
    ended = lie(running, template, "pass")
    assert ended.stdout == "SendFds()\n", ended.stderr


# What it costs -----------------------------------------------------------------------------------


def connect(socket):
    channel = wire.open_socket()
    channel.settimeout(_DEADLINE_S)
    channel.connect(socket)
    return channel


def test_connection_that_says_nothing_delays_no_program(running, template):
    socket = socket_of(running, template)
    silent = [connect(socket) for _ in range(5)]
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""
    for channel in silent:
        channel.close()


@pytest.mark.parametrize(
    "packet", [b"", b"x", b"3:", b"0:00", wire.pack([1, "Look", []]), wire.pack([7, "Go", []])]
)
def test_packet_that_is_no_message_is_left_alone(running, template, packet):
    socket = socket_of(running, template)
    channel = connect(socket)
    channel.send(packet)
    assert channel.recv(100) == b""
    channel.close()
    assert running.shmload("run", "-v", "-c", "pass").stderr == ""


@pytest.mark.slow
def test_template_without_descriptors_costs_the_ordinary_start(running, template):
    used = len(os.listdir(f"/proc/{template}/fd"))
    before = resource.prlimit(template, resource.RLIMIT_NOFILE)
    resource.prlimit(template, resource.RLIMIT_NOFILE, (used, before[1]))
    ended = running.shmload("run", "-v", "-c", "print(1)")
    assert (ended.stdout, ended.returncode) == ("1\n", 0)
    assert "in the ordinary way" in ended.stderr
    resource.prlimit(template, resource.RLIMIT_NOFILE, before)
    assert running.shmload("run", "-v", "-c", "print(2)").stdout == "2\n"
    assert template in [found["pid"] for found in listed(running)]


@pytest.mark.parametrize("limit", ["-n 5", "-v 4000000", "-s 1000"])
@pytest.mark.usefixtures("template")
def test_caller_with_little_room_starts_in_the_ordinary_way(running, limit):
    ended = running.run(
        ["bash", "-c", f'ulimit {limit}; "$0" -m shmload run -v -c "print(1)"', sys.executable]
    )
    assert (ended.stdout, ended.returncode) == ("1\n", 0), ended.stderr
    assert "in the ordinary way" in ended.stderr


@pytest.mark.slow
def test_another_limit_of_stacks_has_a_template_of_its_own(running, template):
    warm = 'ulimit -s 1000; "$0" -m shmload template warm; "$0" -m shmload run -v -c "print(1)"'
    for _ in range(2):
        ended = running.run(["bash", "-c", warm, sys.executable])
        assert ended.stdout.endswith("1\n")
        own = running.shmload("run", "-v", "-c", "print(2)")
        assert "in the ordinary way" not in ended.stderr + own.stderr
    assert template in [found["pid"] for found in listed(running)]


def test_message_of_another_version_is_named():
    ours, theirs = wire.pair()
    wire.send(ours, wire.pack([messages.VERSION + 1, "Look", []]))
    with pytest.raises(wire.NotUnderstood, match="version"):
        messages.receive(theirs, messages.Look)
    ours.close()
    theirs.close()
