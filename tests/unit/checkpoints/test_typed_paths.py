"""Paths as users type them: `~` is the home directory."""

from pathlib import Path

import pytest

import shmload
from shmload._checkpoints.wanted import Wanted, expand_home


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "models" / "stable-diffusion" / "unet").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_home_directory_is_expanded_and_the_type_stays(home):
    assert expand_home("~/models") == f"{home}/models"
    assert expand_home(Path("~/models")) == home / "models"
    assert expand_home("org/name") == "org/name"
    wanted = Wanted.parse("~/models", None, None, None, {}, function=shmload.warm)
    assert wanted.source == f"{home}/models"


def test_file_whose_name_begins_with_a_tilde_stays(home):
    (home / "~").mkdir()
    assert expand_home("~") == "~"
