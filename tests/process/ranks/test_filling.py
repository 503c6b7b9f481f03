"""`fill` gives a sharded module its rank's weights, one rank at a time, and refuses bad modules."""

import importlib
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shmload
from shmload import ArgumentError, LibraryTooOld
from shmload.integrations import fsdp, zero


@pytest.fixture
def joined():
    """Make this process one rank of a group without the others: `mesh = joined(1, 3)`."""

    def join(rank, world_size):
        leave()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return init_device_mesh("cpu", (world_size,))

    def leave():
        if dist.is_initialized():
            dist.destroy_process_group()

    yield join
    leave()


def make(rows=7):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, rows), nn.BatchNorm1d(rows))


def gathered(parts, name):
    return torch.cat([part.get_parameter(name).to_local() for part in parts])


@pytest.mark.parametrize("world_size", [1, 3, 5, 8])
def test_ranks_have_all_rows_together(joined, world_size):
    parts = [fsdp.shard(make(), joined(rank, world_size)) for rank in range(world_size)]
    for name, parameter in make().named_parameters():
        assert torch.equal(gathered(parts, name), parameter)


def test_parts_go_to_an_accelerator_in_bulk(joined, accelerators):
    parts = []
    for rank in range(3):
        module = make()
        weights = fsdp.take_weights(module)
        fully_shard(module, mesh=joined(rank, 3))
        fsdp.fill(module, weights, device="cuda:1")
        parts.append(module)
    assert accelerators["cuda:1"].calls.count("copy") >= 3
    for name, parameter in make().named_parameters():
        assert torch.equal(gathered(parts, name), parameter)


def test_partitions_go_to_an_accelerator_in_bulk(accelerators):
    parts = [zero.partition(make(), rank, 4, device="cuda:0") for rank in range(4)]
    assert accelerators["cuda:0"].calls.count("copy") >= 4
    for name, parameter in make().named_parameters():
        flat = torch.cat([part[name].tensor for part in parts])
        assert torch.equal(parts[0][name].assemble(flat), parameter)


def test_weights_that_wait_on_the_host_are_filled(joined):
    policy = CPUOffloadPolicy(pin_memory=False)
    module = fsdp.shard(make(), joined(0, 2), offload_policy=policy)
    assert torch.equal(module[0].weight.to_local(), make()[0].weight[:4])


def test_buffers_are_copies_and_stay_shared(joined):
    module = make()
    module.register_buffer("mean", module[1].running_mean)
    mean = module.mean
    fsdp.shard(module, joined(1, 2))
    assert module.mean is module[1].running_mean
    assert module.mean.data_ptr() != mean.data_ptr()
    assert torch.equal(module.mean, mean)


def test_what_requires_no_gradient_still_does_not(joined):
    module = make()
    module[0].requires_grad_(False)
    fsdp.shard(module, joined(1, 2))
    assert [p.requires_grad for p in module.parameters()] == [False, False, True, True]


def test_ignored_parameters_and_single_numbers_are_whole_on_each_rank(joined):
    module, wanted = make(), make()
    module.scale = nn.Parameter(torch.tensor(1.5))
    fsdp.shard(module, joined(1, 2), ignored_params={module[0].weight})
    assert type(module[0].weight) is nn.Parameter
    assert torch.equal(module[0].weight, wanted[0].weight)
    assert module.scale.item() == 1.5
    assert isinstance(module[0].bias, DTensor)


def test_dtype_that_is_changed_before_filling_stays_changed(joined, accelerators):
    for device in ("cpu", "cuda:0"):
        module = make()
        weights = fsdp.take_weights(module)
        module.bfloat16()
        fully_shard(module, mesh=joined(0, 2))
        fsdp.fill(module, weights, device=device)
        assert torch.equal(module[0].weight.to_local(), make()[0].weight[:4].bfloat16())


