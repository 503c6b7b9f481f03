"""The files that docs/server-recipes.md prints work as printed.

What needs uvicorn and gunicorn runs where `scripts/server-recipes` has installed them.
"""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import run_to_end

_SCRIPT = Path(__file__).parents[3] / "scripts" / "server-recipes"
_SERVERS = Path(os.environ.get("SHMLOAD_SERVERS", "~/.cache/shmload-servers")).expanduser()
needs_servers = pytest.mark.skipif(
    not (_SERVERS / "uvicorn").is_dir(), reason="scripts/server-recipes was not run here"
)


@pytest.fixture(scope="module")
def script():
    """scripts/server-recipes as a module."""
    loader = importlib.machinery.SourceFileLoader("server_recipes", str(_SCRIPT))
    spec = importlib.util.spec_from_loader("server_recipes", loader)
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = before
    return module


@pytest.fixture
def folder(script, saved, tmp_path):
    script.write_recipes(tmp_path, saved("stable-diffusion"))
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


def test_page_has_these_files(script):
    assert sorted(script.recipes()) == [
        "Dockerfile",
        "app.py",
        "app.service",
        "entrypoint.sh",
        "python-with-libraries",
        "serve.py",
    ]


def test_page_has_the_commands_that_are_measured(script):
    page = script._PAGE.read_text()
    for _, command in script._ROWS.values():
        before, _, _ = command.partition(" --port")
        assert before.partition(" --bind")[0] in page


@pytest.mark.libraries
def test_program_answers(folder, warm_python, evicts):
    ask = """
import asyncio
from app import app
async def ask():
    sent = []
    async def send(message):
        sent.append(message)
    await app({"type": "http"}, None, send)
    print(sent[0]["status"], sent[1]["body"].decode())
asyncio.run(ask())
"""
    (folder / "ask.py").write_text(f"import sys; sys.path.insert(0, {str(folder)!r})\n{ask}")
    ended = warm_python.run(folder / "ask.py")
    assert ended.stdout == "200 1 StableDiffusionPipeline\n", ended.stderr
    assert "from_pretrained" in (folder / "plain.py").read_text()


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


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd")
def test_unit_is_valid(folder, tmp_path):
    text = (folder / "app.service").read_text()
    (folder / "app.service").write_text(text.replace("/opt/ml/venv/bin", str(tmp_path / "bin")))
    (tmp_path / "bin").mkdir()
    for name in ("python", "shmload"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
    ended = run_to_end(["systemd-analyze", "verify", "--man=no", folder / "app.service"])
    assert "app.service:" not in ended.stderr, ended.stderr


@needs_servers
@pytest.mark.timeout(600)
@pytest.mark.libraries
def test_servers_answer_and_follow_an_edit(script, folder, evicts):
    (folder / "run").mkdir(mode=0o700)
    variables = script.environment(_SERVERS, folder)
    try:
        for name, (_, command) in script._ROWS.items():
            measure = script.time_edit if "edit" in name else script.time_start
            assert measure(command, folder, variables) > 0
    finally:
        subprocess.run(["shmload", "template", "stop"], env=variables, check=True)
