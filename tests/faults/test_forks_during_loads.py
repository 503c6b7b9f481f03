"""A child that is forked while other threads load has no trace of these loads, and loads itself.

Each row of the table of what loads change (`shmload._host.changes`) is changed by one thread while
another one forks. And a program forks at many moments of ordinary loads.
"""

import contextlib
import importlib
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import tqdm

import shmload
from shmload._building.libraries import libraries_lock
from shmload._checkpoints.library import whole_libraries
from shmload._host import changes
from shmload._host.changes import Change, table
from shmload._host.collector import paused_gc
from shmload._host.descriptors import close, try_lock
from shmload._redirecting import switch
from shmload._segments.lease import Lease
from shmload._segments.segment import attach
from shmload.integrations import handles, switching

PACKAGE = Path(shmload.__file__).parent
PROGRAM = Path(__file__).parents[1] / "support" / "forking_moments.py"
# Forks in each of the two ways. For a whole search: SHMLOAD_TEST_FORKS=125.
COUNT = int(os.environ.get("SHMLOAD_TEST_FORKS", "10"))
# The table; torch's threads, whose number no load changes; a lock of the copies of templates, in
# which nothing else of the package may be imported.
ELSEWHERE = {"_host/changes.py", "_templates/hidden.py"}
_WAIT_S = 60


MODULE = f"import sys; sys.modules['{__name__}'].at_middle.run(); COMPLETE = True"


class AtMiddle:
    """What a module calls in the middle of its import."""

    def run(self):
        self.function()


at_middle = AtMiddle()


@pytest.fixture
def holds(tmp_path, saved):
    """How each row is changed: functions that make a context."""

    @contextlib.contextmanager
    def shared():
        with shmload.share(saved("flux"), torch_dtype="bfloat16", components=["vae"]):
            (info,) = shmload.segments()
            with attach(info.name) as segment:
                lease = Lease(segment, crosses_forks=False)  # as a rank that waits has it
            yield
            lease.close()

    @contextlib.contextmanager
    def bar_shown():
        with whole_libraries(), tqdm.tqdm(total=1):
            yield

    @contextlib.contextmanager
    def file_locked():
        with open(tmp_path / "locked", "w") as file:
            assert try_lock(file.fileno(), exclusive=True)
            yield

    @contextlib.contextmanager
    def switcher_used():
        switcher = switching.Switcher({"a": "no/model"}, "1GiB")
        switcher._models["a"].load = torch.nn.Module
        with switcher.use("a"):
            yield

    return {
        "uses of switchers": switcher_used,
        "exclusive locks of files": file_locked,
        "bars of the libraries": bar_shown,
        "the garbage collector": paused_gc,
        "the libraries": lambda: libraries_lock,
        "the pipelines of handles": lambda: handles._loading,
        "the switch of redirect": lambda: switch._lock,
        "leases of one process": shared,
    }


IMPORTS = "imports of the libraries"


