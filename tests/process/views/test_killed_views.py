"""A process that makes or removes a view directory is killed at any step: no half is ever seen."""

import importlib
import os
import signal

import pytest
from safetensors.torch import load_file
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._segments import standing_views, view_folder

_STANDING = "shmload._segments.standing_views"
_FOLDER = "shmload._segments.view_folder"
_VERBS = "shmload._loading.view_directory"
# Where it dies: module, function, how often that is called before, how names are exchanged.
_STEPS = {
    "before anything is recorded": (_STANDING, "write_entry", 1, "exchange"),
    "before the segments are pinned": ("shmload._segments.segment", "changing_mode", 1, "exchange"),
    "before it is built": (_VERBS, "stage", 1, "exchange"),
    "before the marker is written": (_FOLDER, "_write", 1, "exchange"),
    "between two files": (_FOLDER, "_write", 2, "exchange"),
    "before it gets its place": (_VERBS, "put_in_place", 1, "exchange"),
    "before the old one goes": (_STANDING, "take_down", 1, "exchange"),
    "while the old one goes": (_FOLDER, "_remove_empty", 1, "exchange"),
    "before the old segments go": (_STANDING, "release", 1, "exchange"),
    "before it is recorded": (_STANDING, "write_entry", 2, "exchange"),
    "before the first rename": ("os", "rename", 1, "renames"),
    "before the second rename": ("os", "rename", 2, "renames"),
    "before the third rename": ("os", "rename", 3, "renames"),
}


@pytest.fixture(autouse=True)
def state(configure, tmp_path):
    configure(state_dir=tmp_path / "state")


@pytest.fixture
def place(tmp_path):
    return tmp_path / "places" / "view"


@pytest.fixture
def die(folder, place):
    """Run a verb in a forked process that kills itself at a call of a function."""

    def run(verb, step):
        pid = os.fork()
        if pid == 0:
            try:
                _run_and_die(verb, *step, folder, place)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)

    return run


def _run_and_die(verb, module, name, calls, how, folder, place):
    home = importlib.import_module(module)
    call, left = getattr(home, name), calls

    def die(*args, **kwargs):
        nonlocal left
        # Of all renames, those of directories.
        left -= name != "rename" or str(args[0]).startswith(str(place.parent))
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    setattr(home, name, die)
    if how == "renames":  # names cannot be exchanged in one step
        view_folder.exchange_names = lambda one, other: False
    if verb == "remove":
        shmload.remove_view_directory(place)
    else:
        dtype = "bfloat16" if verb == "make" else "float16"
        shmload.view_directory(folder, place, dtype=dtype, replace=True)


def dtype_at(place):
    """Return the dtype of a complete view directory."""
    found = {}
    for path in sorted(place.glob("*.safetensors")):
        found |= load_file(path)
    assert found.keys() == TENSORS.keys()
    assert (place / "config.json").read_text() == "{}"
    return str(found["a.weight"].dtype)


def assert_in_order(place, directories):
    """Check that nothing is under way, and that exactly what is needed is pinned."""
    assert {*os.listdir(place.parent)} == {path.name for path in directories}
    needed = {name for each in shmload.view_directories() for name in each.segments}
    assert {info.name for info in shmload.segments() if info.is_pinned} == needed
    assert standing_views.find_unsettled() == []


@pytest.mark.parametrize("step", _STEPS.values(), ids=_STEPS)
def test_killed_while_it_replaces_another(folder, place, die, step):
    shmload.view_directory(folder, place, dtype="bfloat16")
    die("replace", step)
    if step[2:] != (2, "renames"):  # the one moment without either
        assert dtype_at(place) in ("torch.bfloat16", "torch.float16")
    shmload.collect_garbage()
    dtype = dtype_at(place)
    assert_in_order(place, [place])
    (listed,) = shmload.view_directories()
    assert (f"torch.{listed.dtype}", listed.state) == (dtype, "ready")
    shmload.view_directory(folder, place, dtype="float16", replace=True)
    assert dtype_at(place) == "torch.float16"
    assert_in_order(place, [place])


@pytest.mark.parametrize(
    "step", [step for name, step in _STEPS.items() if "old" not in name and "renames" not in step]
)
def test_killed_while_it_makes_the_first(folder, place, die, step):
    die("make", step)
    there = [place] if place.exists() else []
    if there:
        assert dtype_at(place) == "torch.bfloat16"
    shmload.collect_garbage()
    if place.parent.exists():
        assert_in_order(place, there)
    assert [each.state for each in shmload.view_directories()] == ["ready" for _ in there]
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert dtype_at(place) == "torch.bfloat16"
    assert_in_order(place, [place])


@pytest.mark.parametrize(
    "step",
    [
        (_STANDING, "write_entry", 1, ""),
        ("os", "rename", 1, ""),
        (_STANDING, "take_down", 1, ""),
        (_FOLDER, "_remove_empty", 1, ""),
        (_STANDING, "release", 1, ""),
        (_STANDING, "write_entry", 2, ""),
    ],
    ids=lambda step: f"{step[1]} {step[2]}",
)
def test_killed_while_it_removes(folder, place, die, step):
    shmload.view_directory(folder, place, dtype="bfloat16")
    die("remove", step)
    if place.exists():
        assert dtype_at(place) == "torch.bfloat16"
    shmload.collect_garbage()
    if shmload.view_directories():
        assert dtype_at(place) == "torch.bfloat16"
        shmload.remove_view_directory(place)
    assert_in_order(place, [])


def test_two_processes_make_the_same(folder, place, child):
    code = "import shmload, sys; sys.stdin.readline(); "
    code += "print('DONE', shmload.view_directory(*sys.argv[1:]).state, flush=True)"
    children = [child(code, folder, place) for _ in range(3)]
    for each in children:
        each.say()
    assert [each.expect("DONE") for each in children] == ["ready"] * 3
    assert_same(load_file(next(place.glob("model-00001*"))), {"a.weight": TENSORS["a.weight"]})
    assert_in_order(place, [place])


def test_another_process_is_not_waited_for_without_end(folder, place, configure):
    configure(wait_timeout_s=0.1)
    busy = pytest.raises(shmload.ViewBusy, match=r"0\.1 s")
    with standing_views.changing_view(str(place), 0), busy:
        shmload.view_directory(folder, place)


def test_names_that_cannot_be_exchanged(folder, place, monkeypatch):
    monkeypatch.setattr(view_folder, "exchange_names", lambda one, other: False)
    shmload.view_directory(folder, place, dtype="float16")
    shmload.view_directory(folder, place, dtype="bfloat16", replace=True)
    found = load_file(next(place.glob("model-00001*")))
    assert_same(found, {"a.weight": as_bf16(TENSORS)["a.weight"]})
    assert_in_order(place, [place])
