"""The files that docs/servers.md prints work as printed."""

import os
import re
from pathlib import Path

import pytest
from children import run_to_end

_PAGE = Path(__file__).parents[3] / "docs" / "servers.md"


def recipes():
    """Return the files that the page prints, by their names in the first lines."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", _PAGE.read_text(), re.M | re.S)
    named = [(re.match(r"(?:#!.*\n)?# ([\w.-]+)\n", block), block) for block in blocks]
    return {name[1]: block for name, block in named if name}


@pytest.fixture
def folder(tmp_path):
    for name, text in recipes().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "python-with-libraries").chmod(0o755)
    return tmp_path


@pytest.fixture
def commands(tmp_path):
    """Commands named `python` and `shmload` that print their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python", "shmload"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@"\nexit "${{CODE:-0}}"\n')
        path.chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_page_has_these_files():
    assert sorted(recipes()) == [
        "Dockerfile",
        "app.py",
        "app.service",
        "entrypoint.sh",
        "python-with-libraries",
        "serve.py",
    ]


@pytest.mark.parametrize("options", [[], ["-B", "-Werror"]])
def test_options_of_python_stand_before_the_module(folder, commands, options):
    command = ["sh", folder / "python-with-libraries", *options, "-c", "print(1)", "--more"]
    ended = run_to_end(command, env=commands, check=True)
    wanted = ["python", *options, "-m", "shmload", "run", "-c", "print(1)", "--more"]
    assert ended.stdout.split() == wanted


@pytest.mark.parametrize("code", [0, 1])
def test_entry_point_warms_and_becomes_the_server(folder, commands, code):
    ended = run_to_end(
        ["sh", folder / "entrypoint.sh", "echo", "server"],
        env=commands | {"MODEL": "a model", "CODE": str(code)},
    )
    warmed = "shmload warm a model --dtype bfloat16 --quiet\n"
    assert (ended.returncode, ended.stdout) == (code, warmed + ("" if code else "server\n"))
