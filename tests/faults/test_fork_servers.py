"""A job survives or reports a fork server or runner that ends, stops or sends garbage."""

import errno
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
from light_jobs import notes, pids_of, same, wait_until_ended

import shmload
from shmload._jobs import crew

pytestmark = pytest.mark.slow


def done_in(job, count=20):
    """Return the notes after all items are done."""
    assert list(job.map(same, range(count))) == list(range(count))
    return notes(job.program)


# The fork server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["early", "code"])
def test_fork_server_that_cannot_start_is_tried_three_times(light_job, how):
    job = light_job(**{how: "os._exit(3)"})
    for tries in (3, 6):
        with pytest.raises(shmload.JobFailed, match=r"ended \(exit code 3\), 3 times in a row"):
            list(job.map(same, [1]))
        assert notes(job.program) == ["start"] * tries


def test_fork_server_whose_interpreter_is_gone_is_an_error(light_job):
    job = light_job()
    pids = [job._crew._server.pid, *pids_of(job)]
    job.program.unlink()
    os.kill(pids[0], signal.SIGKILL)
    wait_until_ended(*pids)
    with pytest.raises(shmload.JobFailed, match="could not be started"):
        list(job.map(same, [1]))


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        (
            "Handle.load = lambda handle: time.sleep(1000)",
            0.2,
            "the pipeline was not loaded within",
        ),
        # The timeout lets the fork server itself become ready, even on a busy machine.
        ("run = lambda *args: time.sleep(1000)", 5, "a process was not ready within"),
    ],
)
def test_process_that_is_never_ready_is_an_error(
    light_job, configure, monkeypatch, code, timeout_s, message
):
    configure(wait_timeout_s=timeout_s)
    monkeypatch.setattr("shmload._jobs.maps._POLL_S", 0.05)
    with pytest.raises(shmload.JobFailed, match=message):
        list(light_job(code).map(same, [1]))


@pytest.mark.parametrize(
    "code",
    [
        # Before it is prepared, while it forks, and after the runner has started.
        "Handle.load = lambda handle: is_first() and os._exit(3)",
        """
        forks = forkserver._ForkServer._fork
        def fork(server, message):
            if is_first():
                os._exit(3)
            forks(server, message)
        forkserver._ForkServer._fork = fork
        """,
        """
        fork = os.fork
        def fork_and_die():
            pid = fork()
            if pid and is_first():
                os.kill(os.getpid(), signal.SIGKILL)
            return pid
        os.fork = fork_and_die
        """,
        # The kernel refuses a fork, once.
        """
        fork = os.fork
        def fork_later():
            if is_first():
                raise BlockingIOError("no processes")
            return fork()
        os.fork = fork_later
        """,
        # One runner lives; the server reaps the other.
        """
        reap = forkserver._ForkServer._reap
        def reap_and_die(server, fd):
            if is_first():
                os._exit(3)
            reap(server, fd)
        forkserver._ForkServer._reap = reap_and_die
        run_well = run
        run = lambda *args: is_first("runner") or run_well(*args)
        """,
    ],
    ids=["loading", "asked", "forking", "no process", "reaping"],
)
def test_fork_server_that_ends_is_replaced(light_job, code):
    job = light_job(code)
    pids_of(job)  # start both: one process might be fast enough for all items
    assert done_in(job) == ["start"] * 2


def test_errors_that_cannot_cross_arrive_as_their_text(light_job):
    job = light_job(
        """
        class Odd(Exception):
            def __reduce__(self):
                return open, ()
        def fail(handle):
            raise Odd("not this way")
        Handle.load = fail
        """
    )
    with pytest.raises(RuntimeError, match="Odd: not this way"):
        list(job.map(same, [1]))


def test_thread_that_ends_does_not_keep_processes_from_being_forked(light_job):
    code = """
        import threading
        Handle.load = lambda handle: threading.Thread(target=time.sleep, args=(0.3,)).start()
        """
    assert done_in(light_job(code)) == ["start"]


def test_thread_that_stays_is_an_error(light_job):
    code = """
        import threading
        forkserver._THREADS_TIMEOUT_S = 0.1
        def start(handle):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        Handle.load = start
        """
    with pytest.raises(shmload.JobFailed, match="left 1 threads running"):
        list(light_job(code).map(same, [1]))


def test_path_may_hold_what_imports_ignore(light_job, monkeypatch):
    others = [Path("/nowhere"), b"/nowhere", "/nowhere/\udcff"]
    monkeypatch.setattr(sys, "path", [*sys.path, *others])
    done_in(light_job())


