"""A user without a home: containers with any user id, units of systemd."""

import pwd

import pytest
import torch

import shmload
from shmload._host import memo
from shmload._settings import settings
from shmload.errors import ArgumentError


@pytest.fixture
def homeless(monkeypatch):
    """Let this process have no home directory, and no directory for shmload's own files."""

    def no_entry(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "SHMLOAD_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings.cache_clear()
    memo._say.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        ["warm", "--dtype", "bfloat16", "{}"],
        ["plan", "{}"],
        ["ls"],
        ["gc"],
        ["doctor", "{}"],
        ["template", "ls"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("homeless", "evicts")
def test_commands_work(checkpoint, words, command):
    shmload.warm(checkpoint)
    code, _, said = command(*(word.format(checkpoint) for word in words))
    assert code == 0, said


@pytest.mark.libraries
@pytest.mark.usefixtures("homeless", "evicts")
def test_loads_work_and_the_log_says_once_that_nothing_is_remembered(saved, caplog):
    caplog.set_level("INFO", "shmload")
    for dtype in ("float16", "bfloat16"):
        pipe = shmload.load_pipeline(saved("stable-diffusion"), dtype=dtype)
        assert pipe.unet.dtype is getattr(torch, dtype)
    (said,) = (text for text in caplog.messages if "remembered" in text)
    assert "is not written" in said
    assert "SHMLOAD_CACHE_DIR" in said


def test_directory_in_an_unknown_home_is_refused_by_name(homeless, monkeypatch):
    monkeypatch.setenv("SHMLOAD_CACHE_DIR", "~/cache")
    with pytest.raises(ArgumentError, match=r"SHMLOAD_CACHE_DIR is '~/cache', but no such home"):
        settings()
