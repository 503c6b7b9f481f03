"""No process of a job outlives its owner, whether that is interrupted, killed, or forks."""

import os
import signal
from pathlib import Path

import pytest
from light_jobs import notes, wait_until_ended, write_server
from watching import until

pytestmark = pytest.mark.slow

# Runs in a process group of its own, as a shell starts it.
OWNER = """
import os, signal, sys, time
if sys.argv[1] == "group":
    os.setpgid(0, 0)
program = sys.argv[3]
if program:
    sys.executable = program
from shmload.integrations import dataprep
"""
MAP = """
job = dataprep.Job(sys.argv[2], procs=2)
print("SERVER", job._crew._server.pid, flush=True)
def work(pipe, item):
    if item == 5:
        print("WORKING", os.getppid(), os.getpid(), flush=True)
        time.sleep(1000)
    return item
for item in job.map(work, range(100)):
    pass
"""
IDLE = """
job = dataprep.Job(sys.argv[2], procs=2)
pids = set()
while len(pids) < 3:
    for found in job.map(lambda pipe, item: (os.getppid(), os.getpid()), range(4)):
        pids.update(found)
print("IDLE", *pids, flush=True)
time.sleep(1000)
"""


def own_start(pid):
    """Return the start time of a process, from /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]


def wait_for_note(program, word):
    until(lambda: word in notes(program))


STAGES = {
    "starting": (MAP, "note('starting'); time.sleep(1000)", ""),
    "loading": (
        MAP,
        "",
        """
        def wait(handle):
            try:
                note("loading")
                time.sleep(1000)
            finally:
                os.kill(os.getpid(), signal.SIGIO)  # a close tells once more
                note("cleaned up")
        Handle.load = wait
        """,
    ),
    "working": (MAP, "", ""),
    "idle": (IDLE, "", ""),
}


@pytest.fixture
def owner_at(child, tmp_path, pipeline):
    """Start an owner and wait until it reaches a stage; return it and its job's processes.

    `owner, program, pids = owner_at("loading", "group")`
    """

    def start(stage, group="", more=""):
        code, early, late = STAGES[stage]
        program = write_server(tmp_path / stage, late, early)
        owner = child(OWNER + more + code, group, pipeline, program)
        pids = [int(owner.expect("SERVER"))] if code is MAP else []
        if stage in ("starting", "loading"):
            wait_for_note(program, stage)
        else:
            pids += map(int, owner.expect(stage.upper()).split())
        return owner, program, pids

    return start


# Interrupts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_interrupt_ends_the_job_and_only_its_owner_says_so(owner_at, stage):
    owner, program, pids = owner_at(stage, "group")
    os.killpg(owner.pid, signal.SIGINT)
    if stage == "starting":  # it is told to end before it has done anything
        os.kill(pids[0], signal.SIGKILL)
    assert owner.wait() == -signal.SIGINT
    wait_until_ended(*pids)
    assert owner.errors.count("KeyboardInterrupt") == 1
    if stage == "loading":
        assert "cleaned up" in notes(program)


def test_interrupt_while_the_libraries_are_imported_leaves_nothing(child, saved, shm_names):
    owner = child(OWNER + MAP, "group", saved("stable-diffusion"), "")
    server = int(owner.expect("SERVER"))
    until(lambda: "libtorch" in Path(f"/proc/{server}/maps").read_text())
    os.killpg(owner.pid, signal.SIGINT)
    assert owner.wait() == -signal.SIGINT
    wait_until_ended(server)
    assert owner.errors.count("Traceback") == 1
    assert shm_names() == []


HANDLER = """
signal.signal(signal.SIGINT, lambda *_: print("HANDLED", flush=True))
"""


@pytest.mark.parametrize("stage", ["starting", "loading", "working"])
def test_interrupt_that_the_owner_handles_is_nothing_to_the_job(owner_at, stage):
    owner, program, pids = owner_at(stage, "group", HANDLER)
    os.killpg(owner.pid, signal.SIGINT)
    owner.expect("HANDLED")
    before = [own_start(pid) for pid in pids]
    owner.process.kill()
    owner.wait()
    if stage == "starting":
        os.kill(pids[0], signal.SIGKILL)
    wait_until_ended(*pids)
    assert len(before) == len(pids)
    assert notes(program).count("start") == 1
    assert owner.errors == ""


# Ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("stage", ["loading", "working", "idle"])
def test_job_ends_with_its_owner(owner_at, stage, number):
    owner, program, pids = owner_at(stage)
    os.kill(owner.pid, number)
    assert owner.wait() == -number
    wait_until_ended(*pids)
    assert owner.errors == ""
    if stage == "loading":
        assert "cleaned up" in notes(program)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_end_of_the_whole_group_leaves_nothing(owner_at, number):
    """A closing terminal and a service manager signal the whole group."""
    owner, _, pids = owner_at("working", "group")
    os.killpg(owner.pid, number)
    assert owner.wait() == -number
    wait_until_ended(*pids)
    assert owner.errors == ""


def test_end_of_the_whole_group_leaves_no_segment_of_a_pipeline(child, saved, shm_names):
    owner = child(OWNER + MAP, "group", saved("stable-diffusion", "float16"), "")
    server = int(owner.expect("SERVER"))
    _, runner = map(int, owner.expect("WORKING").split())
    assert shm_names() != []
    os.killpg(owner.pid, signal.SIGTERM)
    assert owner.wait() == -signal.SIGTERM
    wait_until_ended(server, runner)
    assert shm_names() == []


EXIT = """
job = dataprep.Job(sys.argv[2], procs=2)
results = job.map(lambda pipe, item: (os.getppid(), os.getpid()), range(100))
print("IDLE", *next(results), flush=True)
sys.exit(0)
"""


def test_job_that_was_not_closed_ends_with_its_program(new_child, tmp_path, pipeline):
    owner = new_child(OWNER + EXIT, "", pipeline, write_server(tmp_path / "server"))
    pids = map(int, owner.expect("IDLE").split())
    assert owner.wait() == 0
    wait_until_ended(*pids)
    assert owner.errors == ""


# Forks --------------------------------------------------------------------------------------------

FORK = """
import gc, subprocess
def say(*words):  # in one piece: two processes have this pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
job = dataprep.Job(sys.argv[2], procs=2)
def pid_of(pipe, item):
    return item, os.getpid()
