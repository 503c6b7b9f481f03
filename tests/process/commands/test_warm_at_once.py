"""`shmload warm` with several sources at a time."""

import functools
import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._cli.source_list import ListedSource
from shmload._cli.warming import by_size


@pytest.fixture
def files(tmp_path, evicts):
    """Three files of weights, each larger than the one before."""
    paths = [tmp_path / f"file{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths, 1):
        save_file(
            {f"{n}{name}": t.clone() for n in range(number) for name, t in TENSORS.items()}, path
        )
    return paths


@pytest.fixture
def warm(command):
    """Run `shmload warm`; return its exit code, its output and its errors."""
    return functools.partial(command, "warm")


def resident():
    """Return the sources of the resident segments with their conversions."""
    return {(info.source, info.conversion) for info in shmload.segments()}


def test_all_are_resident_and_each_is_reported_once(files, warm):
    code, out, _ = warm(*files, "--jobs", 2, "--dtype", "bfloat16")
    assert code == 0
    assert sorted(line.partition(":")[0] for line in out.splitlines()) == [str(f) for f in files]
    assert all("resident in 1 segment" in line for line in out.splitlines())
    assert resident() == {(str(path), "BF16") for path in files}
    assert_same(shmload.load_state_dict(files[0], "bfloat16"), as_bf16(load_file(files[0])))


def test_lines_of_a_list_have_their_own_options(files, warm, tmp_path):
    listed = tmp_path / "list"
    listed.write_text(f"{files[1]} float16\n# a comment\n{files[2]} pin\n")
    code, out, _ = warm(files[0], "--dtype", "bfloat16", "--list", listed, "--json")
    assert code == 0
    answer = json.loads(out)
    assert [each["source"] for each in answer["reports"]] == [str(path) for path in files]
    assert answer.keys() == {"schema_version", "command", "reports"}
    found = {(info.source, info.conversion, info.is_pinned) for info in shmload.segments()}
    assert found == {
        (str(files[0]), "BF16", False),
        (str(files[1]), "F16", False),
        (str(files[2]), "raw", True),
    }


@pytest.mark.parametrize(
    "wrong",
    [("--dtype", "float13"), ("--keep-for", "soon"), ("--keep-for", "2h", "--pin")],
    ids=" ".join,
)
def test_option_that_is_wrong_for_all_is_said_once(files, warm, wrong):
    code, out, err = warm(*files, "--jobs", 3, *wrong)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wrong[0] in err or wrong[1] in err


def test_failure_of_one_leaves_the_others(files, warm):
    files[1].write_bytes(b"nothing")
    code, out, err = warm(*files, "--jobs", 3, "--largest-first", "--json")
    assert code == 1
    reports = json.loads(out)["reports"]
    assert ["error" in each for each in reports] == [False, True, False]
    assert str(files[1]) in reports[1]["error"]
    assert reports[1]["error"] in err
    assert {source for source, _ in resident()} == {str(files[0]), str(files[2])}


def test_same_source_twice_is_reported_twice(files, warm):
    code, out, _ = warm(files[0], files[0], "--jobs", 2)
    assert code == 0
    assert len(out.splitlines()) == 2


def test_wrong_list_is_an_error(files, warm, tmp_path):
    listed = tmp_path / "list"
    listed.write_text(f"{files[1]} floot16\n")
    code, _, err = warm("--list", listed)
    assert code == 2
    assert "line 1" in err
    assert resident() == set()


def test_largest_is_first_and_what_is_not_here_is_before_it(files, tmp_path):
    too_long = tmp_path / ("n" * 300)
    sources = (*files, "org/model", tmp_path / "empty", too_long)
    (tmp_path / "empty").mkdir()
    assert by_size([ListedSource(0, str(source)) for source in sources]) == [3, 5, 2, 1, 0, 4]


# Its child is one that does not end by itself. Prints the child's process id once it waits for it.
_WAITS = """
import select, sys, types
from shmload import __main__
from shmload._cli import warming
from shmload._ipc import procs
start, pids = procs.start, []
def begin(module, *arguments, **options):
    begun = start("http.server", "0", "--bind", "127.0.0.1", **options)
    pids.append(begun.pid)
    return begun
class Poll:
    def __init__(self):
        self.real = select.poll()
        self.register, self.unregister = self.real.register, self.real.unregister
    def poll(self):
        print("AT", *pids, flush=True)
        return self.real.poll()
procs.start = begin
warming.select = types.SimpleNamespace(poll=Poll, POLLIN=select.POLLIN)
sys.argv[1:] = ["warm", sys.argv[1], "--jobs", "2"]
__main__.run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_command_ends_its_children(files, new_child, number):
    process = new_child(_WAITS, files[0])
    pid = int(process.expect("AT"))
    assert Path(f"/proc/{pid}").exists()
    process.process.send_signal(number)
    assert process.wait() == 130
    assert not Path(f"/proc/{pid}").exists()
