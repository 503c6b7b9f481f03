"""A service starts, preloads, answers status requests and ends as documented."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from serving import ask, status, wait_until, workers_of
from warming import TENSORS, as_bf16, assert_same
from watching import until

import shmload
from shmload._cli.source_list import ListedSource
from shmload._cli.warming import preload as preload_now
from shmload._segments.part import acquire
from shmload._service.client import Client
from shmload._service.endpoint import connect, peer_of, socket_path
from shmload._service.protocol import Shutdown, Stopping
from shmload._service.state import ServiceState
from shmload.errors import ServiceUnavailable


def test_second_start_says_that_one_is_running(service, new_child):
    process = service()
    other = new_child("from shmload._cli.main import main; main(['serve'])")
    assert other.wait() == 1
    assert f"(process {process.pid})" in other.errors
    assert other.errors.count("\n") == 1
    assert status().pid == process.pid


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "shutdown"])
def test_service_ends_and_segments_stay(service, checkpoint, how):
    process = service()
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    if how == "shutdown":
        ask(Shutdown(), Stopping)
    else:
        process.process.send_signal(signal.Signals[how])
    process.expect("STOPPING=1")
    process.expect("ENDED")
    assert process.wait() == 0
    assert "INFO ended; 1 segment stays" in process.errors.splitlines()[-1]
    assert process.errors.splitlines()[-1].startswith("20")  # a time
    assert not socket_path().exists()
    assert len(shmload.segments()) == 1
    service()
    assert shmload.warm(checkpoint, torch_dtype="bfloat16").read_nbytes == 0


def test_idle_client_does_not_keep_the_service(service):
    process = service()
    with Client(socket_path()):
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_without_a_service_a_load_does_without(service, checkpoint, configure):
    assert_same(shmload.load_state_dict(checkpoint, "bfloat16"), as_bf16(TENSORS))
    assert shmload.segments() == []
    configure(service="require")
    with pytest.raises(ServiceUnavailable, match="start one with `shmload serve`"):
        shmload.load_state_dict(checkpoint, "bfloat16")


def test_setting_turns_it_off(service, checkpoint, configure):
    service()
    configure(service="off")
    assert_same(shmload.load_state_dict(checkpoint, "bfloat16"), as_bf16(TENSORS))
    configure(service="auto")
    assert status().misses == 0


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_directory_that_lets_others_in_is_refused(service, new_child, mode):
    socket_path().parent.mkdir()
    socket_path().parent.chmod(mode)
    process = new_child("from shmload._cli.main import main; main(['serve'])")
    assert process.wait() == 1
    assert "lets others in; choose a directory of your own" in process.errors
    assert socket_path().parent.stat().st_mode & 0o777 == mode


def test_default_directory_is_the_users(monkeypatch, configure, tmp_path):
    configure(socket="")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_path() == tmp_path / "shmload" / "service.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert socket_path() == Path(f"/tmp/shmload-{os.geteuid()}/service.sock")


def test_systemd_gets_its_message_and_gives_a_socket(service, child, tmp_path):
    code = (
        "import os, sys\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "os.environ['LISTEN_PID'], os.environ['LISTEN_FDS'] = str(os.getpid()), '1'\n"
        "from shmload._cli.main import main\n"
        "main(['serve'])"
    )
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        socket_path().parent.mkdir(mode=0o700)
        listener.bind(str(socket_path()))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            stderr=subprocess.DEVNULL,
        )
        try:
            assert notified.recv(100) == b"READY=1"
            assert status().pid == process.pid
            with connect(socket_path(), 60) as connection:
                # The service, not the process that opened the socket.
                assert peer_of(connection)[0] == process.pid
            ask(Shutdown(), Stopping)
            assert notified.recv(100) == b"STOPPING=1"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        assert socket_path().exists()  # it belongs to systemd


@pytest.fixture
def preload(service, tmp_path):
    """Start a service with a list to preload: `preload("PATH bfloat16")`."""

    def start(*lines, options=()):
        listing = tmp_path / "preload"
        listing.write_text("".join(f"{line}\n" for line in lines))
        return service(*options, "--preload", str(listing))

    return start


@contextlib.contextmanager
def held_up(preload, shard, *more, options=()):
    """Have a service that preloads a shard wait for another builder of it; yields the service."""
    with contextlib.closing(acquire(segment_of(shard))):
        process = preload(f"{shard} bfloat16", *more, options=options)
        until(lambda: "1 awaited" in process.errors)
        yield process


def segment_of(shard):
    (planned,) = shmload.plan(shard, torch_dtype="bfloat16", keep=True).shards
    return planned.segment


def test_preload_makes_resident_what_it_can(preload, shards, tmp_path):
    process = preload("# sources", f"{shards[0]} bfloat16", f"{tmp_path}/missing", shards[1])
    wait_until(lambda found: found.segments == 2)
    ask(Shutdown(), Stopping)
    assert process.wait() == 0
    assert {info.conversion for info in shmload.segments()} == {"BF16", "raw"}
    assert f"ERROR line 3 cannot be preloaded: {tmp_path}/missing: no such file" in process.errors
    assert process.errors.count("missing") == 1


@pytest.mark.slow
def test_list_that_does_not_fit_the_budget_is_an_error_in_the_log(preload, shards):
    lines = [f"{shard} bfloat16" for shard in shards[:3]]
    process = preload(*lines, options=("--budget", str(9 << 18)))
    wait_until(lambda found: found.evictions)
    until(lambda: "does not fit" in process.errors)
    said = f"does not fit the budget: line 1, {shards[0]}, was evicted for line 3"
    assert said in process.errors
    assert f"evicted 1.00 MiB of {shards[0].name}: {shards[0]}" in process.errors


def test_preload_that_waits_for_another_builder_ends_with_the_service(preload, shards):
    with held_up(preload, shards[0]) as process:
        children = workers_of(process)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "cannot be preloaded" not in process.errors
    assert len(children) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_preload_ends_at_a_signal_whose_handler_has_not_run_yet(caplog):
    with contextlib.closing(ServiceState(1 << 20)) as state:
        os.write(state.signalled_fd, b"x")  # as the interpreter does before it runs the handler
        preload_now([ListedSource(line=1, source="/no/such/source")], state)
        assert state.is_stopping
    assert not caplog.records  # no error: its process was asked to end


def test_preloading_process_that_is_killed_is_an_error_in_the_log(preload, shards):
    with held_up(preload, shards[0], shards[1]) as process:
        (preloading,) = (
            pid
            for pid in workers_of(process)
            if b"warm" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        )
        os.kill(preloading, signal.SIGKILL)
        wait_until(lambda found: found.segments == 1)
    assert "ERROR line 1 cannot be preloaded: its process ended (SIGKILL)" in process.errors


def test_service_that_preloads_a_pipeline_imports_no_torch(preload, saved):
    process = preload(f"{saved('stable-diffusion')} bfloat16")
    until(lambda: "preloaded" in process.errors)
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()


def page(process, path):
    """Ask a service over HTTP; returns the status code and the text."""
    (url,) = re.findall(r"metrics at (http://127.0.0.1:[0-9]+)/metrics", process.errors)
    try:
        with urllib.request.urlopen(url + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


def wait_for_page(process, path, code):
    """Ask again until a page's status code is this."""
    until(lambda: page(process, path)[0] == code)


