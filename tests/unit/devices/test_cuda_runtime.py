"""What the CUDA runtime asks of the driver, and what it makes of each error; without a driver."""

import contextlib
import types

import pytest
import torch

from shmload._runtimes import runtime as runtime_module
from shmload._runtimes.cuda import CudaRuntime

PORTABLE, READ_ONLY = 1, 8


class Driver:
    """Stands in for `torch.cuda.cudart()`.

    Args:
        errors: the error of each registration, by its flags; others are 0.
    """

    def __init__(self, errors=()):
        self._errors = dict(errors)
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(f"register {flags}")
        return self._errors.get(flags, 0)

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        return self._errors.get("unregister", 0)


@pytest.fixture
def runtime_on(monkeypatch):
    """Return a function that makes the runtime of a device with a driver."""
    cuda = torch.cuda
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    runtime_module.say_once.cache_clear()

    def make(driver):
        monkeypatch.setattr(cuda, "cudart", lambda: driver)
        monkeypatch.setattr(
            torch, "zeros", lambda size, device: driver.calls.append(f"take error of {device}")
        )
        return CudaRuntime(torch.device("cuda", 2))

    return make


@pytest.mark.parametrize(("read_only", "flags"), [(True, PORTABLE | READ_ONLY), (False, PORTABLE)])
def test_pages_are_registered_as_they_are_mapped(runtime_on, read_only, flags):
    driver = Driver()
    assert runtime_on(driver).register(4096, 4096, read_only=read_only)
    assert driver.calls == [f"register {flags}"]


@pytest.mark.parametrize("error", [1, 2, 712, 801])
@pytest.mark.parametrize("flags", [PORTABLE, PORTABLE | READ_ONLY])
def test_refused_pages_leave_no_error_and_are_said_once(runtime_on, caplog, error, flags):
    driver = Driver({flags: error})
    runtime = runtime_on(driver)
    for _ in range(2):
        assert not runtime.register(4096, 4096, read_only=bool(flags & READ_ONLY))
    assert driver.calls == [f"register {flags}", "take error of cuda:2"] * 2
    (record,) = caplog.records
    assert f"(error {error})" in record.message


def test_failed_unregistering_leaves_no_error(runtime_on):
    driver = Driver({"unregister": 713})
    runtime_on(driver).unregister(4096)
    assert driver.calls == ["unregister", "take error of cuda:2"]


def test_device_that_shares_the_hosts_memory_is_known(runtime_on, monkeypatch):
    runtime = runtime_on(Driver())
    for is_integrated in (0, 1):
        facts = types.SimpleNamespace(is_integrated=is_integrated)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, facts=facts: facts)
        assert runtime.is_integrated == bool(is_integrated)


# Memory of the device -----------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Note what the allocator is asked for, which refuses more than 1 GiB."""
    sizes = []

    def empty(runtime, nbytes):
        sizes.append(nbytes)
        if nbytes > 1 << 30:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(CudaRuntime, "empty", empty)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (1 << 30) + (1 << 20))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return sizes


def test_memory_for_large_tensors_is_taken_at_once(runtime_on, asked):
    runtime = runtime_on(Driver())
    runtime.reserve([(3 << 20) + 256, 1 << 20, 5 << 20])  # one comes from small blocks
    assert asked == [(8 << 20) + 512]
    runtime.reserve([1 << 20, 256])
    assert len(asked) == 1


def test_memory_that_torch_has_already_is_used_first(runtime_on, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 << 30)
    runtime_on(Driver()).reserve([5 << 20])
    assert asked == []


def test_full_device_is_no_error_yet(runtime_on, asked):
    runtime_on(Driver()).reserve([2 << 30])
    assert asked == [2 << 30]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:256"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:256"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),
    ],
)
def test_allocator_that_does_not_cut_blocks_is_asked_for_each(
    runtime_on, asked, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    runtime_on(Driver()).reserve([2 << 20])
    assert asked == []


def test_other_allocators_are_asked_for_each(runtime_on, asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    runtime_on(Driver()).reserve([2 << 20])
    assert asked == []
