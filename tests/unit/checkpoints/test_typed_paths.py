"""Paths as users type them: `~` is the home directory, and a mistyped path gets a hint."""

from pathlib import Path

import pytest

import shmload
from shmload._checkpoints.hub import find_source
from shmload._checkpoints.wanted import Wanted, expand_home, nearest_path


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


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("models/stabel-diffusion", "models/stable-diffusion"),
        ("model/stable-diffusion/unet", "models/stable-diffusion/unet"),
        ("Models/other", "models"),
        ("models/stable-diffusion/unte", "models/stable-diffusion/unet"),
        ("models/flux", None),
        ("models/12", None),
        ("a\0b", None),
        ("x" * 300, None),
    ],
)
def test_nearest_path_is_a_neighbour_of_what_is_missing(home, given, near):
    for root in ("", f"{home}/"):
        found = nearest_path(root + given)
        assert found == (None if near is None else Path(root + near))


@pytest.mark.parametrize("given", ["models/stabel-diffusion", "/{}/models/stabel-diffusion"])
def test_source_that_is_nowhere_is_refused_with_the_hint(home, given):
    with pytest.raises(shmload.SourceNotFound, match=r"did you mean .*models/stable-diffusion"):
        find_source(Wanted(source=given.format(str(home)[1:])))
