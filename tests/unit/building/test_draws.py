"""Draws that are repeated leave torch's generator as the first ones did, from any state."""

import msgspec
import pytest
import torch

from shmload._building.draws import Draw, Draws, repeat

CALLS = {
    "randn": lambda: torch.randn(3),  # few: one number stays for the next call
    "many": lambda: torch.randn(6, 100),
    "bfloat16": lambda: torch.randn(40, dtype=torch.bfloat16),
    "rand": lambda: torch.rand(5, dtype=torch.float64),
    "randint": lambda: torch.randint(3, (4,)),
    "randperm": lambda: torch.randperm(7),
    "uniform_": lambda: torch.nn.init.kaiming_uniform_(torch.empty(4, 5)),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(3, 5)),
    "a layer": lambda: torch.nn.Linear(3, 4),
    "scaled": lambda: torch.nn.Parameter(torch.randn(1, 6, 8) / 8**0.5),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_generator_goes_on_alike(call):
    with Draws() as draws:
        call()
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(draws.found), type=list[Draw])
    for seed in range(4):
        for others in range(seed):
            torch.manual_seed(seed)
            torch.randn(others)
            began = torch.get_rng_state()
            call()
            wanted = torch.get_rng_state()
            torch.set_rng_state(began)
            repeat(stored)
            assert torch.equal(torch.get_rng_state(), wanted)
            assert not torch.equal(began, wanted)


def test_default_dtype_of_the_build_counts(monkeypatch):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with Draws() as draws:
            torch.randn(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert draws.found[0].dtype == "bfloat16"


def test_other_generators_and_devices_are_left_alone():
    with Draws() as draws:
        torch.randn(3, device="meta")
    assert draws.found == []


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.randn(3, generator=torch.Generator()),
        lambda: torch.bernoulli(torch.ones(3) / 2),
        lambda: torch.empty(4, 4).t()[:, ::2].normal_(),
    ],
)
def test_what_depends_on_more_than_sizes_is_refused(call):
    with pytest.raises(ValueError, match="random numbers by"), Draws():
        call()
