"""The error of a full /dev/shm advises what gives room there."""

import pytest

from shmload._segments import eviction
from shmload.errors import SharedMemoryFull

MIB = 1 << 20


@pytest.fixture
def refusal(monkeypatch):
    """Return the message of a load of some bytes, where others and shmload have some of 600 MiB."""

    def refuse(nbytes, *, own, others):
        monkeypatch.setattr(eviction, "shm_total_nbytes", lambda: 600 * MIB)
        monkeypatch.setattr(eviction, "shm_free_nbytes", lambda: 600 * MIB - own - others)
        monkeypatch.setattr(eviction, "written_nbytes", lambda names: own)
        with pytest.raises(SharedMemoryFull) as caught:
            eviction.require_room(nbytes)
        return str(caught.value)

    return refuse


def test_files_of_others_are_named_where_nothing_of_shmload_is_there(refusal):
    said = refusal(120 * MIB, own=0, others=560 * MIB)
    assert "shmload rm" not in said
    assert "remove what others have there, 560.00 MiB (`du -ah /dev/shm" in said
    assert "mount -o remount" in said


def test_own_segments_are_named_where_they_are_enough(refusal):
    said = refusal(120 * MIB, own=500 * MIB, others=50 * MIB)
    assert "free some with `shmload rm`" in said
    assert "others" not in said


def test_both_are_named_where_own_segments_are_not_enough(refusal):
    said = refusal(120 * MIB, own=50 * MIB, others=500 * MIB)
    assert "free some with `shmload rm` or `shmload gc`, or remove what others have" in said


def test_more_than_all_of_it_advises_to_enlarge_it(refusal):
    said = refusal(700 * MIB, own=300 * MIB, others=200 * MIB)
    assert "all of it is 600.00 MiB; enlarge it: `mount -o remount" in said
    assert "shmload rm" not in said
    assert "others" not in said
