"""What a template imports leaves all else as it was; what does not is left out, by name."""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from children import run_to_end
from running_place import Running

from shmload._templates.start import MODULES

pytestmark = pytest.mark.slow

_TIMEOUT_S = 100.0

# What an import does beside making its module, and what `template ls` says of it.
_CHANGES = {
    "code": ("import json\ndef dumps(*a, **k): return '{}'\njson.dumps.__code__ = dumps.__code__",
             "json.dumps.__code__ was replaced"),
    "json": ("import json; json.dumps = lambda *a, **k: '{}'", "json.dumps was replaced"),
    "encoder": ("import json; json.JSONEncoder.default = lambda *a: 0", "JSONEncoder.default"),
    "dtype": ("import torch; torch.set_default_dtype(torch.float64)", "torch's default dtype"),
    "gradients": ("import torch; torch.set_grad_enabled(False)", "torch's gradients"),
    "threads": ("import torch; torch.set_num_threads(torch.get_num_threads() + 1)",
                "torch's threads"),
    "linear": ("import torch; torch.nn.Linear.reset_parameters = lambda self: None",
               "torch.nn.modules.linear.Linear.reset_parameters was replaced"),
    "hook": ("import torch; torch.nn.modules.module.register_module_forward_hook(lambda *a: None)",
             "torch's hooks"),
    "recursion": ("import sys; sys.setrecursionlimit(5000)", "the recursion limit"),
    "socket": ("import socket; socket.setdefaulttimeout(9)", "the timeout of sockets"),
    "decimal": ("import decimal; decimal.getcontext().prec = 5", "the context of decimal"),
    "excepthook": ("import sys; sys.excepthook = lambda *a: None", "sys.excepthook was replaced"),
    "numpy": ("import numpy; numpy.seterr(all='raise')", "numpy's handling of errors"),
    "locale": ("import locale; locale.setlocale(locale.LC_ALL, 'C.UTF-8')", "the locale"),
    "codecs": ("import codecs; codecs.register(lambda name: None)", "codecs.register was called"),
    "signals": ("import signal; signal.signal(signal.SIGUSR1, print)", "the handlers of signals"),
    "level": ("import logging; logging.addLevelName(7, 'SEVEN')", "logging._levelToName"),
}  # fmt: skip
# In the template: each is tried in a copy of the template, which takes a while.
_LEFT_OUT = {name: _CHANGES[name] for name in ("json", "dtype")} | {
    "needed": ("import it_needs", "it_needs, which it needs, changes what other programs see")
}
# What a program hears of an import once it makes that import itself, and not before.
_HIDDEN = {
    "warnings": "import warnings; warnings.simplefilter('error')",
    "environ": "import os; os.environ['SET_BY_IMPORT'] = '1'",
    "atexit": "import atexit; atexit.register(print, 'at exit')",
    "path": "import sys; sys.path.append('/of/import')",
    "registry": "import copyreg\nclass Own: pass\ncopyreg.pickle(Own, str)",
    "logger": "import logging; logging.getLogger('of_import').setLevel(5)",
}
# A program that shows all of these.
_LOOKS = """
import codecs, decimal, json, locale, logging, os, pickle, signal, socket, sys, warnings
print(json.dumps([1]), json.JSONEncoder.default.__qualname__)
print(sys.getrecursionlimit(), socket.getdefaulttimeout(), decimal.getcontext(), sys.excepthook)
print(locale.setlocale(locale.LC_ALL), signal.getsignal(signal.SIGUSR1), logging.getLevelName(7))
print(warnings.filters, os.environ.get("SET_BY_IMPORT"), "/of/import" in sys.path)
print(logging.getLogger("of_import").level)
import numpy, torch
print(numpy.geterr(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
print(torch.nn.Linear.reset_parameters.__qualname__)
print(torch.nn.modules.module._global_forward_hooks)
"""
# What the libraries change, and why no program minds.
_ALLOWED = {
    r"logging\.Logger\.(info_once|warning_once|warning_advice) was (added|replaced)":
        "methods of transformers for its own loggers",
    r"(torch|numpy)\.|all_gather_copy_in was added":
        "among each other: torch registers its own operators and classes",
    r"inspect\.getfile was replaced": "torch.package finds the classes of its own packages too",
}  # fmt: skip
_PROVE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
for name in sorted(sys.stdlib_module_names - {"antigravity", "idlelib", "this"}):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
from shmload._templates.neutral import Snapshot
before = Snapshot()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(before.changes()))
"""
_CHANGE = """
import codecs, decimal, importlib, json, locale, logging, numpy, signal, socket, sys, torch
from shmload._templates.neutral import Snapshot
before = Snapshot()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*before.changes(), sep="\\n")
"""


@pytest.fixture(scope="module")
def place():
    """A place for templates of its own, with packages that change others when imported."""
    opened = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    packages = opened.folder / "site-packages"
    packages.mkdir()
    opened.environment["PYTHONPATH"] = str(packages)
    opened.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    for name, (code, _) in (_CHANGES | _LEFT_OUT).items():
        (packages / f"changes_{name}.py").write_text(code)
    for name, code in _HIDDEN.items():
        (packages / f"changes_{name}.py").write_text(code)
    (packages / "it_needs.py").write_text(_CHANGES["json"][0])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def template(place):
    """A template that was told by a variable to import some of them; what is known of it."""
    names = [f"changes_{name}" for name in (*_LEFT_OUT, *_HIDDEN)]
    place.environment["SHMLOAD_RUN_IMPORTS"] = ",".join(names)
    warm = place.shmload("template", "warm", "--import=torch", "--import=numpy", "--json")
    assert warm.returncode == 1, warm.stderr
    return json.loads(warm.stdout)["template"]


def test_every_change_is_found(place):
    # In one process: to look at all modules takes a while.
    modules = [f"changes_{name}" for name in _CHANGES]
    ended = place.run([sys.executable, "-c", _CHANGE, *modules], check=True)
    for name, (_, said) in _CHANGES.items():
        assert any(said in line for line in ended.stdout.splitlines()), (name, ended.stdout)


@pytest.mark.parametrize("name", _LEFT_OUT)
def test_named_module_that_changes_others_is_left_out_by_name(template, name):
    said = [each for each in template["left_out"] if each.startswith(f"changes_{name}: ")]
    assert len(said) == 1, template["left_out"]
    assert _LEFT_OUT[name][1] in said[0]


@pytest.mark.parametrize("name", _HIDDEN)
def test_named_module_whose_changes_can_be_hidden_is_imported(template, name):
    assert not [each for each in template["left_out"] if each.startswith(f"changes_{name}: ")]


@pytest.mark.usefixtures("template")
def test_program_that_imports_none_of_them_sees_none_of_their_changes(place):
    seen = place.shmload("run", "-v", "-c", _LOOKS)
    assert (seen.returncode, seen.stderr) == (0, "")
    assert re.sub("0x[0-9a-f]+", "", seen.stdout) == re.sub(
        "0x[0-9a-f]+", "", python(place, _LOOKS)
    )


@pytest.mark.usefixtures("template")
def test_import_of_one_program_reaches_no_other(place):
    """However often it is made, and whatever time goes by: no template repeats it."""
    for name in _LEFT_OUT:
        done = place.shmload("run", "-c", f"import changes_{name}")
        assert done.returncode == 0, done.stderr
    test_program_that_imports_none_of_them_sees_none_of_their_changes(place)
    assert not list((place.folder / "shmload/templates").glob("modules*"))


def python(place, code):
    ended = place.run([sys.executable, "-c", code], check=True)
    return ended.stdout


@pytest.mark.libraries
def test_libraries_leave_all_else_as_it_was():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ended = run_to_end([sys.executable, "-c", _PROVE, *MODULES], env=environment)
    assert ended.returncode == 0, ended.stderr
    changes = json.loads(ended.stdout.splitlines()[-1])
    unexpected = [each for each in changes if not any(re.match(a, each) for a in _ALLOWED)]
    assert unexpected == []


def test_what_a_running_thread_keeps_of_itself_is_no_change():
    # As the thread of tqdm's bars does, which wakes every ten seconds.
    program = """
import threading
from shmload._templates.neutral import Snapshot
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.woken = 1
thread.start()
snapshot = Snapshot()
thread.woken = 2
print(snapshot.changes())
threading.excepthook = print
print(snapshot.changes())
end.set()
"""
    ended = run_to_end([sys.executable, "-c", program], check=True)
    first, second = ended.stdout.splitlines()
    assert first == "[]"
    assert "threading.excepthook" in second
