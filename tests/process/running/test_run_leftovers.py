"""What the libraries leave in a process: a program finds none of it before it imports one."""

import json
import sys

import pytest

pytestmark = [pytest.mark.libraries, pytest.mark.slow, pytest.mark.timeout(300)]
# By a name, what a program finds; each line is a part that a library could have changed for good.
_LOOK = """
import asyncio, copyreg, ctypes, decimal, faulthandler, gc, json, locale, logging
import mimetypes, multiprocessing, os, random, resource, signal, socket, sys, tempfile
import threading, time, tracemalloc, warnings
libc = ctypes.CDLL(None)
said = {
    "words": [sys.argv, sys.orig_argv[1:], sys.path, os.getcwd(), sys.flags, sys.warnoptions],
    "environ": sorted(os.environ.items()),
    "umask": os.umask(0o22),
    "modules": sorted(n for n in sys.modules if n.partition(".")[0] not in sys.stdlib_module_names),
    "finders": [str(getattr(f, "__name__", type(f).__name__)) for f in sys.meta_path],
    "path hooks": [str(h).partition(" at ")[0] for h in sys.path_hooks],
    "filters": [repr(f) for f in warnings.filters],
    "hooks": [f"{h.__module__}.{h.__qualname__}" for h in (sys.excepthook, sys.displayhook,
              sys.breakpointhook, sys.unraisablehook, threading.excepthook, warnings.showwarning)],
    "tracing": [sys.gettrace(), sys.getprofile(), tracemalloc.is_tracing(),
                faulthandler.is_enabled(), threading.stack_size()],
    "limits of Python": [sys.getrecursionlimit(), sys.getswitchinterval(),
                         sys.get_int_max_str_digits(), gc.get_threshold(), gc.get_debug(),
                         gc.isenabled(), len(gc.callbacks)],
    "threads": [t.name for t in threading.enumerate()] + os.listdir("/proc/self/task")[1:],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) < 60),
    "handlers": [str(signal.getsignal(s)).partition(" at ")[0] for s in range(1, 32)],
    "mask": [list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.getitimer(0),
             signal.set_wakeup_fd(-1)],
    "limits": [resource.getrlimit(n) for n in range(16)],
    "process": [os.nice(0), sorted(os.sched_getaffinity(0)), libc.prctl(3, 0, 0, 0, 0),
                libc.prctl(30, 0, 0, 0, 0), open("/proc/self/oom_score_adj").read()],
    "locale": [locale.setlocale(n) for n in range(6)] + [locale.getencoding()],
    "time": [time.tzname, time.timezone],
    "logging": [logging.root.level, str(logging.root.handlers), logging.root.manager.disable,
                str(logging.getLoggerClass()), logging.raiseExceptions, logging.lastResort.level],
    "decimal": str(decimal.getcontext()) + str(decimal.DefaultContext),
    "socket": socket.getdefaulttimeout(),
    "temporary": tempfile.tempdir,
    "types": mimetypes.inited,
    "starts": multiprocessing.get_start_method(allow_none=True),
    "policy": type(asyncio.get_event_loop_policy()).__name__,
    "pickled": sorted(str(each) for each in copyreg.dispatch_table),
    "rounding": libc.fegetround() if hasattr(libc, "fegetround") else None,
    "floats": [1e-310 / 10, 0.1 + 0.2],
}
print(json.dumps(said, default=str))
print(random.random(), random.getstate()[1][:3], multiprocessing.current_process().authkey.hex())
"""


def test_program_finds_nothing_of_the_template(running):
    running.start_template()
    path = running.work / "look.py"
    path.write_text(_LOOK)
    wanted = running.run([sys.executable, path, "a word"], check=True).stdout.splitlines()
    seen, again = (
        running.shmload("run", "-v", str(path), "a word").stdout.splitlines() for _ in range(2)
    )
    python, program = json.loads(wanted[0]), json.loads(seen[0])
    # Named in docs/run.md.
    assert program["finders"].pop(0) == "Hidden"
    assert {name for name in python if python[name] != program[name]} == set()
    assert seen[0] == again[0]
    assert len({wanted[1], seen[1], again[1]}) == 3
