"""This machine's devices: only those that are used are asked, and CUDA by name is the current one.

The calls of torch are recorded; no GPU is needed.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from shmload._devices.destination import Destination
from shmload._host import nvml
from shmload._placement import inventory
from shmload._placement.inventory import choose_inventory, machine_inventory
from shmload._runtimes.kinds import current_index
from shmload.errors import ArgumentError

GIB = 1 << 30


class Cuda:
    """CUDA devices of 1, 2, 3 ... GiB that note what is asked of them."""

    def __init__(self, count):
        self.count = count
        self.calls = []
        self.is_used = False
        self.current = 0
        self.contexts = set()
        self.has_nvml = True

    def properties(self, index):
        self.calls.append(("properties", index))
        return SimpleNamespace(uuid=f"uuid-{index}")

    def mem_get_info(self, index):
        self.calls.append(("context", index))
        self.contexts.add(index)
        return (index + 1) * GIB, 80 * GIB

    def current_device(self):
        self.calls.append(("current", None))
        return self.current

    def by_nvml(self, uuids):
        asked = [int(uuid.removeprefix("uuid-")) for uuid in uuids]
        self.calls += [("nvml", index) for index in asked]
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
        "current_device": devices.current_device,
        "mem_get_info": devices.mem_get_info,
        "memory_reserved": lambda index: 5 if index in devices.contexts else 0,
        "memory_allocated": lambda index: 2 if index in devices.contexts else 0,
        "get_device_properties": devices.properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        torch._C, "_cuda_hasPrimaryContext", lambda index: index in devices.contexts, raising=False
    )
    monkeypatch.setattr(nvml, "free_nbytes", devices.by_nvml)
    return devices


def sizes(found):
    return {device.name: device.nbytes for device in found.accelerators}


# Memory -------------------------------------------------------------------------------------------


def test_all_are_asked_without_a_context(cuda):
    assert sizes(machine_inventory()) == {"cuda:0": GIB, "cuda:1": 2 * GIB, "cuda:2": 3 * GIB}
    assert [call for call in cuda.calls if call[0] != "properties"] == [
        ("nvml", 0),
        ("nvml", 1),
        ("nvml", 2),
    ]


@pytest.mark.parametrize(
    ("device_map", "asked"),
    [
        (2, [2]),
        ("cuda:1", [1]),
        ({"": "cpu", "vae": 1}, [1]),
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
    assert list(sizes(found)) == [f"cuda:{index}" for index in asked]
    assert {index for _, index in cuda.calls} <= {*asked}
    assert cuda.contexts == (set() if has_nvml else {*asked})
    assert found.names == ["cuda:0", "cuda:1", "cuda:2", "cpu"]


def test_device_with_a_context_is_asked_by_torch(cuda):
    cuda.is_used = True
    cuda.contexts = {1}
    assert sizes(machine_inventory([0, 1])) == {"cuda:0": GIB, "cuda:1": 2 * GIB + 3}
    assert ("nvml", 1) not in cuda.calls


def test_with_limits_no_device_is_asked(cuda):
    found = choose_inventory(None, {1: GIB, "cpu": 3})
    assert sizes(found) == {"cuda:1": GIB}
    assert cuda.calls == []
    with pytest.raises(ArgumentError, match="names cuda:3, and the devices are cuda:0, cuda:1"):
        choose_inventory(None, {3: GIB})


def test_presence_is_checked_without_a_question(cuda):
    with pytest.raises(ArgumentError, match=r"names cuda:7, .*cuda:0, cuda:1, cuda:2, cpu"):
        Destination(device_map={"": 0, "vae": 7}).require_present()
    Destination(device_map={"": 0, "vae": 2}).require_present()
    assert cuda.calls == []


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
    assert found.current_index == 1
    xpu.mem_get_info = lambda index: (GIB, 2 * GIB)
    xpu.memory_reserved = xpu.memory_allocated = lambda index: 0
    assert sizes(machine_inventory()) == {"xpu:0": GIB, "xpu:1": GIB}


def test_this_machine_has_a_cpu_and_the_gpus_that_torch_sees():
    found = machine_inventory()
    assert found.find("cpu").nbytes > 0
    assert len(found.accelerators) == torch.cuda.device_count()


# The current device -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("current", "rank", "index"),
    [
        (None, None, 0),
        (2, None, 2),
        (2, "1", 2),  # set on purpose
        (None, "1", 1),
        (0, "1", 1),  # not set, as far as can be told
        (0, "0", 0),
        (None, "3", 0),  # each rank sees one device, or fewer than there are ranks
        (None, "", 0),
        (None, "x", 0),
    ],
)
def test_cuda_is_the_current_device_or_the_ranks(cuda, monkeypatch, current, rank, index):
    cuda.is_used = current is not None
    cuda.current = current
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert current_index() == index
    assert ("current", None) in cuda.calls or not cuda.is_used
    for given in ("cuda", torch.device("cuda"), {"": "cuda"}):
        assert list(sizes(Destination(device_map=given).inventory())) == [f"cuda:{index}"]
    assert list(sizes(choose_inventory(None, {"cuda": GIB}))) == [f"cuda:{index}"]
    assert not cuda.contexts


def test_rank_of_another_launcher_counts(cuda, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert current_index() == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert current_index() == 1


def test_one_visible_device_is_the_ranks(cuda, monkeypatch):
    cuda.count = 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert current_index() == 0


def test_an_invented_inventory_has_no_current_device(cuda, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert inventory.parse_inventory("2x24GiB").current_index == 0
    assert os.environ["LOCAL_RANK"] == "1"
