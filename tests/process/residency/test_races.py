"""Of processes that load the same source one decodes; the others wait, or take over if it dies."""

import signal

import pytest
import torch
from safetensors.torch import save_file
from warming import CHILD, NBYTES, TENSORS, begun

import shmload


def test_processes_that_race_decode_each_source_once(tmp_path, child, evicts, shm_names):
    sources = []
    for number in range(4):
        sources.append(tmp_path / f"{number}.safetensors")
        save_file(TENSORS | {"number": torch.tensor(float(number))}, sources[-1])
    racers = [child(CHILD, "race", *sources) for _ in range(3)]
    for racer in racers:
        racer.expect("READY")
    for _ in sources:
        for racer in racers:
            racer.say()
        results = []
        for racer in racers:
            racer.expect("BEGUN")
            results.append(racer.expect("READ").split())
        assert sum(int(read) for read, _ in results) == NBYTES + 4
        assert len({segment for _, segment in results}) == 1
    assert len(shmload.verify()) == len(shm_names()) == len(sources)


def test_second_process_waits_for_the_first(checkpoint, child):
    first = child(CHILD, "warm", checkpoint)
    assert "1 shards to decode" in begun(first)
    first.expect("AT")
    second = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(second)
    assert shmload.segments() == []
    first.say()
    read, name = first.expect("READ").split()
    assert int(read) == NBYTES
    assert second.expect("READ").split() == ["0", name]
    assert [info.name for info in shmload.verify()] == [name]


def test_waiting_process_takes_over_from_one_that_is_killed(checkpoint, child):
    first, second = child(CHILD, "warm", checkpoint), None
    begun(first)
    first.expect("AT")
    second = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(second)
    first.end()
    second.expect("AT")
    second.say()
    assert int(second.expect("READ").split()[0]) == NBYTES
    assert len(shmload.verify()) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_waiting_has_a_deadline(checkpoint, child, configure, stopped):
    first = child(CHILD, "warm", checkpoint)
    begun(first)
    first.expect("AT")
    if stopped:
        first.process.send_signal(signal.SIGSTOP)
    configure(wait_timeout_s=0.2)
    with pytest.raises(shmload.SegmentTimeout, match="SHMLOAD_WAIT_TIMEOUT_S") as caught:
        shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    said = f"{caught.value.name} is still being decoded by process {first.pid} after"
    assert said in str(caught.value)
    if not stopped:
        first.say()
        assert first.expect("READ").split()[1] == caught.value.name


def test_warm_makes_resident_what_another_process_decodes_for_itself(checkpoint, child):
    private = child(CHILD, "load", checkpoint)
    begun(private)
    private.expect("AT")
    warming = child(CHILD, "warm", checkpoint)
    assert "1 awaited" in begun(warming)
    private.say()
    private.expect("LOADED")
    # It may attach the other's segment or decode by itself; the segment must be resident.
    line = warming._read_line()
    if line.startswith("AT"):
        warming.say()
        line = warming._read_line()
    assert [info.name for info in shmload.verify()] == line.split()[2:]
