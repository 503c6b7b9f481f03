"""What a file is called steers no terminal and stops no verb, whatever its bytes and the locale."""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shmload._cli.main import main

# A screen that is cleared, a title that is set, a line that is made up, text that runs backwards.
_STEERING = "\x1b[2J\x1b]0;x\x07\x9b31m\nshmload: all is well\u202e"
_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_UTF8 = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
_NAMES = {"steering": f"{_STEERING}café".encode(), "no text": b"caf\xe9"}
# They need a terminal, run until they are ended, or take no name of weights.
_APART = {"serve", "run", "save", "template"}
_REFUSED = [
    ("plan", "{weights}.missing.safetensors"),
    ("warm", "{broken}"),
    ("pin", "{weights}.missing"),
    ("view", "{weights}", "--dtype", "float16", "--dir", "{taken}"),
    ("status",),  # no service runs
    ("shutdown",),
]
_VERBS = [
    ("plan", "{weights}", "--dtype", "bfloat16"),
    ("warm", "{weights}", "--dtype", "bfloat16", "--pin"),
    ("ls",),
    ("ls", "--long"),
    ("ls", "--json"),
    ("verify",),
    ("unpin", "{weights}"),
    ("pin", "{weights}"),
    ("view", "{weights}", "--dtype", "bfloat16", "--dir", "{view}"),
    *_REFUSED,
    ("rm", "{weights}"),
    ("gc", "--dry-run"),
    ("gc",),
    ("doctor", "{weights}"),
]


def test_every_verb_is_tried():
    assert {verb for verb, *_ in _VERBS} | _APART == set(main.commands)


@pytest.fixture
def place(tmp_path, evicts):
    environment = os.environ | {
        "SHMLOAD_CACHE_DIR": str(tmp_path / "cache"),
        "SHMLOAD_INLINE_NBYTES": "0",
    }
    return os.fsencode(tmp_path), environment


# Each line on stdin has the words of a command, in hexadecimal; it is run in a fork, as if Python
# had been started for it in this locale.
_SERVER = """
import os, sys
from shmload.__main__ import run
from shmload._cli import main
for line in iter(sys.stdin.buffer.readline, b""):
    out, err, *words = map(bytes.fromhex, line.decode().split())
    if (pid := os.fork()) == 0:
        for target, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
        sys.argv = ["shmload", *map(os.fsdecode, words)]
        run()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@contextlib.contextmanager
def commands(folder, environment, locale):
    """Return what runs a command in a locale, and gives its exit code and its output."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=environment | locale,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:

        def run(verb, names):
            arguments = [os.fsencode(each) for each in verb]
            for name, path in names.items():
                arguments = [each.replace(b"{%b}" % name, path) for each in arguments]
            files = [folder + b"/out", folder + b"/err"]
            words = [*files, b"-v", *arguments]
            server.stdin.write(b" ".join(word.hex().encode() for word in words) + b"\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            out, err = (Path(os.fsdecode(path)).read_bytes() for path in files)
            assert b"Traceback" not in err, (verb, err)
            assert code in (0, 1), (verb, err)
            for line in (out + err).decode("utf-8", "surrogateescape").split("\n"):
                assert line.isprintable(), (verb, line)
                assert not line.startswith("shmload: all is well"), verb
            return code, err

        yield run
        server.stdin.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "locale"),
    [("steering", _ASCII), ("no text", _UTF8)],
    ids=lambda value: value["LC_ALL"] if isinstance(value, dict) else value,
)
def test_every_verb_takes_a_name(place, name, locale):
    folder, environment = place
    names = {
        b"weights": folder + b"/" + _NAMES[name] + b".safetensors",
        b"view": folder + b"/" + (b"view" if name == "no text" else _NAMES[name]),
        b"taken": folder + b"/plain",
        b"broken": folder + b"/" + _NAMES[name] + b"-broken.safetensors",
    }
    plain = os.fsdecode(folder + b"/plain")
    save_file({"a": torch.rand(64, 64)}, plain)
    shutil.copy(plain, names[b"weights"])
    with open(names[b"broken"], "wb") as file:
        file.write(b"\x08\0\0\0\0\0\0\0{}")
    # Loaded by a process with another locale than those that list it.
    with commands(folder, environment, _UTF8) as run:
        code, said = run(("warm", "{weights}", "--dtype", "float16"), names)
        assert code == 0, said
    with commands(folder, environment, locale) as run:
        for verb in _VERBS:
            code, said = run(verb, names)
            assert code == (verb in _REFUSED) or verb[0] == "doctor", (verb, said)
