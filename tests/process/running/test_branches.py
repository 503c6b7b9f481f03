"""Branches of templates: several programs in turn, each with its pipeline loaded ahead."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from running_place import Running
from test_programs import PROGRAMS

import shmload

pytestmark = pytest.mark.libraries
_DEADLINE_S = 100.0
_LOADS = """
import json, logging, sys
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
# What a template of the libraries does not show, with and without branches: finalizers of objects
# that are left when the interpreter ends.
_NOT_OF_LIBRARIES = {"del", "del at the end"}
_NOTHING = "import sys, torch; print('diffusers.pipelines' in sys.modules)"


@pytest.fixture
def place():
    """A place for a template of its own, which imports the libraries."""
    opened = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    opened.environment |= {
        "SHMLOAD_CACHE_DIR": str(opened.folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "SHMLOAD_SKELETONS": "0",
    }
    for name in ("a.py", "b.py", "c.py"):
        (opened.work / name).write_text(_LOADS)
    yield opened
    wait_until_loaded(opened, 0)
    opened.shmload("template", "stop")
    opened.close()
    for info in shmload.segments():
        shmload.evict(info.name)


@pytest.fixture(scope="module")
def sources(saved):
    return [str(saved("stable-diffusion")), str(saved("sdxl"))]


def wait_until_loaded(place, count):
    """Wait until nothing is loading, and so many branches are ready; return the template."""

    def is_loaded(found):
        states = [branch.state for template in found for branch in template.branches]
        return "loading" not in states and states.count("ready") >= count

    found = place.wait_for_templates(is_loaded)
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


def test_programs_in_turn_find_theirs_ready_and_share_branches(place, sources):
    """Three programs over two pipelines, and one that loads nothing."""
    place.shmload("template", "warm")
    programs = {"a.py": sources[0], "b.py": sources[1], "c.py": sources[0]}
    for name, source in programs.items():
        run(place, name, source)  # the third may find there what the first has loaded
        assert run(place, "-c", _NOTHING) is False
    template = wait_until_loaded(place, 2)
    assert sorted(template.ahead) == sorted(sources)
    assert len(template.branches) == 2
    assert all(0 < branch.private_nbytes < 400 << 20 for branch in template.branches)
    for _ in range(3):  # at once, one after the other
        for name, source in programs.items():
            assert has_all(run(place, name, source)), name
            assert run(place, "-c", _NOTHING) is False
    listed = place.shmload("template", "ls").stdout
    assert "PRIVATE MEMORY" in listed
    assert os.path.basename(sources[1]) in listed


def test_program_that_finds_the_pipeline_of_another_is_noted_too(place, sources):
    place.shmload("template", "warm")
    run(place, "a.py", sources[0])
    wait_until_loaded(place, 1)
    assert has_all(run(place, "c.py", sources[0]))  # what `a.py` has loaded
    run(place, "b.py", sources[1])
    wait_until_loaded(place, 2)
    assert has_all(run(place, "b.py", sources[1]))
    assert has_all(run(place, "c.py", sources[0]))  # though another branch was used last


def test_program_that_loads_two_pipelines_finds_both_ready(place, sources):
    place.shmload("template", "warm")
    assert run(place, "a.py", *sources) == []
    wait_until_loaded(place, 2)  # one with the first alone, and one with both
    assert has_all(run(place, "a.py", *sources), 2)


def test_next_template_has_what_programs_of_the_last_one_have_loaded(place, sources):
    place.shmload("template", "warm")
    assert run(place, "a.py", sources[0]) == []
    wait_until_loaded(place, 1)
    place.shmload("template", "stop")
    place.wait_for_templates(lambda found: not found)
    place.shmload("template", "warm")
    wait_until_loaded(place, 1)
    assert has_all(run(place, "a.py", sources[0]))


def test_first_run_finds_ready_what_was_warmed(place, sources):
    warmed = place.shmload("warm", "--dtype", "bfloat16", "--quiet", sources[0])
    assert warmed.returncode == 0, warmed.stderr
    place.shmload("template", "warm")
    wait_until_loaded(place, 1)
    assert has_all(run(place, "a.py", sources[0]))
    place.shmload("warm", "--dtype", "bfloat16", "--quiet", sources[1])  # while one serves
    wait_until_loaded(place, 2)
    assert has_all(run(place, "b.py", sources[1]))


def test_program_of_a_branch_gets_objects_of_its_own_classes_from_other_processes(place, sources):
    (place.work / "spawns.py").write_text(
        "import multiprocessing\n"
        "class Result:\n    def __init__(self, number): self.number = number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print([each.number for each in pool.map(Result, [1, 2])])\n"
    )
    place.shmload("template", "warm")
    run(place, "a.py", sources[0])
    wait_until_loaded(place, 1)
    assert run(place, "spawns.py") == [1, 2]


def test_killed_branch_is_replaced_and_its_program_goes_on(place, sources):
    place.shmload("template", "warm")
    assert run(place, "a.py", sources[0]) == []
    (branch,) = wait_until_loaded(place, 1).branches
    (place.work / "a.py").write_text(_LOADS + "input()\nsys.exit(5)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "shmload", "run", "-v", "a.py", sources[0]],
        cwd=place.work, env=place.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as caller:  # fmt: skip
        assert has_all(json.loads(caller.stdout.readline()))
        with contextlib.closing(open(os.pidfd_open(branch.pid), "rb")) as held:
            os.kill(branch.pid, signal.SIGKILL)
            assert select.select([held], [], [], _DEADLINE_S)[0]
        caller.communicate("go on\n", timeout=_DEADLINE_S)
        assert caller.returncode == 5
    place.wait_for_templates(lambda found: [b.pid for b in found[0].branches] != [branch.pid])
    (other,) = wait_until_loaded(place, 1).branches
    assert other.pid != branch.pid
    (place.work / "a.py").write_text(_LOADS)
    assert has_all(run(place, "a.py", sources[0]))


def test_stopped_template_ends_once_the_last_program_of_a_branch_has(place, sources):
    place.shmload("template", "warm")
    assert run(place, "a.py", sources[0]) == []
    template = wait_until_loaded(place, 1)
    with subprocess.Popen(
        [sys.executable, "-m", "shmload", "run", "-v", "-c", "print(1, flush=True); input()"],
        cwd=place.work, env=place.environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as caller:  # fmt: skip
        assert caller.stdout.readline() == "1\n"
        place.wait_for_templates(lambda found: found[0].programs == 1)
        place.shmload("template", "stop")
        place.wait_for_templates(lambda found: [t.state for t in found] == ["draining"])
        os.kill(caller.pid, signal.SIGTERM)
        assert caller.wait(_DEADLINE_S) == -signal.SIGTERM
    place.wait_for_templates(lambda found: template.pid not in [t.pid for t in found])


def test_program_of_a_branch_sees_what_python_shows(place, sources):
    """Those of the table that a template of the libraries shows as Python does, and are quick."""
    place.shmload("template", "warm")
    assert run(place, "a.py", sources[0]) == []
    wait_until_loaded(place, 1)
    of_files = [name for name in PROGRAMS if name.partition(":")[0] not in ("m", "c")]
    names = [name for name in of_files if name not in _NOT_OF_LIBRARIES]
    path = place.work / "program_of_test.py"
    (place.work / "helper_of_test.py").write_text("VALUE = 5\n")
    different = []
    for name in names:
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