def in_child(check):
    """Return what a function returns in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(check()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


class Holding:
    """A context held by another thread while the block runs."""

    def __init__(self, hold):
        self._hold = hold
        self._is_held, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self._is_held.wait(_WAIT_S)

    def __exit__(self, *exc_info):
        self._is_over.set()
        self._thread.join()

    def _run(self):
        with self._hold():
            self.pause()

    def pause(self):
        self._is_held.set()
        self._is_over.wait()


def test_each_row_is_changed_and_reset(holds):
    assert table.keys() == {*holds, IMPORTS}
    for name, hold in holds.items():
        read = table[name].read
        before = read()
        assert in_child(lambda read=read, before=before: read() == before) == "True", name
        with Holding(hold):
            assert read() != before, name
            assert in_child(lambda read=read, before=before: read() == before) == "True", name
            assert read() != before, name
        assert read() == before, name


def test_what_the_forking_thread_changes_stays_so_in_the_child(holds):
    of_one_process = {
        "exclusive locks of files",
        "leases of one process",
        "locks of folders",
        "uses of switchers",
    }
    crossing = holds.keys() - of_one_process
    for name in crossing:
        read = table[name].read
        with holds[name]():
            changed = read()

            def check(read=read, changed=changed):
                return read() == changed

            assert in_child(check) == "True", name


def test_change_is_undone_when_the_last_thread_has_ended_in_a_child():
    state = ["usual"]
    change = Change(
        "a test's", lambda: state[0], lambda: state.__setitem__(0, "other"),
        lambda before: state.__setitem__(0, before),
    )  # fmt: skip
    del table["a test's"]
    with change.made(1), Holding(lambda: change.made(2)):

        def check():
            inner = (state[0], change.values())
            return inner

        assert check() == ("other", [1, 2])
        assert in_child(check) == "('other', [1])"
    assert (state, change.values()) == (["usual"], [])


def test_import_that_was_under_way_in_another_thread_begins_anew_in_a_child(tmp_path, monkeypatch):
    (tmp_path / "halfway.py").write_text(MODULE)
    (tmp_path / "whole.py").write_text("COMPLETE = True")
    monkeypatch.syspath_prepend(tmp_path)
    read = table[IMPORTS].read
    before = read()

    @contextlib.contextmanager
    def importing():
        with whole_libraries():
            at_middle.function = holding.pause
            importlib.import_module("halfway")
            yield

    def check():
        at_middle.function = lambda: None
        found = read(), "halfway" in sys.modules, "whole" in sys.modules
        return found, importlib.import_module("halfway").COMPLETE

    importlib.import_module("whole")
    holding = Holding(importing)
    with holding:
        assert read() == ["halfway"]
        assert in_child(check) == f"(({before}, False, True), True)"
    assert sys.modules.pop("halfway").COMPLETE
    del sys.modules["whole"]


@pytest.mark.parametrize("name", ["diffusers.utils.logging", "transformers.utils.logging"])
def test_child_has_no_lock_of_a_library_that_another_thread_held(name):
    lock = importlib.import_module(name)._lock

    @contextlib.contextmanager
    def held():
        with whole_libraries(), lock:
            yield

    with Holding(held):
        assert lock.locked()
        assert in_child(lock.locked) == "False"
        assert lock.locked()


def test_child_that_was_forked_before_a_lock_was_taken_does_not_keep_it(tmp_path):
    fd, other = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    assert try_lock(fd, exclusive=True)
    close(fd)
    assert try_lock(other, exclusive=True)  # while the child lives
    for each in (other, writer, reader):
        close(each)
    os.waitpid(pid, 0)


def test_fork_waits_for_a_block_of_another_thread_and_not_for_ever(monkeypatch):
    timeouts = []

    class Gate:
        def acquire(self, timeout):
            timeouts.append(timeout)
            return gate.acquire(timeout=0)

        def __getattr__(self, name):
            return getattr(gate, name)

    gate = changes._forking
    with Holding(changes.forks_wait):
        monkeypatch.setattr(changes, "_forking", Gate())
        assert in_child(lambda: not gate._is_owned()) == "True"
        monkeypatch.undo()
    assert timeouts == [changes._FORK_TIMEOUT_S]
    assert in_child(lambda: gate.acquire(blocking=False)) == "True"


def test_nothing_else_is_done_in_forked_children():
    found = {
        str(path.relative_to(PACKAGE))
        for folder in (PACKAGE, PACKAGE / "integrations", PACKAGE / "workers")  # two are links
        for path in folder.rglob("*.py")
        if "register_at_fork" in path.read_text()
    }
    assert found == ELSEWHERE


# Loads --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(120 + 4 * COUNT)
@pytest.mark.parametrize("way", ["plain", "redirected"])
def test_child_that_is_forked_at_any_moment_of_a_load_is_as_ever_and_loads(
    saved, child, configure, evicts, way
):
    configure(inline_nbytes=0, workers=1)
    process = child(PROGRAM, saved("stable-diffusion"), COUNT, way)
    loads, events = map(int, process.expect("LOADS").split())
    assert events > 100_000  # the moments are of the load's own code
    count = [int(process.expect("FORKED")) for _ in range(loads)][-1]
    assert count > 0.9 * COUNT  # loads differ a little in length
    assert process.expect("END") == ""
    assert process.wait() == 0
