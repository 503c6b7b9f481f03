"""Inventories are read from text, and each device gets one name in every notation."""

import pytest
import torch

from shmload._placement.inventory import canonical_device, choose_inventory, parse_inventory
from shmload.errors import ArgumentError

GIB = 1 << 30


def _sizes(inventory):
    return {device.name: device.nbytes for device in inventory.devices}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (0, "cuda:0"),
        ("1", "cuda:1"),
        ("CUDA:3", "cuda:3"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cpu", 0), "cpu"),
        ("offload", "offload"),
        ("xpu:2", "xpu:2"),
    ],
)
def test_device_has_one_name(given, name):
    assert canonical_device(given) == name


def test_index_and_kind_mean_the_accelerators_that_are_there():
    assert canonical_device(1, "fakegpu:2") == "fakegpu:1"
    assert canonical_device("fakegpu", "fakegpu:2") == "fakegpu:2"


@pytest.mark.parametrize("given", [None, True, -1, 1.5, "", "cuda:", "/dev/nvidia0", ()])
def test_what_is_no_device_is_refused_with_what_is(given):
    with pytest.raises(ArgumentError, match="cuda:0"):
        canonical_device(given)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("24GiB", {"cuda:0": 24 * GIB}),
        ("2 x 24 GiB, 80GiB", {"cuda:0": 24 * GIB, "cuda:1": 24 * GIB, "cuda:2": 80 * GIB}),
        ("cpu=64GiB,cuda:1=24GiB", {"cuda:1": 24 * GIB, "cpu": 64 * GIB}),
        ("0=16e9, cpu=1TB", {"cuda:0": 16 * 10**9, "cpu": 10**12}),
        ("xpu:0=8GiB", {"xpu:0": 8 * GIB}),
    ],
)
def test_inventory_is_read_with_accelerators_first(text, sizes):
    found = _sizes(parse_inventory(text))
    assert list(found.items()) == list(sizes.items())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a size"),
        ("2x", "not a size"),
        ("cuda:0=", "not a size"),
        ("0=1GiB,1GiB,cuda:0=2GiB", "twice"),
        ("offload=1GiB", "cpu's"),
        ("disk=1GiB", "do not wait on a disk"),
        ("-1=1GiB", "not a device"),
        ("0x24GiB", "inventory: '0x24GiB': there are 1 to 1024 devices; write 1x24GiB"),
        (f"{9**99}x1GiB", "there are 1 to 1024 devices; write 1x1GiB"),
        ("cuda:0=24GiB,cpu= 64", "inventory: '64' has no unit; write 64GiB"),
        ("gpu=24GiB", "did you mean 'cuda'"),
        ("cud:0=24GiB", "did you mean 'cuda'"),
    ],
)
def test_what_is_no_inventory_says_how_to_write_one(text, reason):
    with pytest.raises(ArgumentError, match=reason):
        parse_inventory(text)


def test_headroom_is_left_on_accelerators_only(configure):
    configure(headroom=0.25)
    found = parse_inventory("1x4GiB,cpu=4GiB")
    assert [device.room_nbytes for device in found.devices] == [3 * GIB, 4 * GIB]
    assert [device.nbytes for device in found.devices] == [4 * GIB, 4 * GIB]


@pytest.mark.parametrize(
    "max_memory",
    [{"gpu": GIB}, {"offload": GIB}, "20GiB"]
    + [{0: size} for size in (None, "0x3", -1, True, float("nan"), float("inf"))],
)
def test_what_is_wrong_with_a_limit_is_said_of_the_limit(max_memory):
    with pytest.raises(ArgumentError, match="max_memory"):
        choose_inventory("1GiB", max_memory)
