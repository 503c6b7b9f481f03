"""A load does not reuse parts that it lent to a service which went away."""

import os
import threading
from pathlib import Path

import pytest
from watching import until
from weight import assert_right

import shmload
from shmload._checkpoints.hub import find_source
from shmload._checkpoints.wanted import Wanted
from shmload._loading import decoder
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.sources import derive_rules
from shmload._segments.part import acquire
from shmload._segments.segment import Segment, Stay
from shmload.errors import ServiceUnavailable


class GoneService:
    """A fake service that takes a loan, waits until it may go, and never answers."""

    def __init__(self):
        self.may_go = threading.Event()
        self.lent = []

    def reserve(self, model, nbytes, on_wait, is_cancelled):
        return ()

    def decode(self, model, jobs, on_bytes, is_cancelled):
        self.lent = [os.dup(job.part_fd) for job in jobs]
        assert self.may_go.wait(60)
        raise ServiceUnavailable("nowhere", "it went away")

    def close(self):
        pass

    def write(self):
        """Write to the lent parts, like a worker that continues much later."""
        while self.lent:
            fd = self.lent.pop()
            os.pwrite(fd, b"x" * 4096, os.fstat(fd).st_size // 2)
            os.close(fd)


@pytest.fixture
def service(configure, monkeypatch):
    """The service that every load of this test finds."""
    configure(inline_nbytes=0, workers=1)
    service = GoneService()
    monkeypatch.setattr(decoder, "find_service", lambda: service)
    return service


def test_what_it_writes_later_reaches_no_segment(service, shard, evicts):
    service.may_go.set()
    shmload.warm(shard, torch_dtype="bfloat16")
    service.write()
    assert len(shmload.verify()) == 1


def test_part_without_a_name_is_replaced_too(service, shard):
    (planned,) = shmload.plan(shard, dtype="bfloat16", keep=True).shards
    taken = Path("/dev/shm", planned.segment)
    taken.symlink_to("nowhere")
    service.may_go.set()
    state = shmload.load_state_dict(shard, "bfloat16")
    service.write()
    assert_right(state)
    taken.unlink()


def test_loader_that_waits_for_the_part_gets_the_segment(service, shard, evicts, shm_names):
    waiting = threading.Thread(
        target=shmload.warm, args=(shard,), kwargs={"torch_dtype": "bfloat16"}
    )
    waiting.start()
    until(lambda: service.lent)
    (planned,) = shmload.plan(shard, torch_dtype="bfloat16", keep=True).shards
    awaited = acquire(planned.segment)
    service.may_go.set()
    found = awaited.wait(60)
    waiting.join()
    service.write()
    assert isinstance(found, Segment)
    found.close()
    assert shm_names() == [planned.segment]
    assert len(shmload.verify()) == 1


def test_part_that_a_load_has_opened_for_reading_stays(service, shard):
    source = find_source(Wanted(source=shard))
    with (
        Progress(False, "") as progress,
        Load(
            source,
            derive_rules(source, "bfloat16", progress.steps),
            stay=Stay.PRIVATE,
            progress=progress,
            parent_is_busy=False,
        ) as load,
    ):
        (path,) = load.holdings.files().values()
        seen = path.stat().st_ino
        service.may_go.set()
        load.wait()
        assert {inode.number for inode in load.holdings.inodes()} == {seen}
        load.verify()
    for fd in service.lent:
        os.close(fd)


def test_room_that_the_service_gave_is_not_asked_of_a_budget(service, shard, configure, evicts):
    configure(inline_nbytes=0, workers=1, budget=1 << 20)
    service.may_go.set()
    assert len(shmload.warm(shard, torch_dtype="bfloat16").segments) == 1
    service.write()


def test_memory_that_the_service_takes_need_not_be_there_for_its_client(service, shard, cgroup):
    cgroup(1 << 30, (1 << 30) - (50 << 20))  # less than the margin
    service.may_go.set()
    with pytest.raises(shmload.MemoryLimitExceeded, match="group leaves 0 B"):
        shmload.warm(shard, torch_dtype="bfloat16")
    assert service.lent  # only a client that decodes by itself needs the memory
    service.write()
