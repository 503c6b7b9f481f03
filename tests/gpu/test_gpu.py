"""Pipelines on a device have the library's bits, and a load leaves nothing behind."""

import mmap
import os

import numpy as np
import pytest
import torch
from accelerated import load, models_of
from comparing import reference, tensors_of
from pipelines import FAMILIES, run, save_with_large_tensors
from runtime_contract import RuntimeContract
from torch import nn

import shmload
from shmload._devices.origin import SegmentFiles
from shmload._devices.upload import PageLocked
from shmload._devices.waiting import Waiting
from shmload._host.descriptors import inode_of

pytestmark = pytest.mark.usefixtures("device")


def assert_same(got, wanted, device):
    """Compare the tensors of two pipelines; the first one's are on the device."""
    for name, model in models_of(wanted).items():
        found, expected = tensors_of(models_of(got)[name]), tensors_of(model)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            other = found[key]
            assert str(other.device) == device.tensor_device, (name, key)
            assert other.dtype == tensor.dtype, (name, key)
            assert torch.equal(other.cpu(), tensor), (name, key)
            assert other.data_ptr() % 256 == 0 or other.numel() == 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("limit", [None, "64KiB"])
def test_pipeline_equals_the_library(saved, device, family, limit):
    source = saved(family)
    got = load(source, max_host_memory=limit)
    assert_same(got, reference(source, torch.bfloat16), device)


def test_pipeline_makes_an_image_on_two_devices(saved):
    source = saved("flux")
    got = load(source, device_map={"": "cuda:0", "vae": "cpu"})
    assert run(got).shape[0] == 1
    got.reset_device_map()
    assert {p.device.type for m in models_of(got).values() for p in m.parameters()} == {"cpu"}


def test_generation_with_weights_that_wait(saved, device, evicts):
    source = saved("flux")
    got = load(source, device_map={"": "offload"}, keep=True)
    wanted = run(reference(source, torch.bfloat16).to(device.tensor_device))
    for _ in range(2):
        assert np.allclose(run(got), wanted, atol=0.05)
    got.reset_device_map()


def test_blocks_that_wait_are_there_in_time(device):
    """Copies that come too late, or over a block that still computes, change some output."""
    size, count = 1024, 6
    fd = os.memfd_create("segment", os.MFD_CLOEXEC)
    try:
        stored = torch.randn(count, size, size) / size**0.5
        os.pwrite(fd, stored.numpy().tobytes(), 0)
        content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(content, dtype=torch.float32).view(count, size, size)
        blocks = [nn.Linear(size, size, bias=False) for _ in range(count)]
        waiting = Waiting(device.runtime())
        segments = SegmentFiles([(inode_of(os.fstat(fd)), fd)])
        for block, weight in zip(blocks, flat, strict=True):
            block.weight = nn.Parameter(weight)
            waiting.add(block, segments.origins(block.parameters()))
    finally:
        os.close(fd)
    here = stored.to(device.tensor_device)
    inputs = torch.randn(64, size, device=device.tensor_device)
    with torch.no_grad():
        for _ in range(20):
            output = wanted = inputs
            for block in blocks:
                with waiting.using(block):
                    output = block(output)
            for weight in here:
                wanted = nn.functional.linear(wanted, weight)
            assert torch.equal(output, wanted)
    waiting.release()


def test_two_loads_leave_nothing_on_the_device(saved, base_line):
    source = saved("flux")
    load(source)
    before = base_line()
    for limit in (None, "64KiB"):
        got = load(source, max_host_memory=limit)
        assert base_line() > before
        del got
        assert base_line() == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, "1MiB"])
def test_full_device_is_an_error_and_the_next_load_works(large_model, device, base_line, limit):
    before = base_line()
    end = device.fill_up(24_000_000)
    try:
        with pytest.raises((torch.OutOfMemoryError, shmload.DoesNotFit)):
            load(large_model, max_host_memory=limit)
    finally:
        end()
    assert base_line() == before
    got = load(large_model, max_host_memory=limit)
    assert_same(got, reference(large_model, torch.bfloat16), device)


def test_large_tensors_lie_in_one_segment(device):
    """Torch's allocator cuts them from what was reserved."""
    if device.tensor_device != "cuda:0":
        pytest.skip("torch's allocator is CUDA's own")
    torch.cuda.empty_cache()
    module = nn.ModuleList(nn.Linear(1024, 1100, bias=False) for _ in range(40))
    before = len(torch.cuda.memory_snapshot())
    shmload.to_device(module, 0)
    assert len(torch.cuda.memory_snapshot()) <= before + 1


def test_tensor_that_is_deleted_frees_its_memory_at_once(device):
    module = nn.ModuleList(nn.Linear(1024, 1100, bias=False) for _ in range(3))
    shmload.to_device(module, 0)
    before = device.allocated()
    del module[1]
    assert before - device.allocated() == 1024 * 1100 * 4


@pytest.fixture
def large_model(tmp_path):
    """A pipeline of 50 MB in bfloat16."""
    return save_with_large_tensors(tmp_path / "large", 256)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_large_tensors_of_segments_arrive(large_model, device, evicts, keep):
    wanted = reference(large_model, torch.bfloat16)
    for _ in range(2):  # with `keep` the second one attaches
        assert_same(load(large_model, keep=keep), wanted, device)


def test_refused_registration_leaves_no_error_behind(device):
    runtime = device.runtime()
    memory = PageLocked(8192, runtime)
    address = memory.content.data_ptr()
    assert not runtime.register(address, 8192, read_only=False)  # a second time
    ones = torch.ones(3, device=device.tensor_device)
    assert ones.sum().item() == 3  # torch does not see the error
    memory.close()


class TestRuntime(RuntimeContract):
    """The device keeps the contract of runtimes."""

    @pytest.fixture
    def runtime(self, device):
        return device.runtime()
