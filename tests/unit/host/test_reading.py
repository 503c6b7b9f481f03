"""How a file is read follows from what is known about it."""

import pytest

from shmload._host.reading import MAX_READERS, Facts, choose_reading

_GB = 10**9


def _facts(**known):
    return Facts(**{"nbytes": _GB, "cached": 0.0} | known)


@pytest.mark.parametrize(
    ("facts", "workers", "readers", "is_direct", "why"),
    [
        # At hand: nothing to gain.
        (_facts(nbytes=1 << 20), 1, 0, False, "small"),
        (_facts(kind="tmpfs"), 1, 0, False, "in memory"),
        (_facts(cached=1.0, kind="ext4"), 1, 0, False, "in memory"),
        (_facts(cached=0.9, kind="nfs4", is_remote=True), 1, 0, False, "in memory"),
        (_facts(cached=None, kind="overlay", read_s=0.0002), 1, 0, False, "as fast as memory"),
        # What could not be measured is read as ever.
        (_facts(kind="ext4"), 1, 0, False, "failed"),
        # A fast disk: past the page cache, also if the kernel believes that it turns.
        (_facts(kind="ext4", has_direct=True, read_s=0.0005), 1, 4, True, "0.5 ms"),
        (
            _facts(kind="ext4", has_direct=True, read_s=0.0005, is_rotational=True),
            1,
            4,
            True,
            "faster than filling the page cache",
        ),
        (_facts(kind="ext4", has_direct=True, read_s=0.0001), 1, 4, True, "0.1 ms"),
        (_facts(cached=None, kind="overlay", has_direct=True, read_s=0.0005), 4, 4, True, ""),
        (_facts(kind="zfs", read_s=0.0005), 1, 4, False, "0.5 ms"),
        # A slow one: the page cache keeps what took so long.
        (_facts(kind="ext4", has_direct=True, read_s=0.002), 1, 5, False, "saves the next load"),
        (_facts(kind="ext4", has_direct=True, read_s=0.002), 4, 4, False, "saves the next load"),
        (_facts(kind="ext4", read_s=0.008, is_rotational=True), 2, 1, False, "turns"),
        # Latency: as many reads as hide it, among all workers.
        (_facts(kind="fuse.s3fs", is_remote=True, has_direct=True, read_s=0.0102), 1, 25, True, ""),
        (_facts(kind="fuse.s3fs", is_remote=True, has_direct=True, read_s=0.0102), 4, 7, True, ""),
        (_facts(kind="fuse", is_remote=True, read_s=0.0102), 1, 25, False, "saves the next load"),
        (_facts(kind="nfs4", is_remote=True, has_direct=True, read_s=2), 1, MAX_READERS, True, ""),
        (_facts(kind="nfs4", is_remote=True, has_direct=True, read_s=0.0), 1, 4, True, "remote"),
    ],
)
def test_reading_follows_from_the_facts(facts, workers, readers, is_direct, why):
    reading = choose_reading(facts, workers)
    assert (reading.readers, reading.is_direct) == (readers, is_direct)
    assert why in reading.why
