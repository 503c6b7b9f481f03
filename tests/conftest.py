"""Fixtures of all tests: an environment of their own, a check for leaks, saved pipelines, children.

The tests get a /dev/shm of their own where the kernel allows it (a mount namespace, which takes
root). Else they share the machine's, and a load that runs beside them can disturb them.
"""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import own_home  # before the libraries

# Read when huggingface_hub is imported, which test modules do before any fixture runs.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Read when torch is imported: its idle threads sleep instead of spinning on cores in demand.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


import hypothesis
import pytest
import tqdm
from children import Child
from hub_caches import HubCache
from own_memory import take_own_shared_memory
from serving import service  # noqa: F401 a fixture for all
from warm_python import WarmPython
from watching import children_of, workers_of

from shmload._host import collector
from shmload._settings import settings

# Their asserts say what was compared only if pytest knows the modules before they are imported.
pytest.register_assert_rewrite(
    "accelerated",
    "comparing",
    "doors",
    "mappings",
    "redirecting",
    "runtime_contract",
    "warming",
)

_CORE_FAMILIES = ("stable-diffusion", "wan")
"""Families of the core's tests: most kinds of components; ties, and dtypes that are mixed."""
_SHM = Path("/dev/shm")
_PREFIX = "shmload-"
_SLOW_S = 3.0
"""What a test of the core may take, without its fixtures."""
# What decides how shmload and the libraries behave; other variables are set by imports.
_VARIABLES = ("DIFFUSERS_", "HF_", "PYTHON", "SHMLOAD_", "TRANSFORMERS_")

_USERS_FILES = pytest.StashKey[set[tuple[str, int]]]()
_has_own_shm = False


# The same examples each time, without a deadline: the machine may be busy. For a search of its own,
# `pytest tests/unit --hypothesis-profile=search`.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run the modules, and the tests in each, in the random order of this seed",
    )
    parser.addoption(
        "--list-slow", metavar="FILE", help=f"write the tests that take over {_SLOW_S} s to a file"
    )


