"""An error of a command is one line on stderr and an exit code."""

import pytest
from click.testing import CliRunner

from shmload._cli.main import main
from shmload._templates import place


@pytest.mark.parametrize("command", ["ls", "stop", "warm"])
def test_directory_of_templates_that_is_not_this_users_is_named(monkeypatch, tmp_path, command):
    monkeypatch.setattr(place, "runtime_folder", lambda: str(tmp_path))
    (tmp_path / "templates").write_text("planted")
    done = CliRunner().invoke(main, ["template", command])
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{tmp_path}/templates" in done.stderr
