"""The faults of a soak: signals, changed sources, full memory.

Each fault is a generator that yields the seconds until its next step, and undoes itself at its end.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence

from proc import children

from soaking.processes import Client, Service, hold
from soaking.report import Report
from soaking.sources import Shard, Source
from soaking.stage import ballast

Pauses = Iterator[float]

_INTERVAL_S = 0.25
_LONGEST_STOP_S = 8.0
_BLOCKS = 5
_PAUSES_S = (0, 0.05, 0.3)
_LEFT_NBYTES = (0, 100_000, 1_000_000, 4_000_000)


class Faults:
    """Chooses faults; the same seed gives the same choices in the same order."""

    def __init__(
        self,
        rng: random.Random,
        report: Report,
        clients: Sequence[Client],
        service: Service | None,
        sources: Sequence[Source],
    ) -> None:
        self._rng = rng
        self._report = report
        self._clients = clients
        self._service = service
        self._shards = [(source, shard) for source in sources for shard in source.shards]
        self._changing: set[int] = set()
        self._is_full = False
        self._kinds: list[Callable[[random.Random], Pauses]] = [
            *[self._change] * 8,
            *[self._change_under_way] * 4,
            self._kill_client,
            *[self._stop_client] * 2,
            *[self._harm_worker] * 4,
        ]
        if service:
            self._kinds += [self._kill_service, self._stop_service]
        if report.has_own_shm:
            self._kinds += [self._fill] * 2

    def pause_s(self) -> float:
        """Return how long to wait for the next fault, in seconds."""
        return self._rng.expovariate(1 / _INTERVAL_S)

    def choose(self) -> Pauses:
        """Return the next fault, not yet begun."""
        # A generator of its own: how many numbers the fault draws must not change later choices.
        return self._rng.choice(self._kinds)(random.Random(self._rng.random()))

    def _change(self, rng: random.Random) -> Pauses:
        source, shard = rng.choice((rng.random() < 0.7 and self._shards_in_use()) or self._shards)
        change = (
            rng.choice((replace, rewrite, overwrite, truncate))
            if source.changes_in_place
            else replace
        )
        if id(shard) in self._changing:
            return
        self._report.count_fault(change.__name__, str(shard.path))
        self._changing.add(id(shard))
        try:
            yield from change(shard, rng)
        finally:
            self._changing.discard(id(shard))

    def _change_under_way(self, rng: random.Random) -> Pauses:
        """Stop all workers of one process and change the sources that they are reading."""
        owner, parent = self._choose_parent(rng)
        with contextlib.ExitStack() as stops:
            for worker in children(parent):
                stops.enter_context(_stopped(worker, parent))
            self._report.note(f"the workers of {owner} are stopped")
            yield rng.uniform(0.1, 0.5)  # time for loads to begin
            for _ in range(4):
                yield from self._change(rng)

    def _shards_in_use(self) -> list[tuple[Source, Shard]]:
        """Return the shards that clients are loading now, where a change does most harm."""
        paths = {client.asked.get("path") for client in self._clients if client.asked}
        return [(source, shard) for source, shard in self._shards if str(source.path) in paths]

    def _kill_client(self, rng: random.Random) -> Pauses:
        client = rng.choice(self._clients)
        client.kill()
        self._report.count_fault("kill client", client.name)
        yield from ()

    def _stop_client(self, rng: random.Random) -> Pauses:
        client, seconds = rng.choice(self._clients), _stop_s(rng)
        client.note_stop(seconds)
        self._report.count_fault("stop client", f"{client.name} for {seconds:.1f} s")
        yield from _stop(client.pid, seconds)

    def _harm_worker(self, rng: random.Random) -> Pauses:
        owner, parent = self._choose_parent(rng)
        workers = children(parent)
        if not workers:
            return
        worker, seconds = rng.choice(workers), _stop_s(rng)
        if rng.random() < 0.5:
            self._report.count_fault("kill a worker", owner)
            _kill(worker, parent)
        else:
            self._report.count_fault("stop a worker", f"{owner} for {seconds:.1f} s")
            yield from _stop(worker, seconds, parent)

    def _choose_parent(self, rng: random.Random) -> tuple[str, int]:
        """Return the name and pid of a process that may have workers."""
        client = rng.choice(self._clients)
        return client.name, client.pid

    def _kill_service(self, rng: random.Random) -> Pauses:
        assert self._service
        if self._service.pid is None:
            return
        self._report.count_fault("kill service", "")
        self._service.kill()
        yield rng.uniform(0, 2)
        self._service.start()

    def _stop_service(self, rng: random.Random) -> Pauses:
        assert self._service
        if self._service.pid is None:
            return
        seconds = _stop_s(rng)
        self._report.count_fault("stop service", f"for {seconds:.1f} s")
        yield from _stop(self._service.pid, seconds)

    def _fill(self, rng: random.Random) -> Pauses:
        if self._is_full:
            return
        left = rng.choice(_LEFT_NBYTES)
        self._report.count_fault("fill shared memory", f"up to {left} bytes")
        self._is_full = True
        try:
            with ballast(left):
                yield rng.uniform(0.2, 2)
        finally:
            self._is_full = False


def _stop_s(rng: random.Random) -> float:
    return rng.choice((0.1, 1.0, _LONGEST_STOP_S)) * rng.uniform(0.2, 1)


def _stop(pid: int, seconds: float, parent: int | None = None) -> Pauses:
    with _stopped(pid, parent):
        yield seconds


@contextlib.contextmanager
def _stopped(pid: int, parent: int | None = None) -> Iterator[None]:
    """Stop a process inside the block, unless it has ended or has another parent."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ProcessLookupError):
            fd = stack.enter_context(hold(pid))
            if parent is None or pid in children(parent):
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
                stack.callback(_go_on, fd)
        yield


