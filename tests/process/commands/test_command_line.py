"""A command ends with the right exit code, and a failed one prints one sentence."""

import os
import signal
import subprocess
import sys

import pytest

_SHMLOAD = [sys.executable, "-m", "shmload"]


def run(*arguments, **options):
    return subprocess.run(
        [*_SHMLOAD, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **{"stdout": subprocess.PIPE} | options,
    )


@pytest.mark.parametrize("arguments", [("ls", "--json"), ("serve", "--help"), ("--version",)])
def test_output_that_cannot_be_written_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "shmload: the output cannot be written: No space left on device\n"


def test_option_of_run_is_escaped():
    done = run("run", "--\x1b[31m")
    assert done.stderr.startswith("shmload run: no such option: '--\\x1b[31m'\n")


def test_closed_pipe_gives_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = run("ls", stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")


def test_argument_that_cannot_work_is_wrong_usage(tmp_path, monkeypatch):
    source = tmp_path / "model.safetensors"
    source.write_bytes(b"")
    for command in ("warm", "plan"):
        done = run(command, source, "--dtype", "bfloat17")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "unknown dtype 'bfloat17'" in done.stderr
    monkeypatch.setenv("SHMLOAD_REMEMBER", "perhaps")
    done = run("doctor")
    assert done.returncode == 2
    assert "SHMLOAD_REMEMBER is 'perhaps', which it cannot be" in done.stderr


def test_interrupt_before_the_first_command_line_is_read_is_one_sentence(tmp_path):
    # Replaces the real click, and is interrupted as by Ctrl-C.
    (tmp_path / "click.py").write_text(
        f"import os, signal\nos.kill(os.getpid(), {int(signal.SIGINT)})\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run("ls", env=os.environ | {"PYTHONPATH": path})
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "shmload: interrupted\n"
