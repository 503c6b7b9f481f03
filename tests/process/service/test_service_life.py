"""A service starts, preloads, answers status requests and ends as documented."""

import contextlib
import re
import select
import signal
import socket
import urllib.request
from pathlib import Path

import pytest
from serving import SERVE, wait_until
from watching import children_of, until

import shmload
from shmload._segments.part import acquire
from shmload._service.notice import end_service, require_service, service_status


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "shutdown"])
def test_service_ends_and_segments_stay(service, checkpoint, how):
    process = service()
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    if how == "shutdown":
        end_service()
    else:
        process.process.send_signal(signal.Signals[how])
    process.expect("STOPPING=1")
    process.expect("ENDED")
    assert process.wait() == 0
    assert "INFO ended; 1 segment stays" in process.errors.splitlines()[-1]
    assert process.errors.splitlines()[-1].startswith("20")  # a time
    assert service_status() is None
    assert len(shmload.segments()) == 1
    service()
    assert shmload.warm(checkpoint, torch_dtype="bfloat16").read_nbytes == 0


@pytest.fixture
def preload(service, tmp_path):
    """Start a service with a list to preload: `preload("PATH --dtype bfloat16")`."""

    def start(*lines, options=()):
        listing = tmp_path / "preload"
        listing.write_text("".join(f"{line}\n" for line in lines))
        return service(*options, "--preload", str(listing))

    return start


@contextlib.contextmanager
def held_up(preload, shard, *more, options=()):
    """Have a service that preloads a shard wait for another builder of it; yields the service."""
    with contextlib.closing(acquire(segment_of(shard))):
        process = preload(f"{shard} --dtype bfloat16", *more, options=options)
        until(lambda: "1 awaited" in process.errors)
        yield process


def segment_of(shard):
    (planned,) = shmload.plan(shard, torch_dtype="bfloat16", keep=True).shards
    return planned.segment


def test_preload_makes_resident_what_it_can(preload, shards, tmp_path):
    lines = f"{shards[0]} --dtype bfloat16", f"{tmp_path}/missing", shards[1]
    process = preload("# sources", *lines)
    wait_until(lambda found: found.preloaded == 3)
    end_service()
    assert process.wait() == 0
    assert {info.conversion for info in shmload.segments()} == {"BF16", "raw"}
    assert f"shmload: {tmp_path}/missing: no such file" in process.errors
    said = f"ERROR cannot preload {tmp_path}/missing: its process ended (exit code 1)"
    assert said in process.errors


def test_preload_that_waits_for_another_builder_ends_with_the_service(preload, shards):
    with held_up(preload, shards[0]) as process:
        children = children_of(process.pid)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "cannot preload" not in process.errors
    assert len(children) == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_service_that_preloads_a_pipeline_imports_no_torch(preload, saved):
    process = preload(f"{saved('stable-diffusion')} --dtype bfloat16")
    wait_until(lambda found: found.preloaded == 1)
    assert require_service().failed_preloads == 0
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("name", ["model.safetensors", "m\udcff.safetensors"])
def test_metrics_are_those_of_what_is_resident(service, checkpoint, name):
    process = service("--metrics", "127.0.0.1:0")
    shmload.warm(checkpoint.rename(checkpoint.with_name(name)), dtype="bfloat16")
    (url,) = re.findall(r"metrics at (http://127.0.0.1:[0-9]+/metrics)", process.errors)
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    (info,) = shmload.segments()
    shown = name.replace("\udcff", r"\\udcff")
    source = checkpoint.with_name(shown)
    of_model = f'dtype="bfloat16",model="{shown}",source="{source}"'
    assert f"shmload_model_bytes{{{of_model}}} {float(info.nbytes)}" in lines
    assert f"shmload_resident_bytes {float(info.nbytes)}" in lines
    assert "shmload_segments 1.0" in lines


def test_systemd_is_told_when_it_serves_and_when_it_ends(new_child, evicts, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(60)
        code = f"import os; os.environ['NOTIFY_SOCKET'] = '{tmp_path / 'notify'}'\n"
        process = new_child(code + "from shmload._cli.main import main; main(['serve'])")
        assert notified.recv(100) == b"READY=1"
        end_service()
        assert notified.recv(100) == b"STOPPING=1"
        assert process.wait() == 0


def test_address_of_systemd_that_leads_nowhere_is_ignored(new_child, evicts, tmp_path):
    code = f"import os; os.environ['NOTIFY_SOCKET'] = '{tmp_path / 'missing'}'\n"
    process = new_child(code + "from shmload._cli.main import main; main(['serve'])")
    until(lambda: "serving" in process.errors)
    process.process.terminate()
    assert process.wait() == 0


def test_one_of_many_starts_serves(service, new_child):
    processes = {new_child(SERVE) for _ in range(4)}
    waiting = {each.process.stdout: each for each in processes}
    ended = set()
    while len(ended) < 3:
        for stdout in select.select(list(waiting), [], [], 60)[0]:
            each = waiting.pop(stdout)
            if "a service is running" in each.errors:
                ended.add(each)
    (left,) = processes - ended
    assert require_service().pid == left.pid


def test_killed_service_leaves_what_the_next_one_takes_over(service, checkpoint, command):
    first = service()
    shmload.warm(checkpoint, dtype="bfloat16")
    first.process.kill()
    first.wait()
    assert service_status() is None
    assert command("status")[0] == 1
    assert service().pid == require_service().pid
    assert shmload.warm(checkpoint, dtype="bfloat16").read_nbytes == 0
