"""Small programs, run by `python` and by `shmload run`, end and print the same."""

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# What a template of these tests imports: quick, and of each sort (pure, C, with threads of BLAS).
_MODULES = ("json", "decimal", "numpy", "PIL.Image", "xxhash")
_TIMEOUT_S = 60.0
_PAGE = Path(__file__).parents[3] / "docs" / "run.md"
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")

# Each is a program. A name that begins with `m:` is run with -m, one with `c:` with -c; one with
# `w:` is the words of a command line.
PROGRAMS = {
    # What a program is told
    "argv": "import sys; print(sys.argv, sys.orig_argv[1:])",
    "globals": "print(sorted(globals()), __name__, __doc__, __spec__, __package__, __cached__)",
    "m:json.tool": "--help",
    "c:coding": "# coding: latin-1\nprint('\u00e9')",
    "path": "import sys; print(sys.path)",
    "flags": "import sys; print(sys.flags, sys._xoptions, sys.warnoptions, sys.executable)",
    "environ": "import os; print(sorted(os.environ.items()) == sorted(os.environb and "
    "{os.fsdecode(k): os.fsdecode(v) for k, v in os.environb.items()}.items()), len(os.environ))",
    "variable": "import os; print(os.environ['GREETING']); os.system('echo $GREETING')",
    "umask": "import os; print(oct(os.umask(0)))",
    "user": "import os; print(os.getresuid(), os.getresgid(), os.getgroups())",
    "namespaces": "import os; print([os.readlink(f'/proc/self/ns/{n}') for n in "
    "('mnt', 'net', 'pid', 'user', 'cgroup')])",
    "cgroup": "print(open('/proc/self/cgroup').read())",
    "capabilities": "print([l for l in open('/proc/self/status') if l.startswith(('Cap', 'Sec', "
    "'NoNew', 'Thread'))])",
    # Its streams and descriptors
    "streams": "import sys\nfor s in (sys.stdin, sys.stdout, sys.stderr):\n"
    "    print(s.name, s.mode, s.fileno(), s.isatty(), s.line_buffering, "
    "s.write_through, s.newlines, s.closed)",
    "command line": "print(open('/proc/self/cmdline').read().split(chr(0)))",
    "first variables": "import os; n = open('/proc/self/environ').read().split(chr(0)); "
    "print(len(n), sorted(n)[:3], os.popen('ps -o args= -p %d' % os.getpid()).read())",
    "seekable": "import sys; print([s.seekable() for s in (sys.stdin, sys.stdout, sys.stderr)])",
    "descriptors": "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd') "
    "if int(n) < 60))",
    "input": "print(input(), input())",
    "all input": "import sys; print(sys.stdin.read())",
    "unflushed": "import os, sys; sys.stdout.write('lost'); os._exit(3)",
    "flushed": "import sys; sys.stdout.write('kept'); sys.exit(3)",
    "c:error": "1 / 0",
    "closed stdout": "import sys; sys.stdout.close()",
    # Its end
    "exit": "import sys; sys.exit(7)",
    "exit none": "import sys; sys.exit()",
    "exit text": "import sys; sys.exit('words')",
    "exit negative": "import sys; sys.exit(-1)",
    "exit large": "import sys; sys.exit(257)",
    "exit object": "import sys; sys.exit([1])",
    "error": "def f(): return 1 / 0\nf()",
    "syntax error": "x = = 1",
    "null byte": "x = 1\0",
    "c:syntax error": "x = = 1",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "broken pipe": "import os, signal\nprint(signal.getsignal(signal.SIGPIPE))",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
    "atexit error": "import atexit; atexit.register(lambda: 1 / 0)",
    "excepthook": "import sys; sys.excepthook = lambda *a: print('hook', a[0]); 1 / 0",
    "full stdout": "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost')",
    "atexit of C": "import ctypes; c = ctypes.CDLL(None); c.atexit(c.fcloseall); print('end')",
    "del at the end": "import sys\nclass C:\n    def __del__(self, w=sys.stdout.write): w('gone')\n"
    "sys.kept = C()",
    "thread": "import threading; t = threading.Thread(target=print, args=('t',)); t.start()",
    "daemon": "import threading, time; threading.Thread(target=time.sleep, args=(99,), daemon=True)"
    ".start(); print('end')",
    "thread error": "import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); "
    "t.join()",
    "finalizer": "import weakref\nclass C: pass\nc = C(); weakref.finalize(c, print, 'gone')",
    "del that prints last": "class C:\n    def __init__(s): print('open')\n"
    "    def __del__(s): print('closed')\nc = C(); print('work')",
    # Frames
    "frame": "import sys; f = sys._getframe(); print(f.f_code.co_name, f.f_lineno)",
    "warn": "import warnings; warnings.warn('words'); warnings.warn('deep', stacklevel=5)",
    "source": "import inspect, sys\ndef f():\n    return 1\nprint(inspect.getsource(f))",
    "m:this_is_no_module": "",
    "pickle": "import pickle\nclass C: pass\nprint(pickle.loads(pickle.dumps(C)) is C)",
    "trace": "import sys; seen = []\nsys.settrace(lambda f, e, a: seen.append(e))\ndef g(): pass\n"
    "g(); sys.settrace(None); print(seen)",
    # Modules
    "modules": "import sys; print(sorted(sys.modules))",
    "modules of numpy": "import numpy, sys; print(sorted(sys.modules))",
    "not imported": "import sys; print('numpy' in sys.modules)\ntry:\n    numpy\n"
    "except NameError as e:\n    print(e)",
    "no such module": "import no_such_module",
    "spec": "import json, decimal; print(json.__spec__, json.__loader__, decimal.__spec__.name)",
    "reload": "import importlib, json; print(importlib.reload(json) is json)",
    "filters of numpy": "import numpy, warnings; f = warnings.filters; print(len(f), f[:3])",
    "local module": "import helper_of_test; print(helper_of_test.VALUE, helper_of_test.__file__)",
    "path changed": "import sys; sys.path.insert(0, 'lib'); import xxhash as x; print(x.__file__)",
    # State that must be new in each run
    "garbage": "import gc; print(gc.isenabled(), gc.get_threshold(), gc.garbage, gc.callbacks)",
    "main thread": "import threading; t = threading.current_thread(); print(t.name, t is "
    "threading.main_thread(), threading.active_count())",
    "handlers": "import signal; print([(int(s), signal.getsignal(s)) for s in "
    "sorted(signal.valid_signals())])",
    "mask": "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "asyncio": "import asyncio\nasync def main(): return 5\nprint(asyncio.run(main()))",
    "no children": "import os\ntry:\n    os.waitpid(-1, os.WNOHANG)\n"
    "except ChildProcessError as e:\n    print(e)",
    # Processes of its own
    "subprocess": "import subprocess as s, sys; print(s.run([sys.executable, '-c', 'import sys; "
    "print(sys.argv)', 'a'], capture_output=True).stdout)",
    "fork": "import os, sys\nif os.fork() == 0:\n    print('child', flush=True); os._exit(0)\n"
    "os.wait(); print('parent')",
    "pool": "import multiprocessing as m\ndef f(x): return x * 2\nif __name__ == '__main__':\n"
    "    with m.get_context('spawn').Pool(1) as p: print(p.map(f, [1, 2]))",
    "fork pool": "import multiprocessing as m\ndef f(x): return x * 2\nif __name__ == '__main__':\n"
    "    with m.get_context('fork').Pool(1) as p: print(p.map(f, [1, 2]))",
    "own group": "import os; os.setpgid(0, 0); print(os.getpgrp() == os.getpid())",
    "fork and exit": "import os, sys\npid = os.fork()\nif not pid:\n    sys.exit(3)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "daemon of its own": "import os\nif os.fork():\n    os._exit(0)\nos.setsid()\nprint('d')",
    "forkserver": "import multiprocessing as m\ndef f(): print(__name__, flush=True)\n"
    "if __name__ == '__main__':\n    p = m.get_context('forkserver').Process(target=f)\n"
    "    p.start(); p.join(); print(p.exitcode)",
    # How it is named
    "w:file below a dot": "./named.py one",
    "w:file with a space": "'named file.py' one",
    "w:link": "link.py",
    "w:folder": "folder one",
    "w:archive": "named.zip one",
    "w:error in a file": "./failing.py",
    "w:module that is a folder": "-m folder one",
    "w:module of a dot": "-m .named",
    "w:no code": "-c ''",
    "w:words like options": "named.py -- -v -c",
    # The last of it
    "c:exit with an object": "import sys\nclass C:\n    def __str__(self): return 'an object'\n"
    "sys.exit(C())",
    "c:exit in a thread": "import sys, threading as t\n"
    "t = t.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('main')",
    "c:order of exits": "import atexit, weakref\nclass C: pass\nc = C()\n"
    "weakref.finalize(c, print, 'finalizer')\natexit.register(print, 'first')\nimport numpy\n"
    "atexit.register(print, 'second')",
    "c:logging at the end": "import logging, sys, numpy\nh = logging.Handler()\n"
    "h.flush = lambda: print('numpy' in sys.modules)\nlogging.root.addHandler(h)",
    "c:order of globals": "class C:\n    def __init__(self, n): self.n = n\n"
    "    def __del__(self): print(self.n)\na, b, _c = map(C, 'abc')",
    "c:broken hook": "import sys\ndef hook(*a): raise ValueError('hook')\n"
    "sys.excepthook = hook\n1 / 0",
    "c:no stderr": "import sys; sys.stderr = None; 1 / 0",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(\"other\")'])",
}
_NAMED = """
import sys
print(sys.argv, sys.orig_argv[1:], sys.path[0], __file__, __spec__, __package__, __loader__)
import helper_of_test
print(helper_of_test.__file__)
"""
# Python itself says best what is wrong with the last of these.
_ORDINARY = {
    "w:folder",
    "w:archive",
    "syntax error",
    "null byte",
    "c:syntax error",
}
# What docs/run.md says of them: ps and /proc show the template's command line, and modules of the
# standard library that the libraries need are there before; the libraries come together.
_DIFFERENT = {
    "command line",
    "first variables",
    "modules",
    "modules of numpy",
    "path changed",  # its input is a pipe, so it cannot start over
}
_INPUT = b"first\nsecond\n"


@pytest.fixture(scope="module")
def environment(running):
    # No bytecode files: the first of two programs would write them, and the second read them.
    return running.environment | {"GREETING": "good day", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def folder(running):
    (running.work / "lib").mkdir()
    (running.work / "helper_of_test.py").write_text("VALUE = 5\n")
    (running.work / "lib" / "xxhash.py").write_text("")
    for name in ("named.py", "named file.py", "folder/__main__.py"):
        (running.work / name).parent.mkdir(exist_ok=True)
        (running.work / name).write_text(_NAMED)
    (running.work / "folder" / "helper_of_test.py").write_text("")
    (running.work / "link.py").symlink_to("folder/__main__.py")
    (running.work / "failing.py").write_text("def f():\n    raise ValueError(3)\nf()\n")
    with zipfile.ZipFile(running.work / "named.zip", "w") as archive:
        archive.writestr("__main__.py", _NAMED)
        archive.writestr("helper_of_test.py", "")
    return running.folder


@pytest.fixture(scope="module")
def template(running, folder, environment):
    return running.start_template(_MODULES, environment)


@pytest.fixture(scope="module")
def see(folder, environment):
    """Run a program by a command; return its exit code, its output and its errors."""

    def run(name, command, given=environment):
        sort, _, rest = name.rpartition(":")
        path = folder / "work" / "program_of_test.py"
        path.write_text(PROGRAMS[name])
        what = {
            "": [path.name, "one", "t wo"],
            "c": ["-c", PROGRAMS[name], "one"],
            "m": ["-m", rest, *PROGRAMS[name].split()],
            "w": shlex.split(PROGRAMS[name]),
        }[sort]
        ended = subprocess.run(
            [*command, *what],
            input=_INPUT,
            capture_output=True,
            cwd=folder / "work",
            env=given,
            timeout=_TIMEOUT_S,
            check=False,
        )
        out, err = (
            _ADDRESS.sub("0x", text.decode("latin-1")) for text in (ended.stdout, ended.stderr)
        )
        return ended.returncode, out, err

    return run


_RUN = [sys.executable, "-m", "shmload", "run", "-v"]


@pytest.fixture(scope="module")
def cold(running, folder, environment):
    """Variables whose template never gets ready."""
    given = environment | {"SHMLOAD_RUN_IMPORTS": "cold"}
    with running.held_back(given):
        yield given


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in _DIFFERENT])
@pytest.mark.usefixtures("template")
def test_program_sees_and_shows_the_same(see, name):
    wanted = see(name, [sys.executable])
    code, out, err = see(name, _RUN)
    if name in _ORDINARY:
        assert "in the ordinary way" in err
        err = err.partition("\n")[2]
    assert (code, out, err) == wanted