def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes run tests; without a /dev/shm of its own each, only one."""
    pid = os.fork()
    if pid == 0:
        os._exit(not take_own_shared_memory())
    return len(os.sched_getaffinity(0)) if os.waitpid(pid, 0)[1] == 0 else 1


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(config: pytest.Config) -> Iterator[None]:
    """Write the list of slow tests, one name a line."""
    if place := config.getoption("--list-slow"):
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        slow = [r.nodeid for r in reporter.getreports("passed") if r.duration > _SLOW_S]
        Path(place).write_text("".join(f"{name}\n" for name in slow))
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of further families as `matrix`; shuffle all where that is asked for.

    The modules are shuffled, and the tests in each: a module's fixtures are still set up once.
    """
    for item in items:
        family = getattr(item, "callspec", None) and item.callspec.params.get("family")
        if family and family not in _CORE_FAMILIES:
            item.add_marker("matrix")
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    random = Random(seed)
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    for tests in modules.values():
        random.shuffle(tests)
    items[:] = [
        item for path in random.sample(list(modules), len(modules)) for item in modules[path]
    ]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        # It runs no test: it starts the processes that do.
        config.stash[_USERS_FILES] = own_home.users_files()
        return
    global _has_own_shm
    _has_own_shm = take_own_shared_memory()
    # Ignored, as in a job that a shell runs in the background, they would be so in every child.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Its thread would look like one that a test left behind.
    tqdm.tqdm.monitor_interval = 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if the user's files of shmload are not as before: some test wrote there."""
    before = session.config.stash.get(_USERS_FILES, None)
    if before is not None and (changed := before ^ own_home.users_files()):
        print(f"\nThe tests, or a program beside them, changed {sorted(changed)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure() -> None:
    own_home.remove()


def pytest_collection_finish() -> None:
    # Else each collection of garbage, here and in forked children, visits all modules and tests.
    gc.collect()
    collector.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the machine's user has set out of the tests; `own_home` does so for files."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SHMLOAD_")]:
            patch.delenv(name)
        for name in ("HF_PARALLEL_LOADING_WORKERS", "HF_HOME", "HF_DATASETS_CACHE"):
            patch.delenv(name, raising=False)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("SHMLOAD_CACHE_DIR", str(cache / "rules-cache"))
        # Else what a load does would depend on the tests before it.
        patch.setenv("SHMLOAD_REMEMBER", "0")
        settings.cache_clear()
        _silence_libraries()
        yield
    settings.cache_clear()


def _silence_libraries() -> None:
    """Turn off the bars of the libraries that are imported already."""
    if "diffusers" in sys.modules:
        sys.modules["diffusers"].utils.logging.disable_progress_bar()
    if "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Change settings for one test, here and in its children: `configure(inline_nbytes=0)`."""

    def change(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"SHMLOAD_{name.upper()}", str(value))
        settings.cache_clear()

    yield change
    settings.cache_clear()


@pytest.fixture
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what `pytest_collection_finish` has frozen, for one test."""
    monkeypatch.setattr(collector, "_has_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()


# Leaks --------------------------------------------------------------------------------------------


_THREADS_END_S = 2.0


@pytest.fixture(autouse=True)
def _no_leaks(_own_environment: None) -> Iterator[None]:
    """Fail a test that leaves behind a child, a thread, a descriptor or a name in /dev/shm.

    Or what later tests and their children would start from: an entry of the path, a variable.
    """
    before, place = _alive(), _surroundings()
    yield
    changed = _surroundings() ^ place
    left = _alive() - before
    if left:
        gc.collect()  # takes half a second with the libraries loaded, so only now
        for thread in threading.enumerate():
            if f"thread {thread.name} {thread.ident}" in left:
                thread.join(_THREADS_END_S)  # a library's pool that is shut down, but not yet over
        left = _alive() - before
    if _has_own_shm:
        # Or one failure would become many.
        for kind, _, name in (entry.partition(" ") for entry in left):
            if kind == "name":
                remove_shm_entry(name)
    assert not left, f"left behind: {sorted(left)}"
    assert not changed, f"not as before: {sorted(changed)}"


def _surroundings() -> set[str]:
    return {
        f"directory {os.getcwd()}",
        *(f"path {entry}" for entry in sys.path),
        *(f"variable {k}={v}" for k, v in os.environ.items() if k.startswith(_VARIABLES)),
    }


def _alive() -> set[str]:
    return {
        *(f"child {pid}" for pid in children_of("self")),
        *(f"thread {t.name} {t.ident}" for t in threading.enumerate() if not t.daemon),
        *(f"descriptor {number} {target}" for number, target in _descriptors()),
        *(f"name {name}" for name in shm_entries()),
    }


def _descriptors() -> Iterator[tuple[str, str]]:
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            ours = (f"{_SHM}/{_PREFIX}", f"/memfd:{_PREFIX}", "anon_inode:[pidfd]", "socket:")
            if target.startswith(ours) or ".safetensors" in target:
                yield number, target


def shm_entries() -> list[str]:
    return sorted(name for name in os.listdir(_SHM) if name.startswith(_PREFIX))


def remove_shm_entry(name: str) -> None:
    path = _SHM / name
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.fixture
def shm_names() -> Callable[[], list[str]]:
    """Say which names shmload has in /dev/shm now."""
    return shm_entries


@pytest.fixture
def worker_pids() -> Callable[[], list[int]]:
    """Say which worker processes this process has now."""
    return lambda: workers_of("self")


@pytest.fixture
def evicts() -> Iterator[None]:
    """Remove the names that a test leaves in /dev/shm on purpose."""
    before = set(shm_entries())
    yield
    for name in set(shm_entries()) - before:
        remove_shm_entry(name)


# Sources ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Save a tiny pipeline once per session; a test that changes it copies it first (`copied`).

    `saved("wan")`, `saved("flux", "float16", variant="fp16", sharded=True)`
    """
    made: dict[tuple[object, ...], Path] = {}

    def save_once(
        family: str, dtype: str = "float32", variant: str | None = None, *, sharded: bool = False
    ) -> Path:
        import pipelines

        _silence_libraries()
        key = (family, dtype, variant, sharded)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = pipelines.save(
                family, folder, dtype=dtype, variant=variant, sharded=sharded
            )
        return made[key]

    return save_once


@pytest.fixture
def copied(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a saved pipeline, to be changed; the arguments are those of `saved`."""

    def copy(*args: Any, **kwargs: Any) -> Path:
        source = saved(*args, **kwargs)
        return Path(shutil.copytree(source, tmp_path / source.name))

    return copy


@pytest.fixture
def hub_cache(tmp_path: Path) -> HubCache:
    """An empty hub cache, to be given as `cache_dir=hub_cache.root`."""
    return HubCache(tmp_path / "hub")


# Children -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def warm_python(_own_environment: None) -> Iterator[WarmPython]:
    """Run programs in forks of a process with the libraries: `warm_python.run(path, *argv)`."""
    python = WarmPython()
    yield python
    python.close()


@pytest.fixture
def child(
    tmp_path: Path, warm_python: WarmPython, _children_to_end: contextlib.ExitStack
) -> Callable[..., Child]:
    """Fork Python programs, which are ended with the test: `child(code, *argv)`."""

    def start(code: str, *args: object) -> Child:
        with _new_log(tmp_path).open("wb") as log:
            process = warm_python.start(code, args, stderr=log)
        return _children_to_end.enter_context(Child(process, log.name))

    return start


@pytest.fixture
def new_child(tmp_path: Path, _children_to_end: contextlib.ExitStack) -> Callable[..., Child]:
    """Start new Pythons, which are ended with the test: `new_child(code, *argv, prefix=(...))`.

    For tests of what a program imports, and in which order it ends; and for programs that another
    command executes, the prefix.
    """

    def start(code: str, *args: object, prefix: tuple[str, ...] = ()) -> Child:
        with _new_log(tmp_path).open("wb") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-W", "ignore", "-c", code, *map(str, args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        return _children_to_end.enter_context(Child(process, log.name))

    return start


@pytest.fixture
def _children_to_end() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _new_log(folder: Path) -> Path:
    return folder / f"child-{len(list(folder.glob('child-*.log')))}.log"
