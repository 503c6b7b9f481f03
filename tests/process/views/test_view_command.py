"""`shmload view` makes, lists and removes directories; `shmload warm --views` restores them."""

import os
import shutil

import pytest

import shmload


@pytest.fixture(autouse=True)
def state(configure, tmp_path):
    configure(state_dir=tmp_path / "state")


@pytest.fixture
def place(tmp_path):
    return tmp_path / "view"


def test_made_listed_and_removed(command, folder, place):
    code, printed, _ = command("view", folder, "--dtype", "bf16", "--dir", place)
    assert code == 0
    assert printed.startswith(f"{place}: ready, {folder} (bfloat16), ")
    assert printed.endswith(" in 3 segments\n")
    code, printed, _ = command("view", "--list")
    assert [line.split()[:2] for line in printed.splitlines()] == [
        ["DIRECTORY", "STATE"],
        [str(place), "ready"],
        ["1", "view"],
    ]
    assert command("view", "--remove", place)[:2] == (
        0,
        f"removed {place}; its weights stay resident until they must go\n",
    )
    assert command("view", "--list")[:2] == (0, "0 view directories\n")


def test_quiet_prints_nothing_but_errors(command, folder, checkpoint, place, evicts):
    assert command("view", folder, "--dir", place, "--quiet") == (0, "", "")
    assert command("warm", "--views", checkpoint, "--quiet") == (0, "", "")
    assert command("warm", checkpoint, folder, "--jobs", "2", "--quiet") == (0, "", "")
    code, printed, said = command("warm", checkpoint, "/no/such/model", "--quiet")
    assert (code, printed) == (1, "")
    assert said.startswith("shmload: /no/such/model: ")


@pytest.mark.parametrize(
    "arguments",
    [[], ["SOURCE"], ["--dir", "x"], ["SOURCE", "--list"], ["--list", "--remove", "x"]],
)
def test_wrong_usage(command, arguments):
    assert command("view", *arguments)[0] == 2


def test_removing_a_model_says_which_view_needs_it(command, folder, place):
    command("view", folder, "--dir", place, "--quiet")
    code, printed, said = command("rm", folder.name)
    assert (code, printed) == (1, "")
    assert said == (
        f"shmload: still in use: {folder.name} (float32, int64) by the view directory {place}; "
        f"`shmload view --remove {place}`\n"
    )
    assert command("rm", "--all")[0] == 1
    _, printed, _ = command("rm", "--all", "--dry-run")
    assert "in use, so they stay: 3 segments" in printed


def test_all_are_restored_but_those_whose_source_is_gone(
    command, folder, checkpoint, place, tmp_path
):
    command("view", checkpoint, "--dir", tmp_path / "first", "--quiet")
    command("view", folder, "--dir", place, "--quiet")
    for info in shmload.segments():
        os.unlink(f"/dev/shm/{info.name}")
    shutil.rmtree(checkpoint.parent)
    _, printed, _ = command("view", "--list")
    assert printed.splitlines()[-2:] == [
        f"{path}: its weights are not resident: `shmload warm --views`"
        for path in (tmp_path / "first", place)
    ]
    code, printed, said = command("warm", "--views")
    assert code == 1
    assert printed.startswith(f"{place}: ready")
    assert said.startswith(f"shmload: {tmp_path / 'first'}: ")
    assert [each.state for each in shmload.view_directories()] == ["empty", "ready"]


def test_nothing_to_warm_is_wrong_usage(command):
    assert command("warm")[0] == 2
    assert command("warm", "--views") == (0, "", "")


def test_garbage_collection_says_what_a_view_keeps(command, folder, place):
    command("view", folder, "--dir", place, "--quiet")
    os.utime(next(folder.glob("*.safetensors")))
    _, printed, _ = command("gc")
    assert printed.splitlines()[-1].endswith(
        ": a view directory needs it, so it stays, though its files have changed; see "
        "`shmload warm --views`"
    )
