"""A template notes which variables an import has read; a copy of all is no reading."""

import os

import pytest

from shmload._templates.recorder import _watching


@pytest.fixture
def read(monkeypatch):
    """Watch this process's variables; return what was looked up."""
    monkeypatch.setenv("FIRST_VARIABLE", "1")
    found = {}
    kind = os.environ.__class__
    os.environ.__class__ = _watching(kind, found)
    yield found
    os.environ.__class__ = kind


@pytest.mark.parametrize(
    "copy",
    [
        dict,
        lambda variables: variables.copy(),
        lambda variables: {**variables},
        lambda variables: dict(variables.items()),
        lambda variables: {name: variables[name] for name in variables},
        lambda variables: list(variables.values()),
        lambda variables: any(name.startswith("COLAB_") for name in variables),
    ],
)
def test_copy_of_all_is_no_reading(read, copy):
    copy(os.environ)
    assert read == {}
    assert os.environ["FIRST_VARIABLE"] == "1"
    assert read == {"FIRST_VARIABLE": "1"}


@pytest.mark.parametrize(
    ("look", "found"),
    [
        (lambda: os.environ.get("MISSING_VARIABLE"), {"MISSING_VARIABLE": None}),
        (lambda: "FIRST_VARIABLE" in os.environ, {"FIRST_VARIABLE": "1"}),
        (lambda: (list(os.environ), os.getenv("FIRST_VARIABLE")), {"FIRST_VARIABLE": "1"}),
    ],
)
def test_lookup_is_a_reading(read, look, found):
    look()
    assert read == found
