"""An error or an interrupt of any command is one line on stderr and an exit code."""

import signal

from click.testing import CliRunner

import shmload
from shmload._cli.main import main


def test_interrupt_is_one_line_and_130(monkeypatch):
    monkeypatch.setattr(shmload, "warm", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    done = CliRunner().invoke(main, ["warm", "source"])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "shmload: interrupted\n")
