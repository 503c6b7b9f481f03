"""Programs that are forked from a process that has imported the model libraries.

A program that loads a pipeline spends 3 to 5 s of CPU time on imports; a fork that does nothing
takes 0.07 s (2 cores, November 2026). shmload is not imported before the fork, so each program
starts it by itself. Programs share a hash seed, and the umask, limits and signal mask that the
first of them found. They have no CUDA.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from forking_python import MAX_NBYTES

# Longer than the imports take on a busy machine.
_ANSWER_TIMEOUT_S = 100.0
_PROGRAM_TIMEOUT_S = 100.0
# Python and the libraries read these when they start.
_READ_AT_START = (
    *("ACCELERATE_", "DIFFUSERS_", "GOMP_", "HF_", "KMP_", "MKL_", "OMP_", "PYTHON", "TOKENIZERS_"),
    *("TORCH", "TRANSFORMERS_", "HOME", "TMPDIR", "XDG_CACHE_HOME"),
)
_SERVER = "import sys; sys.path.insert(0, sys.argv[1]); import forking_python as f; f.serve()"


class WarmPython:
    """Asks one process, which has imported the libraries, to fork each program."""

    def __init__(self):
        self._variables = _startup_variables()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 closed in `close`
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_ANSWER_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _SERVER, Path(__file__).parent],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        self.ask({"ready": True})  # here and not in the first test, which is not to be blamed

    def start(self, program, arguments, *, stdout=subprocess.PIPE, stderr):
        """Start a program with the variables and the working directory of this process.

        If a variable has changed that the libraries read at import, this starts a new Python.

        Args:
            program: its file, a Path, or its code, as for `python -c`.
            arguments: its `sys.argv[1:]`.
            stdout: a file for its output, or a pipe.
            stderr: a file for its errors.

        Returns:
            Its process, like `subprocess.Popen`; stdin is a pipe.
        """
        arguments = list(map(str, arguments))
        if _startup_variables() == self._variables:
            return ForkedProgram(self, program, arguments, stdout, stderr)
        what = [program] if isinstance(program, Path) else ["-c", program]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *what, *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            bufsize=0,
        )

    def run(self, program, *arguments):
        """Run a program as `subprocess.run(capture_output=True, text=True)` does."""
        with tempfile.TemporaryFile() as words, tempfile.TemporaryFile() as errors:
            process = self.start(program, arguments, stdout=words, stderr=errors)
            try:
                code = process.wait(_PROGRAM_TIMEOUT_S)
            except subprocess.TimeoutExpired as exc:
                raise AssertionError(f"{_text_of(words)}\n{_text_of(errors)}") from exc
            finally:
                process.stdin.close()
                process.kill()
                process.wait()
            return subprocess.CompletedProcess(program, code, _text_of(words), _text_of(errors))

    def ask(self, question, fds=()):
        """Return the answer to a question; after an error there are no more answers."""
        frame = json.dumps(question).encode()
        assert len(frame) <= MAX_NBYTES
        try:
            socket.send_fds(self._channel, [frame], fds)
            answer = self._channel.recv(MAX_NBYTES)
        except BaseException:
            self._channel.close()  # or the next question would get this answer
            raise
        assert answer, f"the process that forks has ended: {_text_of(self._errors)}"
        return json.loads(answer)

    def close(self):
        with self._errors:
            pid = self._process.pid
            left = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            self._channel.close()  # at which the process ends
            self._process.wait(_ANSWER_TIMEOUT_S)
        assert not left, f"programs were left behind: {left}"


class ForkedProgram:
    """The process of a forked program, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, warm_python, program, arguments, stdout, stderr):
        is_file = isinstance(program, Path)
        wanted = {
            "code": program.read_text() if is_file else program,
            "path": str(program) if is_file else None,
            "arguments": arguments,
            "directory": os.getcwd(),
            "environment": dict(os.environ),
        }
        self._warm_python = warm_python
        self.returncode = None
        self.stdout = None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            read_end, self.stdin = _make_pipe()
            theirs.enter_context(read_end)
            ours.enter_context(self.stdin)
            if stdout == subprocess.PIPE:
                self.stdout, stdout = _make_pipe()
                ours.enter_context(self.stdout)
                theirs.enter_context(stdout)
            fds = [file.fileno() for file in (read_end, stdout, stderr)]
            self.pid = warm_python.ask(wanted, fds)
            ours.pop_all()

    def poll(self):
        return self._wait(0)

    def wait(self, timeout=None):
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)  # the process that forked it has not reaped it

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout):
        if self.returncode is None and self._has_ended(timeout):
            self.returncode = self._warm_python.ask({"reap": self.pid})
        return self.returncode

    def _has_ended(self, timeout):
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            return poll.poll(None if timeout is None else timeout * 1000)
        finally:
            os.close(pidfd)


def _make_pipe():
    """Return the files of a pipe's two ends, unbuffered."""
    read_end, write_end = os.pipe()
    return os.fdopen(read_end, "rb", buffering=0), os.fdopen(write_end, "wb", buffering=0)


def _text_of(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def _startup_variables():
    return {k: v for k, v in os.environ.items() if k.startswith(_READ_AT_START)}
