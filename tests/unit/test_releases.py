"""The README, `pyproject.toml` and the pins say which releases of the libraries are supported."""

import tomllib
from pathlib import Path

import pytest

from shmload._compat import TESTED

_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TESTED)
def test_each_page_and_pin_says_the_same(name):
    oldest, newest = TESTED[name]
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert f"{name}>={oldest}" in project["dependencies"]
    assert f" {name} {oldest} to {newest}" in (_ROOT / "README.md").read_text()
    assert f"\n{name}=={newest}." in (_ROOT / "constraints.txt").read_text()
    assert f"\n{name}=={oldest}." in (_ROOT / "constraints-oldest.txt").read_text()
