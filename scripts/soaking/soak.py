"""One soak: clients work while faults happen; at the end everything must be clean.

The seed decides each client's operations and the order of the faults. Their timing depends on the
machine, so a finding may take several runs to repeat.
"""

import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from soaking import operations
from soaking.driver import Driver
from soaking.faults import Faults, Pauses
from soaking.processes import Client, Service, Surroundings
from soaking.report import Report
from soaking.sources import Source, make_sources
from soaking.stage import age_views, names

_END_TIMEOUT_S = 10.0


class Soak:
    """A soak; call `close` at its end."""

    def __init__(self, report: Report, budget_nbytes: int, announce: Callable[[str], None]) -> None:
        self._report = report
        self._folder = tempfile.TemporaryDirectory(prefix="shmload-soak-")
        work = Path(self._folder.name)
        self._names_before = names()
        self._surroundings = Surroundings(work)
        self._sources = make_sources(work / "sources", random.Random(f"{report.seed} sources"))
        self._service = Service(self._surroundings, budget_nbytes) if report.has_service else None
        if self._service:
            self._service.start()
        self._clients = [Client(self._surroundings, n) for n in range(report.processes)]
        self._driver = Driver(self._clients, self._surroundings, report, announce)

    def close(self) -> None:
        """Kill every process and remove the sources."""
        self._surroundings.kill_all()
        for client in self._clients:
            client.end()
        if self._service:
            self._service.kill()
        self._folder.cleanup()

    def run(self) -> None:
        """Run the soak for its time, then check what is left."""
        try:
            self._soak()
            self._load_in_peace()
            self._end()
        except (subprocess.SubprocessError, TimeoutError) as exc:
            self._report.find("the soak could not go on", f"{exc}\n{getattr(exc, 'stderr', '')}")
        for name, error in self._surroundings.errors():
            self._report.find(f"{name} had an uncaught exception", error)

    def _soak(self) -> None:
        if self._service:
            self._service.wait_until_ready()
        self._driver.drive(lambda client: operations.leave())  # until all have started
        end_s = time.monotonic() + self._report.seconds
        rngs = {c.name: random.Random(f"{self._report.seed} {c.name}") for c in self._clients}
        self._driver.resume(self._inject(end_s))
        self._driver.drive(lambda c: operations.choose(rngs[c.name], self._sources), end_s)
        if self._service:
            self._service.wait_until_ready()

    def _inject(self, end_s: float) -> Pauses:
        """Begin one fault after the other; the driver runs this generator as a fault too."""
        rng = random.Random(f"{self._report.seed} faults")
        faults = Faults(rng, self._report, self._clients, self._service, self._sources)
        while time.monotonic() < end_s:
            self._driver.resume(faults.choose())
            yield faults.pause_s()
            if self._service and self._service.has_ended():
                self._report.find("the service ended by itself", self._service.log)
                self._service.start()

    def _load_in_peace(self) -> None:
        """Have every client load every source; without faults every load must succeed."""
        failed_before = self._report.failures()
        self._driver.drive_once(lambda client: operations.leave())  # gives leases back
        self._surroundings.evict()
        for source in self._sources:
            self._load_everywhere(source)
        failed = self._report.failures() - failed_before
        if failed:
            self._report.find("loads fail without a fault", f"{failed} of them")

    def _load_everywhere(self, source: Source) -> None:
        self._driver.drive_once(lambda client: operations.load_checked(source))

    def _end(self) -> None:
        """End all processes as a user would, and check what is left of them."""
        self._driver.drive_once(lambda client: operations.leave())
        for client in self._clients:
            if code := client.end():
                self._report.find("a client ended with an error", f"{client.name}: {code}")
        self._end_service()
        if self._report.has_own_shm:
            age_views()
        self._surroundings.run("gc")
        self._surroundings.evict()
        # EXCLUDED: views in the machine's own /dev/shm; they may be another program's.
        left = {name for name in names() - self._names_before if self._is_ours(name)}
        if left:
            self._report.find("left in shared memory", "\n".join(sorted(left)))
        self._look_for_processes()

    def _is_ours(self, name: str) -> bool:
        return self._report.has_own_shm or "-view-" not in name

    def _end_service(self) -> None:
        if self._service is None:
            return
        if left := self._service.left_open(_END_TIMEOUT_S):
            self._report.find("the service has left open", "\n".join(left))
        if code := self._service.end():
            self._report.find(f"the service ended with {code}", self._service.log)

    def _look_for_processes(self) -> None:
        deadline = time.monotonic() + _END_TIMEOUT_S
        while (alive := self._surroundings.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if alive:
            lines = [f"{pid} {command}" for pid, command in alive.items()]
            self._report.find("processes are left", "\n".join(lines))
