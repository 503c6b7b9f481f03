"""One soak: clients work while faults happen; at the end everything must be clean.

The seed decides each client's operations and each fault. Their timing depends on the machine, so a
finding may take several runs to repeat. Each client has a thread, and so have some of the faults.
"""

import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from soaking import faults
from soaking.judge import Operation, choose, wrong_with
from soaking.processes import SHM, Client, Ended, Surroundings, signalling
from soaking.sources import Source, make_sources

# Room for a few segments, not for all: the budget forces evictions.
_BUDGET = "32MiB"
_FAULT_THREADS = 3
_PAUSE_S = 0.75
_SERVICE_DEADLINE_S = 40.0
_END_TIMEOUT_S = 10.0
_EVENTS_KEPT = 60
_DETAIL = 6000
"""Of a log, in letters."""


class Soak:
    """A soak.

    Args:
        seed: decides what happens.
        seconds: how long it lasts.
        processes: number of clients.
        has_service: whether a service with a budget serves them.
        has_own_shm: whether /dev/shm is this soak's, and may be filled.
    """

    def __init__(
        self, seed: int, seconds: float, processes: int, *, has_service: bool, has_own_shm: bool
    ) -> None:
        self.operations: Counter[str] = Counter()
        """Number of operations by "operation: outcome"."""
        self.faults: Counter[str] = Counter()
        self.findings: list[str] = []
        self._seed, self._seconds, self._processes = seed, seconds, processes
        self._has_service, self._has_own_shm = has_service, has_own_shm
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._lock = threading.Lock()
        """Held to count."""
        self._service_lock = threading.Lock()
        """Held while the service is stopped or killed."""
        self._names_before = _names()

    def run(self) -> None:
        """Run the soak for its time, then check what is left."""
        with tempfile.TemporaryDirectory(prefix="shmload-soak-") as folder:
            work = Path(folder)
            self._surroundings = Surroundings(work)
            self._sources = make_sources(work / "sources", random.Random(f"{self._seed} sources"))
            try:
                self._start_service()
                names = [f"client-{number}" for number in range(self._processes)]
                self._clients = [Client(self._surroundings, name) for name in names]
                self._held: dict[str, dict[str, str]] = {name: {} for name in names}
                self._soak()
                self._load_in_peace(work)
                self._end(work)
            except (subprocess.SubprocessError, TimeoutError) as exc:
                self._find("the soak could not go on", f"{exc}\n{getattr(exc, 'stderr', '')}")
            finally:
                for pid in self._surroundings.alive():
                    with signalling(pid, signal.SIGKILL):
                        pass
            for name in (path.stem for path in work.glob("*.log")):
                if "Traceback" in (log := self._surroundings.log(name)):
                    self._find(f"{name} had an uncaught exception", log)

    def _soak(self) -> None:
        end_s = time.monotonic() + self._seconds
        ways = [partial(self._work, client) for client in self._clients]
        ways += [self._inject] * _FAULT_THREADS
        with ThreadPoolExecutor(len(ways)) as pool:
            rngs = [random.Random(f"{self._seed} {number}") for number in range(len(ways))]
            for done in [pool.submit(way, rng, end_s) for way, rng in zip(ways, rngs, strict=True)]:
                done.result()

    def _work(self, client: Client, rng: random.Random, end_s: float) -> None:
        """Have a client do one operation after the other."""
        while time.monotonic() < end_s:
            self._do(client, *choose(rng, self._sources))

    def _do(self, client: Client, operation: Operation, source: Source | None = None) -> None:
        """Have a client do an operation, and judge its answer."""
        what = f"{client.name} {operation}"
        self._note(what)
        began = time.monotonic()
        held = self._held[client.name]
        try:
            answer = client.ask(operation)
        except (Ended, TimeoutError) as exc:
            if isinstance(exc, TimeoutError) or not client.is_killed:
                log = self._surroundings.log(client.name)
                self._find(f"a client ended, or hangs {exc}", f"{what}\nits log:\n{log}")
            client.process.kill()
            client.process.communicate()
            client.start()
            held, answer, outcome = {}, None, "killed"
        if answer is not None:
            shards = source.shards if source else ()
            seen = [(shard.names, shard.between(began, time.monotonic())) for shard in shards]
            outcome = answer.get("errors", ["ok"])[0]
            if wrong := wrong_with(operation, answer, held, seen):
                self._find(wrong, f"{what}\n{answer.get('traceback', '')}")
            if operation["do"] in ("load", "leave"):
                held = answer.get("tensors", {})
        self._held[client.name] = held
        with self._lock:
            self.operations[f"{operation['do']}: {outcome}"] += 1

    # Faults ---------------------------------------------------------------------------------------

    def _inject(self, rng: random.Random, end_s: float) -> None:
        """Do one fault after the other."""
        of_clients = [faults.kill_client, *[faults.stop_client] * 2, *[faults.harm_worker] * 4]
        kinds = [self._change] * 8
        kinds += [
            lambda rng, way=way: way(rng.choice(self._clients), self._count_fault, rng)
            for way in of_clients
        ]
        kinds += [self._harm_service] * 2 if self._has_service else []
        kinds += [partial(faults.fill, self._count_fault)] * 2 if self._has_own_shm else []
        while time.monotonic() < end_s:
            time.sleep(rng.expovariate(1 / _PAUSE_S))
            rng.choice(kinds)(rng)

    def _change(self, rng: random.Random) -> None:
        """Change a shard, mostly one that a client is loading, where a change does most harm."""
        shards = [(source, shard) for source in self._sources for shard in source.shards]
        paths = {client.path for client in self._clients}
        used = [(source, shard) for source, shard in shards if str(source.path) in paths]
        chosen = rng.choice((rng.random() < 0.7 and used) or shards)
        faults.change(*chosen, self._count_fault, rng)

    def _harm_service(self, rng: random.Random) -> None:
        if not self._service_lock.acquire(blocking=False):
            return
        try:
            if self._service.poll() is not None:
                self._find("the service ended by itself", self._surroundings.log("service"))
            if rng.random() < 0.5:
                self._count_fault("stop the service", "")
                with signalling(self._service.pid, signal.SIGSTOP):
                    time.sleep(faults.stop_s(rng))
            else:
                self._count_fault("kill the service", "")
                self._service.kill()
                self._service.communicate()
                time.sleep(rng.uniform(0, 2))
                self._start_service()
        finally:
            self._service_lock.release()

    def _start_service(self) -> None:
        """Start the service, and wait until it serves; without one do nothing."""
        if not self._has_service:
            return
        words = "-m", "shmload", "serve", "--budget", _BUDGET
        self._service = self._surroundings.start("service", *words)
        serving = self._surroundings.log("service").count("serving, budget") + 1
        deadline = time.monotonic() + _SERVICE_DEADLINE_S
        while self._surroundings.log("service").count("serving, budget") < serving:
            if time.monotonic() > deadline or self._service.poll() is not None:
                raise TimeoutError(
                    "the service does not serve: " + self._surroundings.log("service")
                )
            time.sleep(0.05)

    # The end --------------------------------------------------------------------------------------

    def _load_in_peace(self, work: Path) -> None:
        """Have every client load every source; without faults every load must succeed."""
        before = self.operations["load: ok"]
        for client in self._clients:
            self._do(client, {"do": "leave"})  # gives leases back
        self._surroundings.shmload("rm", str(work))
        for source in self._sources:
            given = {"path": str(source.path), "dtype": "bfloat16", "keep": False, "verify": True}
            for client in self._clients:
                self._do(client, {"do": "load", **given}, source)
        wanted = before + len(self._sources) * len(self._clients)
        if self.operations["load: ok"] != wanted:
            self._find("loads fail without a fault", "")

    def _end(self, work: Path) -> None:
        """End all processes as a user would, and check what is left of them."""
        for client in self._clients:
            self._do(client, {"do": "leave"})
            if code := client.end():
                self._find("a client ended with an error", f"{client.name}: {code}")
        if self._has_service:
            self._service.send_signal(signal.SIGTERM)
            self._service.communicate(timeout=_SERVICE_DEADLINE_S)
            if code := self._service.returncode:
                self._find(f"the service ended with {code}", self._surroundings.log("service"))
        self._surroundings.shmload("gc").check_returncode()
        self._surroundings.shmload("rm", str(work))
        left = _names() - self._names_before
        if left:
            self._find("left in shared memory", "\n".join(sorted(left)))
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (alive := self._surroundings.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if alive:
            self._find("processes are left", str(alive))

    # Counts ---------------------------------------------------------------------------------------

    def _count_fault(self, kind: str, what: str) -> None:
        self._note(f"FAULT {kind} {what}")
        with self._lock:
            self.faults[kind] += 1

    def _note(self, event: str) -> None:
        """Remember an event, to show it with the next finding."""
        self._events.append(f"{time.monotonic() - self._began:8.3f} s  {event}")

    def _find(self, what: str, detail: str) -> None:
        self.findings.append(
            "\n".join([what, detail[-_DETAIL:], "before it:", *self._events.copy()])
        )


def _names() -> set[str]:
    """Return shmload's names in /dev/shm."""
    return {name for name in os.listdir(SHM) if name.startswith("shmload-")}
