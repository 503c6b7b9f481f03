"""A place for the templates and programs of tests, apart from those of the user."""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import run_to_end

from shmload._templates import look

_DEADLINE_S = 100.0
_LOOK_AGAIN_S = 0.2  # nothing tells that a template has changed, and each look takes a while


def wait_until_gone(pid):
    """Wait for the end of a process that is not a child."""
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        assert select.select([fd], [], [], _DEADLINE_S)[0]
        os.close(fd)


class Running:
    """A directory for sockets and one for programs, with short names."""

    def __init__(self, folder):
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        self.environment = kept | {"XDG_RUNTIME_DIR": str(folder)}

    def start_template(self, modules=None, environment=None):
        """Start a template that imports these modules, or the libraries; return its process id.

        Programs use it until another one is started.
        """
        given = self.environment if environment is None else environment
        given.pop("SHMLOAD_RUN_IMPORTS", None)
        if modules:
            given["SHMLOAD_RUN_IMPORTS"] = ",".join(modules)
        started = self.shmload("template", "warm", "--json", environment=given)
        assert started.returncode == 0, started.stderr
        return json.loads(started.stdout)["template"]["pid"]

    def shmload(self, *arguments, environment=None, **options):
        """Run the command line in the directory for programs; return how it ended."""
        command = [sys.executable, "-m", "shmload", *arguments]
        return self.run(command, env=environment or self.environment, **options)

    def run(self, command, **given):
        """Run a command in the directory for programs; return how it ended."""
        usual = {"cwd": self.work, "env": self.environment, "stdin": subprocess.DEVNULL}
        return run_to_end(command, **(usual | given))

    def call(self, *program):
        """Start a program by `shmload run`; return the caller, whose streams are pipes."""
        return subprocess.Popen(
            [sys.executable, "-m", "shmload", "run", "-v", *program],
            cwd=self.work,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @contextlib.contextmanager
    def held_back(self, environment=None):
        """Have the template of programs with these variables never get ready, in a block."""
        asked = "from shmload._templates import identity, place, variables\n"
        asked += "print(place.socket_of(identity.key_of(variables.first_environment())))"
        found = self.run(
            [sys.executable, "-c", asked], env=environment or self.environment, check=True
        )
        with open(f"{found.stdout.strip()}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def wait_for_templates(self, holds, deadline_s=_DEADLINE_S):
        """Look at the templates of this place until something holds of them; return them.

        Each look is a call: a process of the command line for each would keep a core busy.
        """
        deadline = time.monotonic() + deadline_s
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", self.environment["XDG_RUNTIME_DIR"])
            while not holds(found := look.templates()):
                assert time.monotonic() < deadline, found
                time.sleep(_LOOK_AGAIN_S)
        return found

    def close(self):
        """End the templates, and remove the directory."""
        self.kill_templates()
        shutil.rmtree(self.folder)

    def kill_templates(self):
        """End the templates, whatever they do, and wait for their ends: these free their locks."""
        for entry in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._is_template(Path(entry.path)):
                    os.kill(int(entry.name), signal.SIGKILL)
                    wait_until_gone(int(entry.name))

    def _is_template(self, process):
        return (
            os.fsencode(f"{self.folder}/shmload/templates/") in (process / "cmdline").read_bytes()
        )
