"""Uploads bring every byte, in any order of the device's copies, and leave nothing locked."""

import itertools
import mmap
import os

import pytest
import torch
from devices import LateDevice, is_copied_on_read
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from shmload._devices.moves import Moves
from shmload._devices.upload import Upload, bring
from shmload._host.descriptors import inode_of
from shmload._host.memory import has_own_pages, is_touched

LIMIT = 192 << 10  # three slots of 64 KiB


def module_of(*sizes):
    module = nn.Module()
    for number, size in enumerate(sizes):
        content = torch.arange(number, number + size, dtype=torch.int32).to(torch.uint8)
        module.register_buffer(f"b{number}", content)
    return module


def contents(module):
    return {name: tensor.clone() for name, tensor in module.named_buffers()}


def send(module, device, max_nbytes=LIMIT):
    moves = Moves([(module, lambda path: device)])
    bring(moves, max_nbytes=max_nbytes)
    assert device.pending == 0
    assert not device.registered
    moves.commit()


def assert_same(module, wanted):
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.named_buffers())


_sizes = st.lists(
    st.one_of(st.integers(1, 600), st.integers(500_000, 600_000)), min_size=1, max_size=12
)


@settings(max_examples=30)  # each example copies megabytes
@given(_sizes, st.sampled_from([12 << 10, LIMIT, 3 << 20, None]))
@example([1 << 10] * 2000, LIMIT)
def test_every_byte_arrives(sizes, max_nbytes):
    module = module_of(*sizes)
    wanted = contents(module)
    send(module, LateDevice(), max_nbytes)
    assert_same(module, wanted)


def test_tensors_of_one_file_go_to_several_devices():
    whole = torch.arange(1_500_000).to(torch.uint8)
    module = nn.Module()
    for number, part in enumerate(whole.split([600_000, 100, 700_000, 50, 199_850])):
        module.register_buffer(f"b{number}", part)
    wanted = contents(module)
    devices = [LateDevice(), LateDevice()]
    moves = Moves([(module, lambda path: devices[int(path[1]) % 2])])
    bring(moves, max_nbytes=LIMIT)
    moves.commit()
    assert [device.pending for device in devices] == [0, 0]
    assert all(device.calls.count("copy") for device in devices)
    assert not any(device.registered for device in devices)
    assert_same(module, wanted)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5])
@pytest.mark.parametrize("sizes", [(600_000, 100, 600_000), (524_288,) * 8])
def test_device_that_is_full_in_the_middle_leaves_nothing_under_way(fails_at, sizes):
    device = LateDevice(fails_at=fails_at)
    module = module_of(*sizes)
    before = dict(module.named_buffers())
    moves = Moves([(module, lambda path: device)])
    with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
        bring(moves, max_nbytes=LIMIT)
    assert device.pending == 0
    assert not device.registered
    assert all(tensor is before[name] for name, tensor in module.named_buffers())


def test_sources_may_change_when_they_were_read():
    """They are in slots then, though no device has fetched them."""
    module = module_of(100_000)
    wanted = contents(module)
    device = LateDevice()
    moves = Moves([(module, lambda path: device)])
    with Upload(100_000, device) as upload:
        upload.copy(moves.moves)
        assert device.pending
        module.b0.zero_()
    moves.commit()
    assert_same(module, wanted)


# Page-locked memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("locks", [True, False], ids=["memory of torch", "no locked memory"])
def test_driver_that_refuses_registration_gets_every_byte(locks):
    device = LateDevice(registers=False, locks=locks)
    module = module_of(600_000, 10)
    wanted = contents(module)
    send(module, device)
    assert_same(module, wanted)
    assert "unregister" not in device.calls


def test_limit_is_for_all_slots():
    device = LateDevice()
    sizes = []
    register = device.register

    def note(address, nbytes, *, read_only):
        sizes.append(nbytes)
        return register(address, nbytes, read_only=read_only)

    device.register = note
    send(module_of(3_000_000), device, 1_000_000)
    assert sum(sizes) <= 1_000_000


# Where it runs ------------------------------------------------------------------------------------


def test_forked_process_whose_parent_has_torchs_threads_uploads():
    torch.ones(2048, 2048) @ torch.ones(2048, 2048)  # starts them
    module = module_of(600_000)
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # as shmload does where it finds such a process
            wanted = contents(module)
            send(module, LateDevice())
            assert_same(module, wanted)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Files --------------------------------------------------------------------------------------------


@pytest.fixture
def mapped(tmp_path):
    """A file of 2 MiB, open, and a module with its bytes, mapped as a segment's are."""
    path = tmp_path / "segment"
    path.write_bytes(bytes(range(256)) * 8192)
    module = nn.Module()
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        module.register_buffer("weight", torch.frombuffer(content, dtype=torch.uint8))
        assert is_copied_on_read(module.weight.data_ptr())
        yield module, file.fileno()


def send_mapped(module, fd, device):
    moves = Moves([(module, lambda path: device)])
    bring(moves, None, LIMIT, [(inode_of(os.fstat(fd)), fd)])
    moves.commit()
    return bytes(module.weight.numpy())


def test_file_is_read_in_place_of_its_mapping(mapped):
    module, fd = mapped
    source = module.weight
    assert send_mapped(module, fd, LateDevice()) == os.pread(fd, 2 << 20, 0)
    assert not is_touched(source.data_ptr(), source.data_ptr() + source.nbytes)


def test_file_that_cannot_be_read_is_copied_from_its_mapping(mapped, monkeypatch):
    module, fd = mapped
    reads = itertools.count()

    def fail_or_read_little(fd, buffers, offset):
        if next(reads) % 2:
            raise OSError(5, "no")
        return preadv(fd, [buffers[0][:100]], offset)

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", fail_or_read_little)
    assert send_mapped(module, fd, LateDevice()) == os.pread(fd, 2 << 20, 0)


def test_device_with_the_hosts_memory_makes_the_kernel_copy_no_page(mapped):
    module, fd = mapped
    source = module.weight
    send(module, LateDevice(is_integrated=True))  # without the file
    assert bytes(module.weight.numpy()) == os.pread(fd, 2 << 20, 0)
    start = source.data_ptr()
    assert not has_own_pages(start, start + source.nbytes)
