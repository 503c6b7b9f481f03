"""NVIDIA's management library is asked by UUID, and is no error where it is missing."""

import ctypes

import pytest

from shmload._runtimes import cuda


class Library:
    """`libnvidia-ml.so.1` with one GPU and one part of a GPU; each call returns an error code."""

    def __init__(self, init=0, info=0):
        self.init = init
        self.info = info
        self.is_open = False
        self.names = {b"GPU-a": 7, b"MIG-b": 8}

    def nvmlInit_v2(self):
        self.is_open = self.init == 0
        return self.init

    def nvmlShutdown(self):
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        assert self.is_open
        handle._obj.value = self.names.get(name)
        return 0 if name in self.names else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = 100
        memory._obj.free = handle.value
        return self.info


@pytest.mark.parametrize(
    ("library", "found"),
    [
        (Library(), {"a": 7, "b": 8}),
        (Library(init=9), {}),  # the driver is not loaded
        (Library(info=3), {}),  # not supported
        (object(), {}),  # an old library
        (None, {}),
    ],
    ids=["works", "no driver", "not supported", "old", "none"],
)
def test_free_memory_by_uuid(monkeypatch, library, found):
    def load(name):
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert cuda.free_nbytes(["a", "b", "c"]) == found
    assert not getattr(library, "is_open", False)
