"""What docs/service.md says about removing leaves no trace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import shmload

_PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def commands():
    """Return the commands of the page that remove what a user's loads have left."""
    section = _PAGE.read_text().partition("## Removing all traces")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)
    return next(block for block in blocks if "shmload rm" in block)  # not those of the system


def test_removing_as_documented_leaves_no_trace(
    service, checkpoint, monkeypatch, tmp_path, shm_names
):
    runtime, cache = tmp_path / "runtime", tmp_path / "cache"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("SHMLOAD_CACHE_DIR")
    process = service()
    shmload.warm(checkpoint, dtype="bfloat16")
    (cache / "shmload" / "rules").mkdir(parents=True)
    assert shm_names()
    program = tmp_path / "bin" / "shmload"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shmload "$@"\n')
    program.chmod(0o755)
    # The directory in /tmp is that of this user's own service, which does not belong to the test.
    script = commands().replace("/tmp/shmload-", f"{tmp_path}/shmload-")
    path = f"{program.parent}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-eu", "-c", script], env=os.environ | {"PATH": path}, check=True, timeout=60
    )
    assert process.wait() == 0
    assert shm_names() == []
    assert os.listdir(runtime) == []
    assert os.listdir(cache) == []
