"""Jobs work in any program: without a `__main__` guard, in all kinds of processes and threads."""

import sys

import pytest
from children import run_to_end
from light_jobs import write_pipeline, write_server

# A program without `if __name__ == "__main__"`: all its code is in `__main__`.
PROGRAM = """
import dataclasses, enum, functools, subprocess, sys
source, python = sys.argv[1:]
starter, sys.executable = sys.executable, python
from shmload.integrations import dataprep

offset = 40

def plus(pipe, item):
    return item + offset

class Kind(enum.Enum):
    ODD = 1
    EVEN = 0

@dataclasses.dataclass
class Number:
    value: int
    kind: Kind

    def __call__(self, pipe, item):
        return self.value + item

    def method(self, pipe, item):
        return self.value * item

def describe(pipe, item):
    return Number(item.value + 1, Kind((item.value + 1) % 2))

def factorial(pipe, item):
    return 1 if item == 0 else item * factorial(pipe, item - 1)

def beside(pipe, item):
    import helping
    return helping.help(item)

def start(pipe, item):
    return subprocess.run([starter, "-c", f"print({item})"], capture_output=True).stdout

class Mistake(Exception):
    def __init__(self, item):
        super().__init__(f"no {item}")

def fail(pipe, item):
    raise Mistake(item)

with dataprep.Job(source, procs=2) as job:
    def say(name, function, items=(1, 2)):
        print(f"{name}:", list(job.map(function, items)), flush=True)
    say("function", plus)
    offset = 50
    say("changed global", plus)
    say("lambda", lambda pipe, item: -item)
    say("partial", functools.partial(lambda factor, pipe, item: factor * item, 3))
    say("instance", Number(5, Kind.ODD))
    say("method", Number(5, Kind.ODD).method)
    say("recursion", factorial, (3, 4))
    say("module beside it", beside)
    say("process", start)
    numbers = list(job.map(describe, [Number(1, Kind.ODD), Number(2, Kind.EVEN)]))
    print("classes:", numbers == [Number(2, Kind.EVEN), Number(3, Kind.ODD)])
    try:
        list(job.map(fail, [7]))
    except Exception as error:
        print("error:", type(error.__cause__) is Mistake, error, flush=True)
print("again:", list(dataprep.map(plus, [1], source=source, procs=1)), flush=True)
"""
SAID = """
function: [41, 42]
changed global: [51, 52]
lambda: [-1, -2]
partial: [3, 6]
instance: [6, 7]
method: [5, 10]
recursion: [6, 24]
module beside it: ['helped 1', 'helped 2']
process: [b'1\\n', b'2\\n']
classes: True
error: True item 0, 7: Mistake: no 7
again: [51]
"""

# Runs cells like notebooks and embedded interpreters: `__main__` is not the started file.
CELLS = """
import sys, types
cells = sys.stdin.read()
module = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(cells, "<cell>", "exec"), vars(module))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a program, a module, and the pipeline of a job that loads nothing."""
    folder = tmp_path_factory.mktemp("anywhere")
    write_pipeline(folder / "pipeline")
    write_server(folder / "server")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "helping.py").write_text("def help(item):\n    return f'helped {item}'\n")
    (folder / "contexts.py").write_text(CONTEXTS)
    return folder


def run(place, *command, program=None):
    """Run Python in the folder with the arguments of jobs; return its output."""
    done = run_to_end(
        [sys.executable, "-W", "ignore", *command, place / "pipeline", place / "server" / "python"],
        cwd=place,
        input=program,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "-c", "stdin", "cells"])
def test_program_needs_no_guard_and_no_module(place, how):
    command, program = {
        "script": (["program.py"], None),
        "-c": (["-c", PROGRAM], None),
        "stdin": (["-"], PROGRAM),
        "cells": (["-c", CELLS], PROGRAM),
    }[how]
    assert run(place, *command, program=program) == SAID.lstrip()


# Processes, threads and loops ---------------------------------------------------------------------

