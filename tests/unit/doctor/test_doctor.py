"""The doctor finds what is wrong on a machine, and changes nothing."""

import contextlib
import os
import secrets

import pytest
import torch
import transformers
from safetensors.torch import save_file

from shmload import evict, pin, warm
from shmload._doctor import doctor
from shmload._doctor.checks import Finding
from shmload._doctor.doctor import diagnose
from shmload._host.descriptors import try_lock
from shmload._host.shm import SHM_DIR, shm_open
from shmload._segments.names import name_prefix, part_name
from shmload._segments.upkeep import collect_garbage, find_garbage
from shmload._service.keeper import Keeper
from shmload._version import TESTED
from shmload.errors import ArgumentError, UnknownDtype

# Leftovers ----------------------------------------------------------------------------------------


@pytest.fixture
def part(evicts):
    """A part abandoned by its builder, and its descriptor."""
    name = part_name(f"{name_prefix()}{secrets.token_hex(15)}")
    fd = shm_open(name, create=True, writable=True)
    yield name, fd
    os.close(fd)


@pytest.fixture
def view(evicts):
    path = SHM_DIR / f"{name_prefix()}view-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    return path


def test_garbage_is_named_and_stays(part, view):
    os.utime(view, (0, 0))
    names = {part[0], view.name}
    assert names <= set(find_garbage())
    assert names <= set(os.listdir(SHM_DIR))
    assert names <= set(collect_garbage())
    assert not names & set(os.listdir(SHM_DIR))


def test_what_is_in_use_is_no_garbage(part, view):
    name, fd = part
    assert try_lock(fd, exclusive=True)
    assert not {name, view.name} & set(find_garbage())  # the view is younger than a minute


# The whole ----------------------------------------------------------------------------------------


@pytest.fixture
def no_copies(monkeypatch):
    monkeypatch.setattr(doctor, "measure_copies", list)


@pytest.fixture
def examine(no_copies):
    """Diagnose; return the findings by name."""
    return lambda *source: {finding.name: finding for finding in diagnose(*source)}


def test_everything_is_examined_and_has_its_say(examine):
    found = examine()
    assert list(found) == [
        "shared memory",
        "huge pages",
        "leftovers",
        "logout",
        "control group",
        "machine memory",
        "budget",
        "settings",
        "locked memory",
        "page locks",
        "open files",
        "kernel",
        "libraries",
        "devices",
    ]
    for finding in found.values():
        assert finding.detail
        assert (finding.state == "ok") == (finding.remedy is None)


def test_source_is_examined_without_being_changed(examine, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0)}, path)
    found = examine(str(path))
    assert "1 file on" in found["source"].detail
    assert "1 of 1 file is in it" in found["read speed"].detail
    assert found["read speed"].state == "ok"
    assert found["reading"].detail.endswith("the file is small")