# The ordinary way is `exec` of Python: what it is told and what a process keeps over that.
_TOLD_AND_KEPT = (
    *("argv", "flags", "path", "environ", "umask", "streams", "descriptors", "input"),
    *("exit", "error", "SIGKILL", "modules", "handlers", "mask", "no children", "w:archive"),
    *("m:json.tool", "w:no code", "w:words like options", "c:syntax error"),
)


@pytest.mark.parametrize("name", _TOLD_AND_KEPT)
def test_program_in_the_ordinary_way_sees_and_shows_the_same(see, cold, name):
    wanted = see(name, [sys.executable], cold)
    code, out, err = see(name, _RUN, cold)
    said, _, err = err.partition("\n")
    assert said == "shmload run: in the ordinary way: the template is not ready yet"
    assert (code, out, err) == wanted


def test_page_says_how_many_programs_there_are():
    total = len(PROGRAMS)
    said = f"Of [{total} small programs](../tests/process/running/test_programs.py) "
    assert f"{said}{total - len(_DIFFERENT)} end the same" in _PAGE.read_text()


# Random numbers: no two programs may draw the same ------------------------------------------------

_DRAWS = {
    "random": "import random; print(random.random(), random.Random().random())",
    "numpy": "import numpy; print(numpy.random.rand(), numpy.random.default_rng().random())",
    "uuid": "import uuid; print(uuid.uuid4(), uuid.uuid1())",
    "tempfile": "import tempfile; print(tempfile.mktemp())",
    "secrets": "import secrets, os; print(secrets.token_hex(), os.urandom(8))",
    "authkey": "import multiprocessing as m; print(bytes(m.current_process().authkey))",
}


@pytest.mark.parametrize("name", _DRAWS)
@pytest.mark.usefixtures("template")
def test_no_two_programs_draw_the_same(environment, folder, name):
    drawn = [
        subprocess.run(
            [*_RUN, "-c", _DRAWS[name]],
            env=environment,
            cwd=folder / "work",
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    assert [ended.stderr for ended in drawn] == [b"", b""]
    words = [set(ended.stdout.split()) for ended in drawn]
    assert not words[0] & words[1]
