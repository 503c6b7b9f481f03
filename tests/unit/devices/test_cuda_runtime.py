"""What the CUDA runtime asks of the driver, and what it makes of each error; without a driver."""

import contextlib
import ctypes

import pytest
import torch

from shmload._runtimes import cuda as cuda_runtime
from shmload._runtimes.cuda import CudaRuntime

PORTABLE, READ_ONLY = 1, 8


class Driver:
    """Stands in for `torch.cuda.cudart()` and for the library behind it.

    Args:
        errors: the error of each registration, by its flags; others are 0.
        takes_read_only: attribute 113; None for a library that does not know it.
    """

    def __init__(self, errors=(), takes_read_only=1):
        self._errors = dict(errors)
        self._takes_read_only = takes_read_only
        self.calls = []

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(f"register {flags}")
        return self._errors.get(flags, 0)

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")
        return self._errors.get("unregister", 0)

    def cudaDeviceGetAttribute(self, value, number, device):
        self.calls.append(f"attribute {number} of {device}")
        if self._takes_read_only is None:
            return 1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self._takes_read_only
        return 0


@pytest.fixture
def runtime_on(monkeypatch):
    """Return a function that makes the runtime of a device with a driver."""
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    cuda_runtime._say_once.cache_clear()

    def make(driver, library="cuda"):
        monkeypatch.setattr(cuda, "cudart", lambda: driver)
        monkeypatch.setattr(
            torch, "zeros", lambda size, device: driver.calls.append(f"take error of {device}")
        )
        found = library and (driver, library)
        monkeypatch.setattr(cuda_runtime, "_library", lambda: found)
        return CudaRuntime(torch.device("cuda", 2))

    return make


def register(runtime, *, read_only=True):
    return runtime.register(4096, 4096, read_only=read_only)


def test_read_only_pages_are_registered_as_such(runtime_on):
    driver = Driver()
    runtime = runtime_on(driver)
    assert [register(runtime), register(runtime)] == [True, True]
    flags = PORTABLE | READ_ONLY
    assert driver.calls == ["attribute 113 of 2", f"register {flags}", f"register {flags}"]


def test_device_that_takes_no_read_only_pages_is_not_asked_to(runtime_on):
    driver = Driver(takes_read_only=0)
    runtime = runtime_on(driver)
    assert not runtime.registers_read_only
    assert not register(runtime)
    assert register(runtime, read_only=False)
    assert driver.calls == ["attribute 113 of 2", f"register {PORTABLE}"]


@pytest.mark.parametrize("takes_read_only", [1, None])
@pytest.mark.parametrize("error", [1, 801])
def test_refused_flag_is_not_tried_again(runtime_on, caplog, error, takes_read_only):
    driver = Driver({PORTABLE | READ_ONLY: error}, takes_read_only)
    runtime = runtime_on(driver)
    assert runtime.registers_read_only
    driver.calls.clear()
    assert [register(runtime), register(runtime)] == [False, False]
    assert not runtime.registers_read_only
    assert driver.calls == [f"register {PORTABLE | READ_ONLY}", "take error of cuda:2"]
    assert register(runtime, read_only=False)
    assert not caplog.records


@pytest.mark.parametrize("error", [2, 712, 999])
def test_other_errors_say_nothing_of_the_flag(runtime_on, caplog, error):
    driver = Driver({PORTABLE | READ_ONLY: error})
    runtime = runtime_on(driver)
    assert not register(runtime)
    assert runtime.registers_read_only
    assert driver.calls[-1] == "take error of cuda:2"
    assert f"(error {error})" in caplog.text


@pytest.mark.parametrize("error", [1, 2, 801])
def test_writable_pages_that_are_refused_leave_no_error(runtime_on, error):
    driver = Driver({PORTABLE: error})
    runtime = runtime_on(driver)
    assert not register(runtime, read_only=False)
    assert driver.calls == [f"register {PORTABLE}", "take error of cuda:2"]


def test_failed_unregistering_leaves_no_error(runtime_on):
    driver = Driver({"unregister": 713})
    runtime_on(driver).unregister(4096)
    assert driver.calls == ["unregister", "take error of cuda:2"]


def test_rocm_is_asked_for_no_attribute(runtime_on):
    """Its attributes have other numbers."""
    driver = Driver()
    assert runtime_on(driver, library="hip").registers_read_only
    assert driver.calls == []


@pytest.mark.parametrize(
    ("loaded", "found"),
    [
        ({"libcudart": "libc.so.6"}, "cuda"),
        ({"libamdhip64": "libc.so.6"}, "hip"),
        ({"libcudart": "/lib/libcudart.so.12 (deleted)"}, None),
        ({}, None),
    ],
)
def test_library_is_the_one_that_is_loaded(monkeypatch, loaded, found):
    monkeypatch.setattr(cuda_runtime, "mapped_library", loaded.get)
    library = cuda_runtime._library.__wrapped__()
    assert (library and library[1]) == found


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
