"""What a template notes of the pipelines that programs load, and how branches share the memory."""

import importlib.metadata
import os

import pytest

from shmload._building import prepared
from shmload._templates import pipelines
from shmload._templates.branches import MAX_BRANCHES, branches_to_end, has_room
from shmload._templates.imports import Unfit
from shmload._templates.messages import Program
from shmload._templates.notes import Notes, note_warmed, warmed
from shmload._templates.pipelines import Pipelines
from shmload._templates.variables import name_of

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def told(monkeypatch):
    """What programs tell their template."""
    for name in ("on_load", "hidden"):
        monkeypatch.setattr(prepared, name, None)
    found = []
    monkeypatch.setattr(pipelines, "tell", lambda path, noted: found.append(noted))
    return found


def load(program, source):
    """Make a load in a program."""
    modules = {"shmload._building.prepared": prepared}
    made = Pipelines("key", modules, stash=None, recorder=None)
    made.begin(name_of(Program("script", program, [], [], "", 1)), prepares=True)
    request = prepared.request_of(source, "bfloat16", True, None)
    assert request is not None
    prepared.note(request, ())


def test_program_tells_what_it_has_loaded(told, tmp_path):
    load(b"app.py", str(tmp_path))
    (noted,) = told
    assert noted.program.endswith("/app.py")
    request = prepared.decode(noted.requests[0])
    assert (request.source, request.dtype, request.keep) == (str(tmp_path), "bfloat16", True)
    assert "os" in noted.modules


@pytest.mark.parametrize("place", ["program", "source"])
def test_load_with_a_name_that_is_no_utf8_succeeds(told, tmp_path, place):
    name = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(name)
    load(
        name if place == "program" else b"app.py",
        os.fsdecode(name) if place == "source" else str(tmp_path),
    )
    assert len(told) == (place == "program")


def test_note_of_one_program_is_not_lost_by_anothers():
    notes = Notes("key")
    for name in "abc":
        notes.add(name, (f"of {name}",), ["json"])
    notes.add("a", ("of c",), [])
    found = Notes("key")  # of the next template
    assert [found.of(name) for name in "abc"] == [("of c",), ("of b",), ("of c",)]
    assert found.all() == [("of c",), ("of b",)]
    assert found.modules_of("of b") == ["json"]


def test_program_that_loads_two_pipelines_is_known_by_both_from_its_first_load_on():
    notes = Notes("key")
    assert notes.add("a", ("1",), []) == ("1",)
    assert notes.add("a", ("1", "2"), []) == ("1", "2")
    assert notes.add("a", ("1",), []) == ("1", "2")
    assert notes.add("a", ("3",), []) == ("3",)


def test_number_of_notes_is_bounded():
    notes = Notes("key")
    for number in range(100):
        notes.add(str(number), ("1",), [])
    assert notes.of("0") == ()
    assert notes.of("99") == ("1",)


def test_last_warmed_pipelines_are_noted_for_later_templates():
    for number in range(6):
        note_warmed(str(number))
    note_warmed("3")
    assert warmed() == ["3", "5", "4", "2"]
    assert Notes("key").all()[0] == ("3",)


@pytest.mark.parametrize(
    ("private", "available", "ends"),
    [
        ([], 0, 0),
        ([100 * _MIB] * MAX_BRANCHES, 4096 * _MIB, 0),
        ([100 * _MIB] * (MAX_BRANCHES + 1), 4096 * _MIB, 1),
        ([100 * _MIB] * 3, 450 * _MIB, 1),
        ([100 * _MIB] * 3, 400 * _MIB, 2),
        ([100 * _MIB] * 3, 0, 3),
    ],
)
def test_least_recently_used_branches_end_where_memory_lacks(private, available, ends):
    assert branches_to_end(private, available) == ends


def test_branch_that_has_just_ended_is_not_started_again_at_once():
    """What one leaves is less than what one needs: no branch comes and goes."""
    assert not has_room(450 * _MIB + 150 * _MIB)
    assert has_room(2048 * _MIB)


# Imports ------------------------------------------------------------------------------------------

_HOMES = {"telemetry": ["telemetry-api"], "deep": ["deep"], "mine": ["mine"], "extra": ["extra"]}
_NEEDED = {
    "transformers": ["numpy>=1", 'telemetry_api; extra == "open"'],
    "telemetry-api": ["deep", 'extra; extra == "more"'],
}


@pytest.fixture
def installed(monkeypatch):
    """Packages of which transformers can use one, which needs another."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: _HOMES)
    monkeypatch.setattr(importlib.metadata, "requires", _NEEDED.get)


@pytest.mark.parametrize("name", ["json.decoder", "known.part", "telemetry.metrics", "deep"])
def test_load_ahead_may_import_what_the_libraries_need_or_can_use(installed, name):
    pipelines._require_libraries([name], ["known"])


@pytest.mark.parametrize("name", ["mine", "extra.part", "of_no_package"])
def test_load_ahead_may_import_nothing_else(installed, name):
    with pytest.raises(Unfit, match=f"imports {name.partition('.')[0]}, which is of no library"):
        pipelines._require_libraries([name], ["known"])
