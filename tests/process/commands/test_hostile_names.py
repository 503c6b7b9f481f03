"""What a file is called steers no terminal and stops no verb, whatever its bytes and the locale."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# A screen that is cleared, a title that is set, a line that is made up, text that runs backwards.
_STEERING = "\x1b[2J\x1b]0;x\x07\x9b31m\nshmload: all is well\u202e"
_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
_UTF8 = {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
_NAMES = {"steering": f"{_STEERING}café".encode(), "no text": b"caf\xe9"}
_REFUSED = [
    ("plan", "{weights}.missing.safetensors"),
    ("warm", "{broken}"),
    ("pin", "{weights}.missing"),
    ("view", "{weights}", "--dtype", "float16", "--dir", "{taken}"),
]
_VERBS = [
    ("warm", "{weights}", "--dtype", "bfloat16", "--pin"),
    ("plan", "{weights}", "--dtype", "bfloat16"),
    ("ls",),
    ("ls", "--long"),
    ("verify",),
    ("view", "{weights}", "--dtype", "bfloat16", "--dir", "{view}"),
    *_REFUSED,
    ("gc",),  # it is current, whatever the locale
    ("rm", "{weights}"),
]


def run(verb, names, environment):
    """Run a command, check all that it prints, and return its exit code and its errors."""
    words = [os.fsencode(each) for each in verb]
    for name, path in names.items():
        words = [each.replace(b"{%b}" % name, path) for each in words]
    command = [os.fsencode(sys.executable), b"-m", b"shmload", b"-v", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert b"Traceback" not in ended.stderr, (verb, ended.stderr)
    for line in (ended.stdout + ended.stderr).decode("utf-8", "surrogateescape").split("\n"):
        assert line.isprintable(), (verb, line)
        assert not line.startswith("shmload: all is well"), verb
    return ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "locale"),
    [("steering", _ASCII), ("no text", _UTF8)],
    ids=lambda value: value["LC_ALL"] if isinstance(value, dict) else value,
)
def test_every_verb_takes_a_name(tmp_path, evicts, name, locale):
    environment = os.environ | {"SHMLOAD_CACHE_DIR": str(tmp_path / "cache")}
    folder, plain = os.fsencode(tmp_path), tmp_path / "plain"
    names = {
        b"weights": folder + b"/" + _NAMES[name] + b".safetensors",
        b"view": folder + b"/" + (b"view" if name == "no text" else _NAMES[name]),
        b"taken": os.fsencode(plain),
        b"broken": folder + b"/" + _NAMES[name] + b"-broken.safetensors",
    }
    save_file({"a": torch.rand(64, 64)}, plain)
    shutil.copy(plain, names[b"weights"])
    Path(os.fsdecode(names[b"broken"])).write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    # Loaded by a process with another locale than those that list it.
    code, said = run(("warm", "{weights}", "--dtype", "float16"), names, environment | _UTF8)
    assert code == 0, said
    for verb in _VERBS:
        code, said = run(verb, names, environment | locale)
        assert code == (verb in _REFUSED), (verb, said)