def test_default_timeout_of_the_programs_sockets_does_not_affect_a_job(light_job):
    """Some libraries set one for their downloads."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        job = light_job()
        pids_of(job)  # so that they wait for work
        assert done_in(job) == ["start"]
    finally:
        socket.setdefaulttimeout(before)


def test_default_timeout_of_a_preloaded_module_is_nothing_to_a_runner(light_job):
    job = light_job(early="import socket; socket.setdefaulttimeout(0.01)")
    pids_of(job)
    poll = select.poll()
    for runner in job._crew.runners.values():
        poll.register(runner.pidfd)
    assert not poll.poll(300)  # no process ends because it is idle


def test_what_a_preloaded_module_prints_comes_out_once(light_job, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    job = light_job(early="print('said once')")  # stdout is buffered, as it is no terminal
    list(job.map(lambda pipe, item: print("done", flush=True), range(20)))
    pids_of(job)
    job.close()
    shown = capfd.readouterr().out
    assert (shown.count("said once"), shown.count("done")) == (1, 20)


def test_function_finds_the_signals_of_the_program(light_job):
    def handlers(pipe, item):
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as with nohup
    try:
        assert list(light_job().map(handlers, [0])) == [[signal.SIG_DFL, signal.SIG_IGN]]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_fork_server_that_is_stopped_when_a_runner_ends_is_replaced(
    light_job, configure, monkeypatch, tmp_path
):
    def stop_server_and_die(pipe, item):
        if item == 5 and not (tmp_path / "mark").exists():
            (tmp_path / "mark").touch()
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    job = light_job()
    pids_of(job)
    configure(stall_timeout_s=0.2)
    monkeypatch.setattr("shmload._jobs.maps._POLL_S", 0.05)
    assert list(job.map(stop_server_and_die, range(20))) == list(range(20))
    assert notes(job.program) == ["start"] * 2


def test_ignored_ends_of_children_are_not_passed_on(light_job):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        job = light_job("run_well = run; run = lambda *args: is_first() or run_well(*args)")
        assert done_in(job) == ["start"]
        job.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_no_descriptors_are_an_error(light_job, monkeypatch, at):
    left = at
    make = socket.socketpair

    def run_out(*args):
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.EMFILE, "Too many open files")
        return make(*args)

    monkeypatch.setattr(crew.socket, "socketpair", run_out)
    with pytest.raises(shmload.JobFailed, match="Too many open files"):
        list(light_job().map(same, [1]))


# Runners ------------------------------------------------------------------------------------------


def test_runners_that_cannot_start_are_an_error(light_job, capfd):
    job = light_job("def run(*args): raise GeneratorExit('words at the end')")
    with pytest.raises(shmload.JobFailed, match=r"it could work \(exit code 1\), 3 times in a row"):
        list(job.map(same, [1]))
    assert "words at the end" in capfd.readouterr().err


@pytest.mark.parametrize(
    "harm",
    [
        "os._exit(3)",
        "send(channel, Started()); os._exit(3)",
        # With half of the item in its socket.
        "send(channel, Started()); channel.recv(1, socket.MSG_PEEK); os._exit(3)",
        "send(channel, Started()); channel.recv(1 << 20); os._exit(3)",
        # In the middle of its answer.
        "send(channel, Started()); channel.recv(1 << 20); channel.send(bytes(3)); os._exit(3)",
        # With a child that inherited its socket.
        """
        send(channel, Started())
        channel.recv(1 << 20)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(1000)
        note(str(pid))
        os._exit(3)
        """,
    ],
    ids=["forked", "started", "unread", "working", "answering", "child"],
)
def test_runner_that_ends_is_replaced(light_job, harm):
    program = """
        run_well = run
        def run(channel_fd, *args):
            if is_first():
                channel = socket.socket(fileno=channel_fd)
                exec(harm)
            run_well(channel_fd, *args)
        """
    job = light_job(f"import textwrap\nharm = textwrap.dedent({harm!r})\n" + dedent(program))
    items = [bytes(4 << 20)] * 6
    try:
        assert list(job.map(lambda pipe, item: len(item), items)) == [4 << 20] * 6
        assert notes(job.program)[0] == "start"
    finally:
        for word in notes(job.program):
            if word.isdigit():
                os.kill(int(word), signal.SIGKILL)


@pytest.mark.parametrize("rubbish", ["bytes(4)", "b'\\0\\0\\0\\2ab'"])
def test_rubbish_from_a_runner_is_an_error_and_no_more(light_job, rubbish):
    job = light_job(
        f"""
        run_well = run
        def run(channel_fd, *args):
            if is_first():
                with socket.socket(fileno=os.dup(channel_fd)) as channel:
                    channel.send({rubbish})
            run_well(channel_fd, *args)
        """
    )
    with pytest.raises(shmload.ProtocolError):
        list(job.map(same, range(100)))
    done_in(job)


def test_idle_runner_that_is_killed_is_replaced(light_job):
    job = light_job()
    before = pids_of(job)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_until_ended(*before)
    assert not before & pids_of(job)


def test_all_runners_may_be_killed_while_their_results_wait(light_job):
    job = light_job()
    pids = pids_of(job)
    results = job.map(lambda pipe, item: bytes([item]) * (1 << 20), range(20))
    assert next(results)[0] == 0
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert [each[0] for each in results] == list(range(1, 20))


def test_two_jobs_do_not_disturb_each_other(light_job):
    jobs = [light_job(), light_job()]
    found = {}

    def work(number):
        found[number] = list(jobs[number].map(same, range(200)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: list(range(200)), 1: list(range(200))}