def test_parameters_that_were_added_are_left_alone(joined):
    module = make()
    weights = fsdp.take_weights(module)
    module.extra = nn.Parameter(torch.ones(3))
    fsdp.fill(module, weights)
    assert torch.equal(module.extra, torch.ones(3))


# Refused ------------------------------------------------------------------------------------------


def test_sharding_needs_a_process_group():
    with pytest.raises(ArgumentError, match="init_process_group"):
        fsdp.shard(make())


def test_sharded_module_is_not_sharded_again(joined):
    module = fsdp.shard(make(), joined(0, 2))
    with pytest.raises(ArgumentError, match=r"0\.weight is a DTensor"):
        fsdp.take_weights(module)
    with pytest.raises(ArgumentError, match=r"0\.weight is a DTensor"):
        zero.partition(module, 0, 2)


def test_module_without_memory_has_no_weights_to_take():
    module = make()
    fsdp.take_weights(module)
    with pytest.raises(ArgumentError, match=r"0\.weight is on meta"):
        fsdp.take_weights(module)


def test_ties_that_sharding_cut_are_refused(joined):
    module = nn.Sequential(make(5), nn.Linear(5, 5))
    module[1].weight = module[0][0].weight
    weights = fsdp.take_weights(module)
    assert weights.ties == (("0.0.weight", "1.weight"),)
    mesh = joined(0, 2)
    for part in (module[0], module):
        fully_shard(part, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"0\.0\.weight and 1\.weight were one parameter"):
        fsdp.fill(module, weights)


def test_parameters_without_weights_are_refused():
    module = make()
    weights = fsdp.take_weights(module)
    module.extra = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(ArgumentError, match="extra did not exist"):
        fsdp.fill(module, weights)
    with torch.device("meta"):
        other = make(8)
    with pytest.raises(ArgumentError, match=r"0\.weight has shape \(8, 5\); it had \(7, 5\)"):
        fsdp.fill(other, weights)


@pytest.mark.parametrize(
    ("placement", "rows", "reason"),
    [
        (Partial(), 7, "neither shards nor replicates"),
        (Shard(2), 7, "no dimension 2"),
        (Shard(0), 3, r"has \(4, 5\) of it, but torch gave it \(3, 5\)"),
    ],
)
def test_placements_that_are_not_understood_are_refused(joined, placement, rows, reason):
    mesh = joined(0, 2)
    module = nn.Linear(5, 7, bias=False)
    weights = fsdp.take_weights(module)
    local = torch.empty(rows, 5, device="meta")
    module.weight = nn.Parameter(
        DTensor.from_local(local, mesh, [placement], shape=torch.Size((7, 5)), stride=(5, 1))
    )
    with pytest.raises(ArgumentError, match=reason):
        fsdp.fill(module, weights)


def test_ranks_that_are_none_are_refused():
    for rank in (-1, 2):
        with pytest.raises(ArgumentError, match="not one of 2 ranks"):
            zero.partition(make(), rank, 2)


@pytest.mark.libraries
def test_model_is_loaded_alone_and_by_its_name(saved, tmp_path):
    source = saved("flux")
    with pytest.raises(shmload.UnknownComponent, match="did you mean 'transformer'"):
        fsdp.load_sharded(source, "transformr")
    with pytest.raises(shmload.SourceNotFound, match="not a pipeline"):
        fsdp.load_sharded(source / "transformer", "transformer")
    with pytest.raises(ArgumentError, match="device_map"):
        fsdp.load_sharded(source, "transformer", device_map="cuda")


def test_torch_without_fully_shard_is_refused_with_the_version_that_has_it(monkeypatch):
    monkeypatch.delattr("torch.distributed.fsdp.fully_shard")
    monkeypatch.delitem(sys.modules, "shmload.integrations.fsdp")
    with pytest.raises(LibraryTooOld, match=r"install torch 2\.6 or later") as caught:
        importlib.import_module("shmload.integrations.fsdp")
    assert caught.value.library == "torch"
