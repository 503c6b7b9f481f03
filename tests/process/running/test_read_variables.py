"""The variables that libraries read on import: those that decide about a template have all."""

import sys

import pytest
from children import run_to_end

from shmload._templates.imports import wanted_modules
from shmload._templates.variables import is_of_import

pytestmark = pytest.mark.libraries
# What a terminal, a continuous integration or a compiler sets; `READ_LATER` is read by loads.
_OTHERS = {
    "CI", "COLUMNS", "CXX", "HF_DEACTIVATE_ASYNC_LOAD", "LINES", "PATH",
    "SM_HP_MP_PARAMETERS", "DUMP_AOTI_MINIFIER", "FAKE_ALLOW_META", "_CHECK_PEFT",
    "_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME",
}  # fmt: skip
_WATCH = """
import importlib, os, sys
read = set()
kind = type(os.environ)
class Watched(kind):
    def __getitem__(self, name):
        if not copies:
            read.add(name)
        return super().__getitem__(name)
    def __iter__(self):
        names = list(super().__iter__())
        copies.append(1)  # a copy of all variables is no interest in one
        yield from names
        copies.clear()
copies = []
os.environ.__class__ = Watched
for name in sys.argv[1:]:
    importlib.import_module(name)
os.environ.__class__ = kind
print(*sorted(read))
"""


@pytest.mark.slow
def test_variables_that_libraries_read_on_import_are_known():
    ended = run_to_end([sys.executable, "-c", _WATCH, *wanted_modules()], check=True)
    read = ended.stdout.split()
    assert "HF_HOME" in read
    # The hub's library looks for the folders of programs that may call it.
    others = [name for name in read if not (is_of_import(name) or name.endswith("_CONFIG_DIR"))]
    assert set(others) <= _OTHERS
    assert not is_of_import("HF_DEACTIVATE_ASYNC_LOAD")  # which shmload sets for a load
