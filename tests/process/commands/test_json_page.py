"""docs/operate.md says what --json prints: the page is compared with the commands' own answers."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from running_place import Running
from warming import CHILD, begun

import shmload
from shmload import _doctor
from shmload._cli.main import main
from shmload._cli.output import SCHEMA_VERSION

_PAGE = Path(__file__).parents[3] / "docs" / "operate.md"
_OPTIONAL = {"error", "left_out", "placement"}


@pytest.fixture(scope="module")
def page():
    """For each command and each kind of object, the text beside each field."""
    text = _PAGE.read_text().partition("\n## What `--json` prints\n")[2]
    answers, *objects = text.split("\n### ")
    found = {}
    for command, fields in re.findall(r"^- `(shmload [\w ]+)`: (.+)$", answers, re.MULTILINE):
        found[command] = dict(re.findall(r"`(\w+)`, (.+?)(?=; `\w+`, |$)", fields))
    for section in objects:
        found[section.partition("\n")[0].lower()] = {
            name: what
            for names, what in re.findall(r"^- (`.+?`): (.+)$", section, re.MULTILINE)
            for name in re.findall(r"\w+", names)
        }
    return found


def compare(page, section, answer):
    """Compare an object of an answer with its section, and the objects in it with theirs."""
    fields = page[section]
    if "error" in answer:
        assert answer.keys() in ({"source", "error"}, {"directory", "error"})
    else:
        wanted = answer.keys() | (fields.keys() & _OPTIONAL)
        assert fields.keys() == wanted, f"docs/operate.md, section {section}: other fields"
    for name, value in answer.items():
        link = re.match(r"(?:list of|one) \[\w+\]\(#(\w+)\)", fields[name])
        if link and value is not None:
            for each in value if isinstance(value, list) else [value]:
                compare(page, link[1], each)
        else:
            assert not isinstance(value, dict) or name in _OPTIONAL | {"times_s"}, (section, name)
            assert not (isinstance(value, list) and value and isinstance(value[0], dict)), name


@pytest.fixture
def ask(page, command):
    """Run a command with --json, compare what it prints with the page, and return it."""

    def ask(verb, *arguments, expected=0):
        code, printed, _ = command(verb, *arguments, "--json")
        assert code == expected
        answer = json.loads(printed)
        assert list(answer)[:2] == ["schema_version", "command"]
        assert (answer.pop("schema_version"), answer.pop("command")) == (SCHEMA_VERSION, verb)
        compare(page, f"shmload {verb}", answer)
        return answer

    return ask


def test_every_command_with_json_has_a_section(page):
    commands = {
        f"shmload {name}"
        for name, command in main.commands.items()
        if any(parameter.name == "as_json" for parameter in command.params)
    }
    assert commands <= page.keys()
    assert len(commands) >= 9


def test_answers_about_what_is_resident(ask, checkpoint, folder, child):
    assert ask("plan", folder, "--dtype", "bfloat16", "--keep")["decode_nbytes"] > 0
    reports = ask("warm", folder, "/no/such/model", "--quiet", expected=1)["reports"]
    assert [*reports[1]] == ["source", "error"]
    holder = child(CHILD, "warm", checkpoint)
    begun(holder)
    holder.expect("AT")
    listed = ask("ls")
    assert len(listed["models"]) == len(listed["decoding"]) == 1
    assert listed["decoding"][0]["used_by"][0]["pid"] == holder.pid
    assert "BEING DECODED" in str(shmload.models())
    holder.process.kill()
    holder.wait()
    assert len(ask("verify")["sound"]) == 3
    assert len(ask("pin", folder)["pinned"]) == len(ask("unpin", folder)["unpinned"]) == 3
    assert ask("gc", "--dry-run")["removed"] == ask("gc")["removed"] != []
    assert len(ask("rm", "--all")["removed"]) == 3


def test_answers_about_view_directories(ask, folder, tmp_path):
    made = ask("view", folder, "--dtype", "bfloat16", "--dir", tmp_path / "view", "--quiet")
    assert made["directory"] == str(tmp_path / "view")


def test_answers_of_and_without_a_service(ask, service, shards):
    assert ask("status", expected=1)["service"] is None
    process = service()
    ask("warm", shards[0], "--quiet")
    answer = ask("status")
    assert answer["service"]["pid"] == process.pid
    assert len(answer["models"]) == 1
    assert ask("shutdown")["pid"] == process.pid
    process.expect("STOPPING=1")
    process.expect("ENDED")


def test_answers_about_templates(page):
    place = Running(Path(tempfile.mkdtemp(prefix="run-", dir="/tmp")))
    try:
        place.environment["SHMLOAD_RUN_IMPORTS"] = "json"
        for word in ("warm", "ls", "stop"):
            answer = json.loads(place.shmload("template", word, "--json").stdout)
            assert answer.pop("schema_version") == SCHEMA_VERSION
            assert answer.pop("command") == f"template {word}"
            compare(page, f"shmload template {word}", answer)
            assert all(answer.values())
    finally:
        place.close()


def test_answer_of_the_doctor(ask, monkeypatch):
    monkeypatch.setattr(_doctor, "has_pidfds", lambda: False)
    findings = ask("doctor", expected=1)["findings"]
    assert {"kernel": "bad"}.items() <= {each["name"]: each["state"] for each in findings}.items()
