"""Programs that are forked from a process that has imported the model libraries.

A program that loads a pipeline spends 3 s of CPU time on imports; a fork takes 0.02 s. shmload is
not imported before the fork, so each program starts it by itself.
"""

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# Longer than the imports take on a busy machine.
_ANSWER_TIMEOUT_S = 100.0
_PROGRAM_TIMEOUT_S = 100.0
# With this variable a program ends as Python does, with all finalizers. That takes 0.4 s, since it
# copies the pages of all modules. Without it, a program ends after its exit functions.
FINALIZES = "TEST_FINALIZES"
# Python and the libraries read these when they start.
_READ_AT_START = ("ACCELERATE_", "DIFFUSERS_", "HF_", "MKL_", "OMP_", "PYTHON", "TRANSFORMERS_")
# What else shmload and the tests' programs import.
_MODULES = ("accelerate", "diffusers.schedulers", "ml_dtypes", "msgspec", "xxhash")
_MAX_NBYTES = 1 << 17
_SERVER = "import sys; sys.path.insert(0, sys.argv[1]); import warm_python; warm_python.serve()"


class WarmPython:
    """Starts programs, by a process of its own that forks them."""

    def __init__(self):
        self._variables = _read_at_start()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_ANSWER_TIMEOUT_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _SERVER, Path(__file__).parent],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
            )

    def start(self, program, arguments, *, stderr):
        """Start a program with the variables and the working directory of this process.

        Where a variable was changed that only a start reads, a new Python is started.

        Args:
            program: its file, a Path, or its code, as for `python -c`.
            arguments: its `sys.argv[1:]`.
            stderr: a file for what it writes there.

        Returns:
            Its process, like `subprocess.Popen` with pipes to stdin and from stdout.
        """
        arguments = list(map(str, arguments))
        if _read_at_start() == self._variables:
            return Forked(self, program, arguments, stderr)
        what = [program] if isinstance(program, Path) else ["-c", program]
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *what, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
        )

    @contextlib.contextmanager
    def starting(self, program, *arguments):
        """Start a program; kill it at the end of the block.

        It may write as much to stdout as a pipe holds. Its `stderr` is a file.
        """
        with tempfile.TemporaryFile() as errors:
            process = self.start(program, arguments, stderr=errors)
            process.stderr = errors
            with process.stdin, process.stdout:
                try:
                    yield process
                finally:
                    process.kill()
                    process.wait()

    def run(self, program, *arguments):
        """Run a program as `subprocess.run(capture_output=True)` does."""
        with self.starting(program, *arguments) as process:
            code = process.wait(_PROGRAM_TIMEOUT_S)
            words = process.stdout.read().decode()
            process.stderr.seek(0)
            return subprocess.CompletedProcess(program, code, words, process.stderr.read().decode())

    def ask(self, question, fds=()):
        socket.send_fds(self._channel, [json.dumps(question).encode()], fds)
        answer = self._channel.recv(_MAX_NBYTES)
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self):
        self._channel.close()  # at which the process ends
        self._process.wait(_ANSWER_TIMEOUT_S)


class Forked:
    """The process of a forked program, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, python, program, arguments, stderr):
        self._python = python
        self.returncode = None
        stdin, ours = os.pipe()
        self.stdin = os.fdopen(ours, "wb", buffering=0)
        ours, stdout = os.pipe()
        self.stdout = os.fdopen(ours, "rb", buffering=0)
        is_file = isinstance(program, Path)
        wanted = {
            "code": program.read_text() if is_file else program,
            "path": str(program) if is_file else None,
            "arguments": arguments,
            "directory": os.getcwd(),
            "environment": dict(os.environ),
        }
        try:
            self.pid = python.ask(wanted, [stdin, stdout, stderr.fileno()])
        finally:
            os.close(stdin)
            os.close(stdout)

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

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def _wait(self, timeout):
        if self.returncode is not None:
            return self.returncode
        pidfd = os.pidfd_open(self.pid)
        try:
            has_ended = select.select([pidfd], [], [], timeout)[0]
        finally:
            os.close(pidfd)
        if has_ended:
            self.returncode = self._python.ask({"reap": self.pid})
        return self.returncode


def _read_at_start():
    return {k: v for k, v in os.environ.items() if k.startswith(_READ_AT_START)}


# The process that forks ---------------------------------------------------------------------------


def serve():
    """Fork the programs asked for on stdin; in each fork, run the program."""
    _import_libraries()
    gc.freeze()  # else a program that collects garbage copies the pages of all these objects
    channel = socket.socket(fileno=os.dup(0))
    while True:
        frame, fds, _, _ = socket.recv_fds(channel, _MAX_NBYTES, 3)
        if not frame:
            return  # the tests have ended
        wanted = json.loads(frame)
        if "reap" in wanted:
            answer = os.waitstatus_to_exitcode(os.waitpid(wanted["reap"], 0)[1])
        elif (answer := os.fork()) == 0:
            channel.close()
            _run(wanted, fds)
            return
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(answer).encode())


def _import_libraries():
    """Import what the tests' pipelines consist of."""
    import diffusers
    import transformers

    for name in ("FluxPipeline", "StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTokenizer", "T5EncoderModel", "T5TokenizerFast"):
        getattr(transformers, name)
    for name in _MODULES:
        importlib.import_module(name)


def _run(wanted, fds):
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(wanted["directory"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    path = wanted["path"]
    sys.argv = [path or "-c", *wanted["arguments"]]
    sys.path[:2] = [os.path.dirname(path) if path else ""]
    main = vars(sys.modules["__main__"])
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins, __spec__=None)
    if path:
        main["__file__"] = path
    try:
        exec(compile(wanted["code"], path or "<string>", "exec"), main)
        code = 0
    except SystemExit as exc:
        if not isinstance(exc.code, int | None):
            raise
        code = exc.code or 0
    if FINALIZES not in os.environ:
        _end(code)
    sys.exit(code)


def _end(code):
    threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