CONTEXTS = """
import asyncio, contextlib, multiprocessing, sys, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

def use(source, python, queue=None):
    sys.executable = python
    from shmload.integrations import dataprep
    found = list(dataprep.map(lambda pipe, item: item * 2, range(5), source=source, procs=2))
    if queue:
        queue.put(found)
    return found

async def in_loop(*arguments):
    found = use(*arguments)
    assert await asyncio.to_thread(use, *arguments) == found
    return found

def daemonic(*arguments):
    queue = multiprocessing.SimpleQueue()
    process = multiprocessing.Process(target=use, args=(*arguments, queue), daemon=True)
    process.start()
    found = queue.get()
    process.join()
    assert process.exitcode == 0
    return found

def pool(method, *arguments):
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply(use, arguments)

def executor(*arguments):
    with ProcessPoolExecutor(1) as executor:
        return executor.submit(use, *arguments).result()

def threads(*arguments):
    with ThreadPoolExecutor(3) as executor:
        found = [executor.submit(use, *arguments) for _ in range(3)]
        assert found[0].result() == found[1].result() == found[2].result()
        return found[0].result()

def joblib(*arguments):
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor
    try:
        return Parallel(n_jobs=2)(delayed(use)(*arguments) for _ in range(2))[0]
    finally:
        get_reusable_executor().shutdown(wait=True)

def nested(*arguments):
    starter = sys.executable
    sys.executable = arguments[1]
    from shmload.integrations import dataprep
    def work(pipe, item):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(abs, [-item])
    try:
        found = list(dataprep.map(work, range(5), source=arguments[0], procs=2))
    finally:
        sys.executable = starter
    return [2 * item for item in found]

WAYS = {
    "daemonic process": daemonic,
    "fork": lambda *arguments: pool("fork", *arguments),
    "spawn": lambda *arguments: pool("spawn", *arguments),
    "forkserver": lambda *arguments: pool("forkserver", *arguments),
    "executor": executor,
    "joblib": joblib,
    "threads": threads,
    "loop": lambda *arguments: asyncio.run(in_loop(*arguments)),
    "pools in the function": nested,
}

if __name__ == "__main__":
    import shmload
    starter = sys.executable
    for name, way in WAYS.items():
        try:
            said = way(*sys.argv[1:])
        except Exception as error:
            said = repr(error)
        sys.executable = starter
        print(f"{name}: {said}", flush=True)
"""
WAYS = [
    "daemonic process",
    "fork",
    "spawn",
    "forkserver",
    "executor",
    "joblib",
    "threads",
    "loop",
    "pools in the function",
]


@pytest.fixture(scope="module")
def said(place):
    """The output for each kind of process, thread and loop."""
    return dict(line.split(": ", 1) for line in run(place, "contexts.py").splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_job_works_in(said, way):
    assert said[way] == "[0, 2, 4, 6, 8]"


@pytest.mark.slow
def test_no_way_was_forgotten(said):
    assert list(said) == WAYS


# With a pipeline ----------------------------------------------------------------------------------

DEEP = """
import asyncio, multiprocessing, sys, threading
import torch
import torch.nn.functional as F
from shmload.integrations import dataprep

def work(pipe, item):
    pixels = F.pad(torch.full((1, 3, 15, 15), item / 4, dtype=pipe.vae.dtype), (0, 1, 0, 1))
    return pipe.vae.encode(pixels).latent_dist.mean

def map_all():
    options = {"source": sys.argv[1], "components": ["vae"], "torch_dtype": "bfloat16", "procs": 2}
    torch.randn(500, 500) @ torch.randn(500, 500)  # there are threads of torch
    results = list(dataprep.map(work, range(4), **options))
    print("SAME", len(results), {str(r.dtype) for r in results}, flush=True)

async def main():
    await asyncio.to_thread(map_all)

fork = multiprocessing.get_context("fork")
process = fork.Process(target=asyncio.run, args=(main(),), daemon=True)
process.start()
process.join()
print("EXIT", process.exitcode, flush=True)
"""


@pytest.mark.slow
def test_job_with_a_pipeline_works_in_a_thread_of_a_daemonic_process(saved, child, shm_names):
    owner = child(DEEP, saved("stable-diffusion"))
    assert owner.expect("SAME") == "4 {'torch.bfloat16'}"
    assert owner.expect("EXIT") == "0"
    assert owner.wait() == 0
    assert shm_names() == []
