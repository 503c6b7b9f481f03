"""What waits for the judge: newest first, and no more than its programs may come back for."""

import os
import time

import msgspec
import pytest
from children import run_to_end

from shmload._building import queued
from shmload._building.queued import Program, Queue, Work
from shmload._host.descriptors import Lock

_PROGRAM = Program("/usr/bin/python3", (), ("/here",), ())


@pytest.fixture
def waiting(tmp_path):
    folder = tmp_path / "queue"
    folder.mkdir()
    return Queue(folder)


@pytest.fixture
def put(waiting, tmp_path):
    """Leave work that was asked for some seconds ago."""
    (tmp_path / "cache").mkdir()

    def leave(key, age_s=0.0, **fields):
        given = {"cache": str(tmp_path / "cache")} | fields
        work = Work(key=key, program=_PROGRAM, request=b"", **given)
        waiting.put(work)
        asked_at = time.time() - age_s
        os.utime(waiting.lock_path.with_name(work.name), (asked_at, asked_at))
        return work

    return leave


def keys(waiting):
    return [work.key for _, work in waiting.waiting()]


def test_newest_comes_first(waiting, put):
    for key, age_s in (("old", 30), ("new", 1), ("older", 60)):
        put(key, age_s)
    assert keys(waiting) == ["new", "old", "older"]
    put("older")
    assert keys(waiting) == ["older", "new", "old"]


def test_what_no_program_has_come_back_for_is_dropped(waiting, put):
    put("kept", 3500)
    left = put("left", 3700)
    assert keys(waiting) == ["kept"]
    assert not waiting.lock_path.with_name(left.name).exists()


def test_no_more_waits_than_is_worked_off_in_minutes(waiting, put):
    for number in range(70):
        put(str(number), number)
    assert keys(waiting) == [str(number) for number in range(64)]


def test_work_for_a_cache_that_is_gone_is_dropped(waiting, put, tmp_path):
    put("kept")
    put("gone", cache=str(tmp_path / "no such"))
    assert keys(waiting) == ["kept"]


def test_same_key_for_another_cache_is_other_work(waiting, put, tmp_path):
    (tmp_path / "other").mkdir()
    put("one")
    put("one", cache=str(tmp_path / "other"))
    assert keys(waiting) == ["one"] * 2


def test_taken_work_waits_no_more(waiting, put):
    work = put("one")
    (path, _) = next(waiting.waiting())
    assert waiting.take(path) == work
    assert keys(waiting) == []
    assert waiting.taken() == work
    assert waiting.take(path) is None


def test_work_of_a_judge_that_died_is_told(waiting, put):
    work = put("one")
    waiting.take(next(waiting.waiting())[0])
    assert Queue(waiting.lock_path.parent).taken() == work
    waiting.done()
    assert waiting.taken() is None


def test_damaged_work_is_dropped(waiting):
    waiting.lock_path.with_name("damaged").write_bytes(b"no message")
    assert keys(waiting) == []
    assert list(waiting.lock_path.parent.iterdir()) == []


def test_folder_that_others_can_enter_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = queued.queue().lock_path.parent
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="lets others in"):
        queued.queue()


def test_program_knows_what_decides_a_build_and_no_secret(monkeypatch):
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "error")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SHMLOAD_CACHE_DIR", "/elsewhere")
    program = Program.of_this_process()
    assert ("DIFFUSERS_VERBOSITY", "error") in program.variables
    assert b"secret" not in msgspec.json.encode(program)
    monkeypatch.setenv("DIFFUSERS_VERBOSITY", "info")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    environment = program.environment
    assert environment["DIFFUSERS_VERBOSITY"] == "error"
    assert "TRANSFORMERS_VERBOSITY" not in environment
    assert "SHMLOAD_CACHE_DIR" not in environment
    assert "secret" not in environment.values()


def test_judge_imports_nothing_from_the_folder_in_which_a_program_ran(
    tmp_path, tmp_path_factory, monkeypatch
):
    """Another user may write there; a script does not import from there either."""
    for name in ("json", "shmload", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))  # nothing waits
    program = Program.of_this_process()
    with Lock.try_take(tmp_path / "lock") as lock:
        done = run_to_end(program.command(lock), env=program.environment, pass_fds=[lock.fd])
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "ran").exists()


def test_judge_finds_the_modules_that_its_program_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend("below")
    path = Program.of_this_process().path
    assert {str(tmp_path), str(tmp_path / "below")} <= {*path}
    assert all(map(os.path.isabs, path))