def test_metrics_are_served_also_by_model(service, checkpoint):
    process = service("--metrics", "127.0.0.1:0")
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    (use,) = status().models
    assert (use.model, use.source) == (checkpoint.name, str(checkpoint))
    of_model = f'model="{use.model}",source="{use.source}"'
    lines = page(process, "/metrics")[1].splitlines()
    assert "shmload_misses_total 1.0" in lines
    assert f"shmload_model_misses_total{{{of_model}}} 1.0" in lines
    assert f"shmload_model_hits_total{{{of_model}}} 1.0" in lines
    assert page(process, "/healthz") == (200, "ok\n")
    assert page(process, "/")[0] == 404


def test_service_is_not_ready_while_it_preloads(preload, shards):
    with held_up(preload, shards[0], options=("--metrics", "127.0.0.1:0")) as process:
        assert page(process, "/readyz") == (503, f"preloading, 0 of 1 done: {shards[0]}\n")
    wait_for_page(process, "/readyz", 200)


def test_log_is_json_on_request(preload, checkpoint, tmp_path):
    lines = f"{checkpoint} bfloat16", f"{tmp_path}/missing"
    process = preload(*lines, options=("--log-format", "json"))
    until(lambda: "cannot be preloaded" in process.errors)
    ask(Shutdown(), Stopping)
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.errors.splitlines()]
    assert {frozenset(line) for line in lines} == {
        frozenset(("time", "level", "logger", "message", "fields"))
    }
    (warmed,) = (line for line in lines if line["message"].startswith("preloaded"))
    assert warmed["fields"]["source"] == str(checkpoint)
    (failed,) = (line for line in lines if line["level"] == "ERROR")
    assert failed["fields"] == {"line": 2, "source": f"{tmp_path}/missing"}
    assert lines[-1]["message"] == "ended; 1 segment stays"


def test_service_that_cannot_start_says_so_in_its_log(service, new_child):
    service()
    arguments = ["serve", "--log-format", "json"]
    other = new_child(f"from shmload._cli.main import main; main({arguments})")
    assert other.wait() == 1
    (line,) = other.errors.splitlines()
    found = json.loads(line)
    assert found["level"] == "ERROR"
    assert found["fields"] == {"error": "ServiceRunning"}


def test_metrics_on_a_port_in_use_are_refused_in_one_line(service, new_child):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        arguments = ["serve", "--metrics", f"127.0.0.1:{other.getsockname()[1]}"]
        process = new_child(f"from shmload._cli.main import main; main({arguments})")
        assert process.wait() == 1
    assert "metrics cannot be served at 127.0.0.1 port" in process.errors
    assert "Traceback" not in process.errors


def test_status_can_be_read_by_people(service, checkpoint, command):
    process = service()
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    _, printed, _ = command("status")
    assert f"process {process.pid}" in printed
    assert "0 hits, 1 miss, 0 evictions" in printed