def test_room_is_judged_by_the_source(examine, monkeypatch, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    monkeypatch.setattr(doctor, "shm_free_nbytes", lambda: 3 << 20)
    assert examine()["shared memory"].state == "bad"
    wide = examine(str(path))["shared memory"]
    assert (wide.state, "the source takes 4.00 MiB" in wide.detail) == ("bad", True)
    assert examine(str(path), "bfloat16")["shared memory"].state == "ok"


def test_budget_is_judged_by_the_source(examine, configure, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    assert examine(str(path))["budget"].detail.startswith("none: ")
    configure(budget="3MiB")
    wide = examine(str(path))["budget"]
    assert wide.detail == "3.00 MiB free of 3.00 MiB, SHMLOAD_BUDGET; the source takes 4.00 MiB"
    assert (wide.state, "raise SHMLOAD_BUDGET" in wide.remedy) == ("bad", True)
    assert examine(str(path), "bfloat16")["budget"].state == "ok"
    configure(budget="xx")
    with pytest.raises(ArgumentError, match="SHMLOAD_BUDGET"):
        examine()


def test_budget_is_that_of_the_service(examine, configure):
    configure(budget="3GiB")
    assert "3.00 GiB, SHMLOAD_BUDGET" in examine()["budget"].detail
    with contextlib.closing(Keeper(40 << 30)):
        assert "40.00 GiB, the service's budget" in examine()["budget"].detail


def test_idle_models_are_room_unless_pinned_or_the_source_itself(examine, monkeypatch, tmp_path):
    other, path = tmp_path / "other.safetensors", tmp_path / "model.safetensors"
    for each in (other, path):
        save_file({"a": torch.zeros(1 << 20)}, each)
    monkeypatch.setattr(doctor, "shm_free_nbytes", lambda: 3 << 20)
    warm(other)
    try:
        found = examine(str(path))["shared memory"]
        assert (found.state, "4.00 MiB more of idle models" in found.detail) == ("ok", True)
        assert examine(str(other))["shared memory"].detail.count("idle") == 0
        pin(other)
        assert examine(str(path))["shared memory"].state == "bad"
    finally:
        evict(other)


def test_advice_repeats_the_dtype(examine, monkeypatch, tmp_path):
    path = tmp_path / "a model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, path)
    monkeypatch.setattr("shmload._doctor.checks._TELLING_NBYTES", 0)
    monkeypatch.setattr("shmload._doctor.checks._SLOW_CACHE_BYTES_PER_S", 1e15)
    found = examine(str(path), {"default": "bfloat16", "vae": "float32"})["read speed"]
    assert found.remedy == f"shmload warm '{path}' --dtype bfloat16 --dtype vae=float32"


def test_resident_source_takes_no_more_room(examine, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    warm(path, dtype="bfloat16")
    found = examine(str(path), "bfloat16")
    evict(path)
    assert "the source takes 0 B" in found["machine memory"].detail
    assert "KiB resident" in found["source"].detail


def test_unknown_dtype_is_an_error_and_no_finding(examine, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(10)}, path)
    with pytest.raises(UnknownDtype):
        examine(str(path), "bfloat61")


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_source_that_cannot_be_had_is_a_finding(examine, tmp_path, name):
    (tmp_path / "empty").mkdir()
    found = examine(str(tmp_path / name))
    assert found["source"].state == "bad"
    assert "read speed" not in found
    assert "devices" in found


def test_variable_of_redirect_is_known(examine, monkeypatch):
    monkeypatch.setenv("SHMLOAD_REDIRECT", "1")
    assert examine()["settings"].state == "ok"


def test_variable_that_is_no_setting_is_named(examine, monkeypatch):
    monkeypatch.setenv("SHMLOAD_BUGDET", "20GiB")
    found = examine()["settings"]
    assert found.state == "warn"
    assert found.detail == "SHMLOAD_BUGDET is no setting; did you mean 'SHMLOAD_BUDGET'?"
    assert found.remedy == "unset SHMLOAD_BUGDET"


def test_relative_path_is_told(examine, monkeypatch):
    monkeypatch.setenv("SHMLOAD_CACHE_DIR", "run/cache")
    found = examine()["settings"]
    assert found.state == "warn"
    assert found.detail.startswith("SHMLOAD_CACHE_DIR is a relative path")
    assert found.remedy == "unset SHMLOAD_CACHE_DIR"


def test_settings_that_have_a_value_are_shown(examine, monkeypatch):
    monkeypatch.setenv("SHMLOAD_HEADROOM", "0.2")
    found = examine()["settings"]
    assert (found.state, "SHMLOAD_HEADROOM=0.2" in found.detail) == ("ok", True)


def test_machine_without_shared_memory_is_bad(examine, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "SHM_DIR", tmp_path / "missing")
    found = examine()
    assert found["shared memory"].state == "bad"
    assert "leftovers" not in found


def test_library_that_is_newer_than_those_of_the_tests_is_named(examine, monkeypatch):
    assert examine()["libraries"].state == "ok"
    monkeypatch.setitem(TESTED, "transformers", ("4.0", "4.2"))
    monkeypatch.setitem(TESTED, "no-such-package", ("1.0", "1.1"))
    found = examine()["libraries"]
    version = transformers.__version__
    assert found.state == "warn"
    assert found.detail.endswith(f", transformers {version}; tested up to transformers 4.2")
    assert found.remedy == "pip install 'transformers~=4.2.0'"


def test_libraries_need_not_be_there(examine, monkeypatch):
    monkeypatch.setattr(doctor, "TESTED", {"no-such-package": ("1.0", "1.1")})
    assert examine()["libraries"] == Finding("libraries", "ok", "none is installed")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ImportError("libcudart.so.12: cannot open\nmore"), "pip install"),
        (RuntimeError("CUDA error: out of memory\nmore"), "nvidia-smi"),
    ],
)
def test_broken_torch_is_a_finding(examine, monkeypatch, error, remedy):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "measure_copies", fail)
    found = examine()["devices"]
    assert found.state == "bad"
    assert remedy in found.remedy
    assert "more" not in found.detail


def test_torch_need_not_be_there(examine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert examine()["devices"] == Finding("devices", "ok", "torch is not installed")