results = job.map(pid_of, range(200))
before = {next(results)[1] for _ in range(20)}
pid = os.fork()
if pid == 0:
    try:
        for use in (lambda: list(results), lambda: next(job.map(pid_of, [1]))):
            try:
                use()
            except Exception as exc:
                say(type(exc).__name__, exc)
        results.close()
        job.close()
        del results, job
        gc.collect()
        say("CHILD")
        sys.stdin.readline()
        sys.exit(0)
    finally:
        os._exit(1)
after = list(results)
again = {pid for _, pid in job.map(pid_of, range(50))}
say("PARENT", len(after), len((before | again | {pid for _, pid in after})))
kills = []
subprocess.Popen.kill = lambda process: kills.append(process)
job.close()  # while the child has copies of all sockets
say("CLOSED", len(kills))
sys.stdin.readline()
"""


def test_forked_child_can_do_nothing_to_the_job_of_its_parent(child, tmp_path, pipeline):
    owner = child(OWNER + FORK, "", pipeline, write_server(tmp_path / "server"))
    said = sorted(owner._read_line() for _ in range(5))
    refused = "ArgumentError this job belongs to process"
    assert [line[: len(refused)] for line in said[:2]] == [refused] * 2
    assert said[2:] == ["CHILD", "CLOSED 0", "PARENT 180 2"]
    assert owner.errors == ""


FULL = """
go = sys.argv[4]  # by value to the others
def work(pipe, item):
    if item == 31:
        open(go, "w").close()
    while item == 0 and not os.path.exists(go):
        pass
    return item
job = dataprep.Job(sys.argv[2], procs=2)
results = job.map(work, range(100))
next(results)  # all that may be taken were, and are there
pid = os.fork()
if pid == 0:
    try:
        list(results)
    except Exception as exc:
        print("CHILD", type(exc).__name__, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("PARENT", list(results) == list(range(1, 100)), flush=True)
"""


def test_forked_child_gives_the_processes_of_its_parent_nothing(child, tmp_path, pipeline):
    owner = child(OWNER + FULL, "", pipeline, write_server(tmp_path / "server"), tmp_path / "go")
    assert owner.expect("CHILD") == "ArgumentError"
    assert owner.expect("PARENT") == "True"
    assert owner.wait() == 0


LEFT = """
job = dataprep.Job(sys.argv[2], procs=2)
next(job.map(lambda pipe, item: item, range(100)))
pid = os.fork()
if pid == 0:
    sys.exit(0)  # with all that Python does at its end
os.waitpid(pid, 0)
print("LEFT", len(list(job.map(lambda pipe, item: item, range(100)))), flush=True)
"""


def test_forked_child_may_end_as_python_ends(new_child, tmp_path, pipeline):
    owner = new_child(OWNER + LEFT, "", pipeline, write_server(tmp_path / "server"))
    assert owner.expect("LEFT") == "100"
    assert owner.wait() == 0
    assert owner.errors == ""


CLOSED = """
from pathlib import Path
def loud(pipe, item):
    print("x" * 10_000, flush=True)
    os.write(1, b"x" * 10_000)
    os.write(2, b"x" * 10_000)
    return item
with dataprep.Job(sys.argv[2], procs=2) as job:
    Path(sys.argv[4]).write_text(str(list(job.map(loud, range(10)))))
"""


def test_owner_may_have_no_standard_streams(new_child, tmp_path, pipeline):
    without = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    program = write_server(tmp_path / "server")
    owner = new_child(OWNER + CLOSED, "", pipeline, program, tmp_path / "found", prefix=without)
    owner.wait()
    assert (tmp_path / "found").read_text() == str(list(range(10)))
