"""The service's costs, restart and leaks: the figures of `scripts/bench service`."""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.samples import Result, Sample

_DTYPE = "bfloat16"
_CLIENTS = 32
_CALLS = 20
_ROUNDS = 200
_PROBES = Path(__file__).with_name("service_probes.py")
_BUDGET = "8GiB"


@contextlib.contextmanager
def running_service(bench: Bench, *arguments: str) -> Iterator[dict[str, str]]:
    """Run a service; yield the environment variables that lead clients to it."""
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        variables = {"SHMLOAD_SOCKET": f"{folder}/run/service.sock", "SHMLOAD_SERVICE": "require"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shmload", "serve", "--budget", _BUDGET, *arguments],
            env=bench.processes.environment | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        # A full stderr pipe would block the service.
        draining = threading.Thread(target=deque, args=(process.stderr, 0))
        with process:
            try:
                _wait_until_ready(process)
                draining.start()
                yield variables | {"SERVICE_PID": str(process.pid)}
            finally:
                process.kill()
                if draining.ident:
                    draining.join()


def _wait_until_ready(service: "subprocess.Popen[str]") -> None:
    assert service.stderr
    heard = []
    for line in service.stderr:
        if "serving at" in line:
            return
        heard.append(line)
    raise RuntimeError(f"the service did not start: {''.join(heard)}")


def measure_attach(bench: Bench) -> list[Figure]:
    """An attach through the service, against an attach without it."""
    small, source = bench.sources.small, bench.sources.fp32
    with running_service(bench) as variables:
        bench.processes.probe("warm", source, _DTYPE, None)
        without, through = (
            bench.probe("attach", "shmload", small, source, **chosen)
            for chosen in ({"SHMLOAD_SERVICE": "off"}, variables)
        )
        found = bench.measure({"without": without, "through": through}, source)
    bench.evict()
    calls = {way: found.sample(way, "call_s").scaled(1e3) for way in found.results}
    return [
        Figure(
            name="service-attach",
            what="attach through the service: time added to an attach without one",
            sample=calls["through"] - calls["without"],
            unit="ms",
            target=Target(5),
            beside=(
                Line(label="through the service", sample=calls["through"], unit="ms"),
                Line(label="without", sample=calls["without"], unit="ms"),
            ),
        )
    ]


def measure_crowd(bench: Bench) -> list[Figure]:
    """Many clients attach at once: how long the service takes for each."""
    source = bench.sources.fp32
    with running_service(bench) as variables:
        bench.processes.probe("warm", source, _DTYPE, None)
        calls = [call for _ in range(bench.rounds) for call in _crowd(bench, source, variables)]
    bench.evict()
    ordered = sorted(calls)
    p99 = ordered[int(len(ordered) * 0.99)]
    return [
        Figure(
            name="service-crowd",
            what=f"{_CLIENTS} clients attach at once: the service's part, 99th percentile",
            sample=Sample((p99 * 1e3,)),
            unit="ms",
            target=Target(50),
            beside=(
                Line(label="median", sample=Sample((statistics.median(calls) * 1e3,)), unit="ms"),
                Line(label="worst", sample=Sample((ordered[-1] * 1e3,)), unit="ms"),
                Line(label="attaches", sample=Sample((float(len(calls)),)), unit=""),
            ),
        )
    ]


def _crowd(bench: Bench, source: Path, variables: dict[str, str]) -> list[float]:
    """Let clients attach at once; return the times of all calls, in seconds."""
    command = [sys.executable, "-P", str(_PROBES), "attach_part", json.dumps([str(source)])]
    clients = [
        subprocess.Popen(
            command,
            env=bench.processes.environment | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(_CLIENTS)
    ]
    calls: list[float] = []
    with contextlib.ExitStack() as ending:
        for client in clients:
            ending.enter_context(client)
            _read_line(client)
        for _ in range(_CALLS):
            for client in clients:
                assert client.stdin
                client.stdin.write("\n")
                client.stdin.flush()
            calls += [float(_read_line(client)) for client in clients]
        for client in clients:
            assert client.stdin
            client.stdin.close()
    return calls


def _read_line(client: "subprocess.Popen[str]") -> str:
    assert client.stdout
    return client.stdout.readline()


def measure_ticker(bench: Bench) -> list[Figure]:
    """A Python thread's delay while other processes decode and leave it a core."""
    source = bench.sources.fp32
    run = partial(_probe, bench, "ticker_gap", str(source))
    with running_service(bench, "--workers", "1") as variables:
        ways: dict[str, Callable[[], Result]] = {
            "service": partial(run, **variables),
            "workers": partial(run, SHMLOAD_SERVICE="off", SHMLOAD_WORKERS="1"),
        }
        found = bench.measure(ways, source)
    gaps = {way: found.sample(way, "gap_s").scaled(1e3) for way in found.results}
    return [
        Figure(
            name=f"ticker-{way}",
            what=f"a 10 ms ticker in Python while {who}: its worst gap",
            sample=gaps[way],
            unit="ms",
            target=Target(50),
            beside=(Line(label="the load", sample=found.sample(way, "load_s"), unit="s"),),
        )
        for way, who in (("service", "the service decodes"), ("workers", "its own workers decode"))
    ]


def measure_restart(bench: Bench) -> list[Figure]:
    """Weights that the next service reads again after the first was killed."""
    source = bench.sources.fp32
    read: list[float] = []
    for _ in range(bench.rounds):
        with running_service(bench) as variables:
            bench.processes.probe("warm", source, _DTYPE, None, **variables)
        with running_service(bench) as variables:  # leaving the block above killed the first
            began = time.perf_counter()
            bench.processes.probe("warm", source, _DTYPE, None, **variables)
            read.append(_status(bench, variables)["read_nbytes"])
            bench.announce(f"resident again in {time.perf_counter() - began:.1f} s")
    bench.evict()
    return [
        Figure(
            name="service-restart",
            what="weights read again by the service that follows one after kill -9",
            sample=Sample(tuple(read)),
            unit="bytes",
            target=Target(0),
        )
    ]


def measure_rounds(bench: Bench) -> list[Figure]:
    """Many loads and releases: descriptors, children, names and memory left over."""
    source = bench.sources.small / "vae"
    with running_service(bench) as variables:
        kept = _probe(bench, "rounds", str(source), _ROUNDS, **variables, SHMLOAD_INLINE_NBYTES="1")
    alone = _probe(
        bench, "rounds", str(source), _ROUNDS, SHMLOAD_SERVICE="off", SHMLOAD_INLINE_NBYTES="1"
    )
    bench.evict()
    limits = {"descriptors": 0, "children": 0, "names": 0, "private_nbytes": 1e6}
    return [
        Figure(
            name=f"rounds-{how}-{name}",
            what=f"{_ROUNDS} loads and releases {how} a service: {name} left over",
            sample=Sample((found[name],)),
            unit="",
            target=Target(limit),
        )
        for how, found in (("with", kept), ("without", alone))
        for name, limit in limits.items()
    ]


def _probe(bench: Bench, name: str, *arguments: object, **variables: str) -> Result:
    return bench.processes.of(_PROBES).probe(name, *arguments, **variables)


def _status(bench: Bench, variables: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shmload", "status", "--json"],
        env=bench.processes.environment | variables,
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, float] = json.loads(done.stdout)["service"]
    return found


SERVICE_MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "attach": measure_attach,
    "crowd": measure_crowd,
    "ticker": measure_ticker,
    "restart": measure_restart,
    "rounds": measure_rounds,
}
