"""The process that forks the tests' programs; `warm_python` asks it to.

It imports the model libraries, and not shmload. A question and its answer are a JSON value each, in
one packet on the socket that is its stdin.
"""

import atexit
import builtins
import gc
import importlib
import json
import os
import socket
import sys
import threading

MAX_NBYTES = 1 << 17
"""Most bytes of a question or an answer."""

FINALIZES = "TEST_FINALIZES"
"""With this variable a program ends as Python does, with all finalizers. That takes 0.4 s, since it
copies the pages of all modules. Without it, a program ends after its exit functions."""

# What else shmload and the tests' programs import.
_MODULES = ("accelerate", "diffusers.schedulers", "ml_dtypes", "msgspec", "xxhash")


def serve():
    """Fork and reap the programs asked for on stdin; in each fork, run the program."""
    import_libraries()
    assert "shmload" not in sys.modules
    gc.freeze()  # else a program that collects garbage copies the pages of all these objects
    channel = socket.socket(fileno=os.dup(0))
    while True:
        frame, fds, _, _ = socket.recv_fds(channel, MAX_NBYTES, 3)
        if not frame:
            return  # the tests have ended
        wanted = json.loads(frame)
        if "ready" in wanted:
            answer = True
        elif "reap" in wanted:
            answer = os.waitstatus_to_exitcode(os.waitpid(wanted["reap"], 0)[1])
        elif (answer := os.fork()) == 0:
            channel.close()
            _run(wanted, fds)
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(answer).encode())


def import_libraries():
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
        threading._shutdown()  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
