"""Branches of templates: several programs in turn, each with its pipeline loaded ahead."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from running_place import Running
from test_programs import PROGRAMS

import shmload

# What is loaded ahead has the lowest priority: beside other tests it may wait for minutes.
pytestmark = [pytest.mark.libraries, pytest.mark.timeout(600), pytest.mark.slow]
_DEADLINE_S = 100.0
_LOADED_S = 300.0
_LOADS = """
import json, logging, os, sys
import shmload
said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("shmload").addHandler(Keep())
logging.getLogger("shmload").setLevel(logging.INFO)
for source in sys.argv[1:]:
    shmload.load_pipeline(source, dtype="bfloat16", keep=True)
print(json.dumps([text for text in said if "prepared" in text]), flush=True)
"""
_ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")
# The programs to which a branch may look other than its template: it has more modules, objects,
# descriptors and memory, and is one process further from the caller.
_OTHER_IN_A_BRANCH = (
    *("argv", "globals", "main", "environ", "limits", "streams", "descriptors", "next descriptor"),
    *("input", "exit", "error", "interrupt", "SIGKILL", "SIGSEGV", "atexit", "atexit of C"),
    *("thread", "daemon", "native id", "frame", "warn", "pickle", "modules"),
    *("modules of json", "modules of numpy", "order of modules", "submodule", "import again"),
    *("reload", "filters", "logging", "garbage", "main thread", "recursion limit", "handlers"),
    *("mask", "hooks", "codecs", "decimal", "asyncio", "no children", "subprocess", "fork"),
    *("fork pool", "forkserver", "exec"),
)
_NOTHING = "import sys, torch; print('diffusers.pipelines' in sys.modules)"


@pytest.fixture(scope="module")
def sources(saved):
    return [str(saved("stable-diffusion")), str(saved("sdxl"))]


@pytest.fixture(scope="module")
def place(sources):
    """A place for templates that import the libraries; the sources are resident."""
    opened = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    opened.environment |= {
        "SHMLOAD_CACHE_DIR": str(opened.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "SHMLOAD_REMEMBER": "0",
    }
    for name in ("a.py", "b.py", "c.py"):
        (opened.work / name).write_text(_LOADS)
    for source in sources:
        shmload.warm(source, dtype="bfloat16")
    yield opened
    end_template(opened)
    opened.close()
    for info in shmload.segments():
        shmload.evict(info.name)


@pytest.fixture
def new(place):
    """The place, without a template, and where no program has loaded anything."""
    end_template(place)
    for kept in (place.folder / "cache", place.folder / "shmload"):
        shutil.rmtree(kept, ignore_errors=True)
    return place


@pytest.fixture
def ready(place, sources):
    """The place, where the program `a.py` finds the first source loaded ahead."""
    place.shmload("template", "warm")
    if not has_all(run(place, "a.py", sources[0])):
        wait_until_loaded(place, 1)
    return place


def end_template(place):
    wait_until_loaded(place, 0)  # or a load that is killed holds segments for a moment
    place.shmload("template", "stop")
    place.wait_for_templates(lambda found: not found)


def wait_until_loaded(place, count):
    """Wait until nothing is loading, and so many branches are ready; return the template."""

    def is_loaded(found):
        states = [branch.state for template in found for branch in template.branches]
        return "loading" not in states and states.count("ready") >= count

    found = place.wait_for_templates(is_loaded, _LOADED_S)
    return found[0] if found else None


def run(place, *words):
    """Run a program in the template; return what it has printed."""
    ended = place.shmload("run", "-v", *words)
    assert ended.returncode == 0, ended.stderr
    assert "ordinary way" not in ended.stderr
    return json.loads(ended.stdout.splitlines()[-1].lower())


def has_all(seen, count=1):
    return len(seen) == count and all(
        "prepared before the program started" in each for each in seen
    )


def test_programs_in_turn_find_what_was_warmed_ready_and_share_branches(new, sources):
    """Three programs over two pipelines, and one that loads nothing."""
    place = new
    warm = ("warm", "--dtype", "bfloat16", "--quiet")
    assert place.shmload(*warm, sources[0]).returncode == 0
    place.shmload("template", "warm")
    wait_until_loaded(place, 1)
    assert has_all(run(place, "a.py", sources[0]))
    assert has_all(run(place, "c.py", sources[0]))  # what was ready for `a.py`
    assert place.shmload(*warm, sources[1]).returncode == 0  # while a template serves
    wait_until_loaded(place, 2)
    programs = {"b.py": sources[1], "c.py": sources[0], "a.py": sources[0]}
    for _ in range(2):  # at once, though another branch was used last
        for name, source in programs.items():
            assert has_all(run(place, name, source)), name
        assert run(place, "-c", _NOTHING) is False
    template = wait_until_loaded(place, 2)
    assert sorted(template.ahead) == sorted(sources)
    assert len(template.branches) == 2
    assert all(0 < branch.private_nbytes < 400 << 20 for branch in template.branches)
    listed = place.shmload("template", "ls").stdout
    assert "PRIVATE MEMORY" in listed
    assert os.path.basename(sources[1]) in listed


def test_next_template_has_the_two_pipelines_that_a_program_of_the_last_one_has_loaded(
    new, sources
):
    place = new
    place.shmload("template", "warm")
    assert run(place, "a.py", *sources) == []
    for _ in range(2):
        place.shmload("template", "warm")
        place.wait_for_templates(lambda found: {*sources} <= {*found[0].ahead}, _LOADED_S)
        assert has_all(run(place, "a.py", *sources), 2)
        end_template(place)


def test_program_of_a_branch_gets_objects_of_its_own_classes_from_other_processes(ready):
    (ready.work / "spawns.py").write_text(
        "import multiprocessing\n"
        "class Result:\n    def __init__(self, number): self.number = number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([each.number for each in pool.map(Result, [1, 2])])\n"
    )
    assert run(ready, "spawns.py") == [1, 2]


def test_killed_branch_is_replaced_and_its_program_goes_on(ready, sources):
    waits = ready.work / "waits.py"
    waits.write_text(_LOADS + "print(os.getppid(), flush=True)\ninput()\nsys.exit(5)\n")
    with ready.call("waits.py", sources[0]) as caller:
        assert has_all(json.loads(caller.stdout.readline()))
        branch = int(caller.stdout.readline())
        with contextlib.closing(open(os.pidfd_open(branch), "rb")) as held:
            os.kill(branch, signal.SIGKILL)
            assert select.select([held], [], [], _DEADLINE_S)[0]
        caller.communicate("go on\n", timeout=_DEADLINE_S)
        assert caller.returncode == 5
    ready.wait_for_templates(lambda found: branch not in [b.pid for b in found[0].branches])
    wait_until_loaded(ready, 1)
    assert has_all(run(ready, "a.py", sources[0]))


def test_program_of_a_branch_sees_what_python_shows(ready):
    place = ready
    path = place.work / "program_of_test.py"
    (place.work / "helper_of_test.py").write_text("VALUE = 5\n")
    different = []
    for name in _OTHER_IN_A_BRANCH:
        path.write_text(PROGRAMS[name])
        seen, wanted = (
            subprocess.run(
                [sys.executable, *how, path.name], cwd=place.work, env=place.environment,
                input=b"first\nsecond\n", capture_output=True, timeout=_DEADLINE_S, check=False,
            )
            for how in (["-m", "shmload", "run"], [])
        )  # fmt: skip
        out, expected = (_ADDRESS.sub(b"", each.stdout) for each in (seen, wanted))
        if (seen.returncode, out) != (wanted.returncode, expected):
            codes = seen.returncode, wanted.returncode
            different.append((name, codes, out[-300:], expected[-300:], seen.stderr[-300:]))
    assert not different, "\n".join(map(repr, different))


def test_stopped_template_ends_once_the_last_program_of_a_branch_has(ready):
    template = wait_until_loaded(ready, 1)
    with ready.call("-c", "print(1, flush=True); input()") as caller:
        assert caller.stdout.readline() == "1\n"
        ready.wait_for_templates(lambda found: found[0].programs == 1)
        ready.shmload("template", "stop")
        ready.wait_for_templates(lambda found: [t.state for t in found] == ["draining"])
        os.kill(caller.pid, signal.SIGTERM)
        assert caller.wait(_DEADLINE_S) == -signal.SIGTERM
    ready.wait_for_templates(lambda found: template.pid not in [t.pid for t in found])
