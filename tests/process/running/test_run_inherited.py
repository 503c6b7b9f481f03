"""What a process inherits: a program of a template has its caller's, row by row of the table."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_PAGE, _, _INHERITED = (
    (Path(__file__).parents[3] / "docs" / "run.md")
    .read_text()
    .partition("\n## What a program inherits\n")
)
SAME, TAKEN, NAMED = (
    row.split("|")[2].strip().split("; ")
    for row in _INHERITED.splitlines()
    if row.startswith(("| as its caller", "| different"))
)
_DEADLINE_S = 60.0
_PRELUDE = """
import ctypes, os, resource, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    answer = getattr(libc, name)(*arguments)
    if answer < 0:
        print("refused:", os.strerror(ctypes.get_errno()))
        sys.exit(77)
    return answer
def status(*names):
    return [line for line in open("/proc/self/status") if line.split(":")[0] in names]
def keyctl(*arguments):
    return call("syscall", {"x86_64": 250, "aarch64": 219}[os.uname().machine], *arguments)
def ioprio(*arguments):
    first = {"x86_64": 251, "aarch64": 30}[os.uname().machine]
    return call("syscall", first + (len(arguments) == 2), *arguments)
"""
# By the row: what a caller does before it is `shmload run` or `python`, and what the program shows.
_LOOK_AT_STATUS = "print(status({!r}))"
CASES = {
    "user and groups": ("os.setgroups([1234])", "print(os.getresuid(), os.getgroups())"),
    "capabilities": ("call('prctl', 24, 23, 0, 0, 0)", "print(status('CapBnd', 'CapEff'))"),
    "no_new_privs": ("call('prctl', 38, 1, 0, 0, 0)", _LOOK_AT_STATUS.format("NoNewPrivs")),
    "filters of system calls": (
        # Allows all: BPF_RET | SECCOMP_RET_ALLOW.
        "class F(ctypes.Structure): _fields_ = [('c', ctypes.c_uint16), ('t', ctypes.c_uint8), "
        "('f', ctypes.c_uint8), ('k', ctypes.c_uint32)]\n"
        "class P(ctypes.Structure): _fields_ = [('n', ctypes.c_ushort), ('f', ctypes.c_void_p)]\n"
        "f = F(6, 0, 0, 0x7fff0000); p = P(1, ctypes.addressof(f))\n"
        "call('prctl', 22, 2, ctypes.byref(p), 0, 0)", _LOOK_AT_STATUS.format("Seccomp_filters")),
    "speculation control": ("call('prctl', 53, 0, 4, 0, 0)",
                            _LOOK_AT_STATUS.format("Speculation_Store_Bypass")),
    "transparent huge pages": ("call('prctl', 41, 1, 0, 0, 0)", "print(call('prctl', 42, 0, 0, 0, "
                               "0))"),
    "namespaces": None,
    "root directory": None,
    "label of a security module": None,
    "audit user": ("open('/proc/self/loginuid', 'w').write('12')",
                   "print(open('/proc/self/loginuid').read())"),
    "personality": ("call('personality', 0x0040000)",
                    "print(open('/proc/self/personality').read())"),
    "securebits": ("call('prctl', 28, 1 << 2, 0, 0, 0)", "print(call('prctl', 27, 0, 0, 0, 0))"),
    "memory-deny-write-execute": ("call('prctl', 65, 1, 0, 0, 0)",
                                  "print(call('prctl', 66, 0, 0, 0, 0))"),
    "merging of memory": ("call('prctl', 67, 1, 0, 0, 0)", "print(call('prctl', 68, 0, 0, 0, 0))"),
    "time stamp counter": None,
    "I/O flusher": ("call('prctl', 57, 1, 0, 0, 0)", "print(call('prctl', 58, 0, 0, 0, 0))"),
    "policy for memory errors": ("call('prctl', 33, 1, 1, 0, 0)",
                                 "print(call('prctl', 34, 0, 0, 0, 0))"),
    "memory policy": (
        "mask = ctypes.c_ulong(1)\n"
        "n = {'x86_64': 238, 'aarch64': 237}[os.uname().machine]\n"
        "call('syscall', n, 2, ctypes.byref(mask), 64)",
        "print(open('/proc/self/numa_maps').readline().split()[1])"),
    "session keyring": (
        "keyctl(1, None); call('syscall', {'x86_64': 248, 'aarch64': 217}[os.uname().machine], "
        "b'user', b'mine', b'word', 4, -3)",
        "b = ctypes.create_string_buffer(99); n = keyctl(11, keyctl(10, -3, b'user', b'mine', 0), "
        "b, 99); print(b.raw[:n])"),
    "control group": None,
    "cores": ("os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
              "print(os.sched_getaffinity(0))"),
    "scheduling": ("os.nice(3); os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
                   "print(os.nice(0), os.sched_getscheduler(0))"),
    "core scheduling": ("call('prctl', 62, 1, 0, 0, 0)",
                        "c = ctypes.c_uint64(); call('prctl', 62, 0, 0, 0, ctypes.byref(c)); "
                        "print(bool(c.value))"),
    "I/O priority": ("ioprio(1, 0, 2 << 13 | 6)", "print(ioprio(1, 0))"),
    "oom_score_adj": ("open('/proc/self/oom_score_adj', 'w').write('321')",
                      "print(open('/proc/self/oom_score_adj').read())"),
    "coredump_filter": ("open('/proc/self/coredump_filter', 'w').write('0x11')",
                        "print(open('/proc/self/coredump_filter').read())"),
    "timer slack": ("open('/proc/self/timerslack_ns', 'w').write('77777')",
                    "print(open('/proc/self/timerslack_ns').read())"),
    "limits": ("resource.setrlimit(resource.RLIMIT_NOFILE, (222, 333))",
               "print([resource.getrlimit(n) for n in range(16)])"),
    "child subreaper": ("call('prctl', 36, 1, 0, 0, 0)",
                        "c = ctypes.c_int(); call('prctl', 37, ctypes.byref(c), 0, 0, 0); "
                        "print(c.value)"),
    "umask": ("os.umask(0o27)", "print(os.umask(0))"),
    "ignored signals": ("signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
                        _LOOK_AT_STATUS.format("SigIgn")),
    "blocked signals": ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
                        _LOOK_AT_STATUS.format("SigBlk")),
    "directory": ("os.chdir('/usr')", "print(os.getcwd())"),
    "descriptors": ("os.set_inheritable(os.open('/dev/zero', 0), True)",
                    "print([n for n in os.listdir('/proc/self/fd') if int(n) < 60 and "
                    "os.path.exists(f'/proc/self/fd/{n}')])"),
    "first variables": ("os.environ['OF_THE_CALLER'] = 'x'",
                        "print(b'OF_THE_CALLER=x' in open('/proc/self/environ', 'rb').read())"),
}  # fmt: skip
_REASONS = {
    "namespaces": "tests/process/running/test_template.py asks it of a confined process",
    "root directory": "tests/process/running/test_template.py asks it of a confined process",
    "label of a security module": "needs a policy of the machine",
    "time stamp counter": "the C library itself reads it",
    "control group": "needs a group of the machine",
}
_REFUSED = {"no_new_privs", "filters of system calls"}
"""A process that has more of these than its container is served by no template."""
# What is the same for a template is inherited by the one that a caller starts.
_WITH_ITS_OWN_TEMPLATE = """
import subprocess, sys
shmload = [sys.executable, "-m", "shmload"]
warm = [*shmload, "template", "warm", "--import=json"]
subprocess.run(warm, check=True, stdout=subprocess.DEVNULL)
sys.exit(subprocess.run([*shmload, "run", "-v", "-c", sys.argv[1]]).returncode)
"""


def test_each_row_has_a_case():
    assert CASES.keys() == {*SAME, *TAKEN}
    assert {name for name, case in CASES.items() if case is None} == _REASONS.keys()


def test_page_names_each_row_that_stays_different():
    for name in NAMED:
        assert name in _PAGE.lower(), name


@pytest.fixture(scope="module")
def template(running):
    return running.start_template(["json"])


def as_caller(running, before, *words):
    """Run Python with these words, in a process of which something is set."""
    # In the locale C, Python has set LC_CTYPE: the words would run in another locale than its own.
    before = f"os.environ.pop('LC_CTYPE', None)\n{before}"
    code = f"{_PRELUDE}\n{before}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return running.run([sys.executable, "-c", code, *words])


@pytest.mark.parametrize("row", CASES)
@pytest.mark.usefixtures("template")
def test_program_has_what_its_caller_has(running, row):
    if CASES[row] is None:
        pytest.skip(_REASONS[row])
    before, look = CASES[row]
    look = _PRELUDE + look
    wanted = as_caller(running, before, "-c", look)
    if wanted.returncode == 77 or "PermissionError" in wanted.stderr:
        pytest.skip(wanted.stdout or wanted.stderr.splitlines()[-1])
    assert wanted.returncode == 0, wanted.stderr
    without = running.run([sys.executable, "-c", look])
    assert without.stdout != wanted.stdout  # the case sets something
    run = ("-m", "shmload", "run", "-v", "-c", look)
    if row in SAME:
        run = ("-c", _WITH_ITS_OWN_TEMPLATE, look)
    seen = as_caller(running, before, *run)
    assert seen.stdout == wanted.stdout, seen.stderr
    assert ("a filter of system calls of its own" in seen.stderr) == (row in _REFUSED)
    assert seen.stderr == "" or row in _REFUSED
    assert running.shmload("run", "-v", "-c", look).stdout == without.stdout
