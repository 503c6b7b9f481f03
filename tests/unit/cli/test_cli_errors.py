"""An error or an interrupt of any command is one line on stderr and an exit code."""

import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

import shmload
from shmload._cli.main import main
from shmload._templates import place


def test_interrupt_is_one_line_and_130(monkeypatch):
    monkeypatch.setattr(shmload, "warm", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    done = CliRunner().invoke(main, ["warm", "source"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "shmload: interrupted\n")


@pytest.mark.parametrize("command", ["ls", "stop", "warm"])
def test_directory_of_templates_that_is_not_this_users_is_named(monkeypatch, tmp_path, command):
    monkeypatch.setattr(place, "runtime_folder", lambda: str(tmp_path))
    (tmp_path / "templates").write_text("planted")
    done = CliRunner().invoke(main, ["template", command])
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{tmp_path}/templates" in done.stderr


def test_closed_stdout_is_no_traceback():
    done = subprocess.run(
        ["sh", "-c", '"$0" -m shmload ls >&-', sys.executable],
        stderr=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
