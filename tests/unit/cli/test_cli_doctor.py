"""`shmload doctor` prints its findings and sets its exit code by them."""

import json

import click.testing
import pytest

from shmload._cli.main import main
from shmload._doctor import doctor
from shmload._doctor.checks import Finding

WARNING = Finding("huge pages", "warn", "huge=never", "sudo mount")
HEALTH = Finding("kernel", "ok", "Linux 6.8")


@pytest.fixture
def run(monkeypatch):
    """Run the command on given findings; return its exit code and output."""

    def run_on(*findings, arguments=()):
        monkeypatch.setattr(doctor, "diagnose", lambda *_: iter(findings))
        done = click.testing.CliRunner().invoke(main, ["doctor", *arguments])
        return done.exit_code, done.output

    return run_on


def test_findings_are_aligned_with_their_remedies_below(run):
    code, output = run(HEALTH, WARNING)
    assert code == 0
    assert output.splitlines() == [
        "ok    kernel          Linux 6.8",
        "warn  huge pages      huge=never",
        "                      sudo mount",
    ]


def test_json_is_a_list_of_findings(run):
    code, output = run(HEALTH, WARNING, arguments=["--json"])
    assert code == 0
    assert json.loads(output)["findings"] == [
        {"name": "kernel", "state": "ok", "detail": "Linux 6.8", "remedy": None},
        {"name": "huge pages", "state": "warn", "detail": "huge=never", "remedy": "sudo mount"},
    ]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_what_is_bad_is_the_exit_code(run, arguments):
    assert run(Finding("kernel", "bad", "old", "reboot"), HEALTH, arguments=arguments)[0] == 1