def _go_on(fd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGCONT)


def _kill(pid: int, parent: int) -> None:
    with contextlib.suppress(ProcessLookupError), hold(pid) as fd:
        if pid in children(parent):
            signal.pidfd_send_signal(fd, signal.SIGKILL)


# Changes of a shard -------------------------------------------------------------------------------


def replace(shard: Shard, rng: random.Random) -> Pauses:
    """Rename a new version over the old one."""
    content = shard.make_content(same_form=rng.random() < 0.5)
    version = shard.version(content)
    fresh = shard.path.with_suffix(".new")
    fresh.write_bytes(content)
    with shard.history.turning(version):
        fresh.rename(shard.path)
    yield from ()


def rewrite(shard: Shard, rng: random.Random) -> Pauses:
    """Truncate the file to zero and write a new version into it, as `cp` does."""
    content = shard.make_content()
    version = shard.version(content)
    with shard.history.turning(None):
        os.truncate(shard.path, 0)
    with shard.path.open("r+b", buffering=0) as file:
        *blocks, last = _split(content)
        for block in blocks:
            yield rng.choice(_PAUSES_S)
            file.write(block)
        with shard.history.turning(version):
            file.write(last)


def overwrite(shard: Shard, rng: random.Random) -> Pauses:
    """Write a version of the same form and length over the old one.

    Between two writes the file is half new and half old. That counts as a version of its own,
    because a load may begin and end there. Each write counts as atomic, which it is except for
    microseconds.
    """
    old, new = shard.path.read_bytes(), shard.make_content(same_form=True)
    blocks, written = _split(new), 0
    with shard.path.open("r+b", buffering=0) as file:
        for number, block in enumerate(blocks, 1):
            written += len(block)
            version = shard.version(new[:written] + old[written:])
            with shard.history.turning(version):
                file.write(block)
            if number < len(blocks):
                yield rng.choice(_PAUSES_S)


def truncate(shard: Shard, rng: random.Random) -> Pauses:
    """Cut the file short, and restore it later."""
    content = shard.path.read_bytes()
    version = shard.version(content)
    with shard.history.turning(None):
        os.truncate(shard.path, rng.randrange(len(content)))
    yield rng.uniform(0.1, 1.5)
    with shard.path.open("r+b", buffering=0) as file:
        file.write(content[:-1])
        file.seek(len(content) - 1)
        with shard.history.turning(version):
            file.write(content[-1:])


def _split(content: bytes) -> list[bytes]:
    size = len(content) // _BLOCKS + 1
    return [content[at : at + size] for at in range(0, len(content), size)]
