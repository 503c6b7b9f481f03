"""The doctor measures the throughput of reading a file and copying to devices."""

import sys
import types

import pytest
import torch

from shmload._doctor.speed import is_file_cached, measure_copies, measure_reading
from shmload._runtimes import generic


def test_start_of_a_file_is_read_and_then_cached(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(3 << 20))
    assert measure_reading(path, 2 << 20).nbytes == 2 << 20
    speed = measure_reading(path)
    assert speed.nbytes == 3 << 20
    assert speed.bytes_per_s > 0
    assert speed.was_cached
    assert is_file_cached(path)


class FakeTorch(types.ModuleType):
    """A fake torch with one device; records the copies to it."""

    uint8 = None

    def __init__(self):
        super().__init__("torch")
        self.copied = []
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_name=lambda device: f"Device {device.index}",
            synchronize=lambda device: None,
        )

    def device(self, name):
        kind, _, index = name.partition(":")
        return types.SimpleNamespace(type=kind, index=int(index))

    def ones(self, *_, **__):
        return self._tensor("pageable")

    def _tensor(self, kind):
        target = types.SimpleNamespace(copy_=lambda source: self.copied.append(source.kind))
        return types.SimpleNamespace(
            kind=kind,
            nbytes=1000,
            pin_memory=lambda: self._tensor("pinned"),
            to=lambda device: target,
        )


def test_each_device_is_copied_to_from_both_kinds_of_memory(monkeypatch):
    fake = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setattr(generic, "torch", fake)
    (speed,) = measure_copies()
    assert speed.device == "Device 0"
    assert min(speed.pageable_bytes_per_s, speed.pinned_bytes_per_s) > 0
    assert fake.copied == ["pageable"] * 3 + ["pinned"] * 3


def test_machine_without_a_device_copies_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure_copies() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_real_devices_are_measured():
    assert all(speed.pinned_bytes_per_s > 0 for speed in measure_copies())
