"""This machine's devices: only those that are used are asked, and CUDA by name is the current one.

The calls of torch are recorded; no GPU is needed.
"""

from types import SimpleNamespace

import pytest
import torch

from shmload._devices.destination import Destination
from shmload._placement.inventory import choose_inventory, machine_inventory, parse_inventory
from shmload._runtimes import cuda as runtime
from shmload._runtimes.kinds import current_index

GIB = 1 << 30


class Cuda:
    """CUDA devices of 1, 2, 3 ... GiB that note which of them are asked, and how."""

    def __init__(self, count):
        self.count = count
        self.asked = []
        self.is_used = False
        self.current = 0
        self.contexts = set()
        self.has_nvml = True

    def mem_get_info(self, index):
        self.asked.append(("torch", index))
        self.contexts.add(index)
        return (index + 1) * GIB, 80 * GIB

    def by_nvml(self, uuids):
        asked = [int(uuid.removeprefix("uuid-")) for uuid in uuids]
        self.asked += [("nvml", index) for index in asked]
        return {f"uuid-{n}": (n + 1) * GIB for n in asked} if self.has_nvml else {}


@pytest.fixture
def cuda(monkeypatch):
    """Three devices, in a process that has not used them."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    devices = Cuda(3)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: devices.count,
        "is_initialized": lambda: devices.is_used,
        "current_device": lambda: devices.current,
        "mem_get_info": devices.mem_get_info,
        "memory_reserved": lambda index: 5 if index in devices.contexts else 0,
        "memory_allocated": lambda index: 2 if index in devices.contexts else 0,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"uuid-{index}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index in devices.contexts, raising=False
    )
    monkeypatch.setattr(runtime, "free_nbytes", devices.by_nvml)
    return devices


def sizes(found):
    return {device.name: device.nbytes for device in found.accelerators}


@pytest.mark.parametrize(
    ("device_map", "asked"),
    [
        ("cuda:1", [1]),
        ({"transformer": {"": 0, "blocks": torch.device("cuda", 2)}, "": "meta"}, [0, 2]),
        ("cpu", []),
        ("auto", [0, 1, 2]),
        ({"": 1, "vae": "offload"}, [0, 1, 2]),  # the emptiest may compute it
    ],
    ids=str,
)
@pytest.mark.parametrize("has_nvml", [True, False])
def test_a_device_that_gets_nothing_is_not_asked(cuda, device_map, asked, has_nvml):
    cuda.has_nvml = has_nvml
    found = Destination(device_map=device_map).inventory()
    assert sizes(found) == {f"cuda:{index}": (index + 1) * GIB for index in asked}
    assert {index for _, index in cuda.asked} == {*asked}
    assert cuda.contexts == (set() if has_nvml else {*asked})
    assert found.names == ["cuda:0", "cuda:1", "cuda:2", "cpu"]


def test_other_accelerators_are_listed(monkeypatch):
    xpu = SimpleNamespace(device_count=lambda: 2, current_device=lambda: 1)
    accelerator = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("xpu")
    )
    monkeypatch.setattr(torch, "xpu", xpu)
    monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    found = machine_inventory()
    assert [device.name for device in found.accelerators] == ["xpu:0", "xpu:1"]
    assert all(device.is_boundless for device in found.accelerators)  # torch cannot tell
    assert found.current == "xpu:1"


@pytest.mark.parametrize(
    ("current", "rank", "index"),
    [
        (None, None, 0),
        (2, "1", 2),  # set on purpose
        (None, "1", 1),
        (0, "1", 1),  # not set, as far as can be told
        (None, "3", 0),  # each rank sees one device, or fewer than there are ranks
        (None, "x", 0),
    ],
)
def test_cuda_is_the_current_device_or_the_ranks(cuda, monkeypatch, current, rank, index):
    cuda.is_used = current is not None
    cuda.current = current
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert current_index() == index
    for given in ("cuda", {"": torch.device("cuda")}):
        assert list(sizes(Destination(device_map=given).inventory())) == [f"cuda:{index}"]
    assert list(sizes(choose_inventory(None, {"cuda": GIB}))) == [f"cuda:{index}"]
    assert not cuda.contexts
    assert parse_inventory("2x24GiB").current == "cuda:0"  # invented
