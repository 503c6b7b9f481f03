"""Jobs for the tests of sharding; each function runs in all ranks at once."""

import itertools
import logging
import os
import resource
import signal
import threading
from pathlib import Path

import diffusers
import pipelines
import pytest
import torch
import torch.distributed as dist
import transformers
from comparing import as_bytes, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shmload
from shmload._settings import settings
from shmload.integrations import fsdp, zero

# Ranks are forked after this line, and a fork does not copy threads.
torch.set_num_threads(1)
diffusers.utils.logging.disable_progress_bar()
diffusers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Memory that a rank may take besides its part: interpreter, buffers, the largest padding.
_SLACK_NBYTES = 10 << 20


# Equality -----------------------------------------------------------------------------------------


def equal(rank, source, component, dtype, is_hybrid=False):
    """Load one model sharded; compare it, and its outputs, with the unsharded model."""
    with rank.process_group():
        mesh = None
        if is_hybrid:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        got = fsdp.load_sharded(source, component, mesh, torch_dtype=dtype, keep=True)
        assert mapped() == []
        wanted_pipe = reference(source, _DTYPES[dtype])
        wanted = getattr(wanted_pipe, component)
        assert type(wanted) in type(got).__mro__
        assert_shards_equal(got, wanted)
        if component == "vae":
            register_fsdp_forward_method(got, "decode")
        part = sum(parameter.to_local().numel() for parameter in got.parameters())
        whole = sum(parameter.numel() for parameter in wanted.parameters())
        expected = pipelines.run(wanted_pipe)
        setattr(wanted_pipe, component, got)
        image = pipelines.run(wanted_pipe)
    assert image.tobytes() == expected.tobytes()
    return part / whole


def train(rank, source, component):
    """Take one training step with a sharded and with the unsharded model."""
    with rank.process_group():
        got = fsdp.load_sharded(source, component, torch_dtype="float32", keep=True)
        wanted = getattr(reference(source, torch.float32), component)
        names = shared(dict(wanted.named_parameters(remove_duplicate=False)))
        assert any(len(tied) > 1 for tied in names)
        before = {name: tensor.clone() for name, tensor in wanted.state_dict().items()}
        for model in (got, wanted):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            model(torch.arange(12).view(2, 6)).last_hidden_state.square().mean().backward()
            optimizer.step()
        assert not any(torch.equal(before[name], t) for name, t in wanted.state_dict().items())
        got.reshard()
        assert_shards_equal(got, wanted)


def gather(rank, source, component):
    """Partition a model as ZeRO-3 does, and gather it again."""
    with rank.process_group():
        module = getattr(
            shmload.load_pipeline(
                source, components=[component], torch_dtype="bfloat16", keep=True
            ),
            component,
        )
        parts = zero.partition(module, rank.rank, rank.world_size)
        assert mapped() == []
        wanted = getattr(reference(source, torch.bfloat16), component)
        parameters = dict(wanted.named_parameters(remove_duplicate=False))
        assert list(parts) == list(parameters)
        for name, part in parts.items():
            gathered = part.tensor.new_empty(part.tensor.numel() * rank.world_size)
            dist.all_gather_into_tensor(gathered, part.tensor)
            got = part.assemble(gathered)
            assert got.dtype == parameters[name].dtype
            assert torch.equal(got, parameters[name]), name
            assert part.requires_grad == parameters[name].requires_grad
        assert shared(parts) == shared(parameters)


def assert_shards_equal(got, wanted):
    found, expected = (dict(m.named_parameters(remove_duplicate=False)) for m in (got, wanted))
    assert list(found) == list(expected)
    for name, parameter in expected.items():
        shard = found[name]
        assert isinstance(shard, DTensor), name
        assert shard.dtype == parameter.dtype, name
        assert shard.requires_grad == parameter.requires_grad, name
        assert as_bytes(shard.full_tensor()) == as_bytes(parameter), name
    assert shared(found) == shared(expected)
    buffers = dict(wanted.named_buffers(remove_duplicate=False))
    assert list(buffers) == [name for name, _ in got.named_buffers(remove_duplicate=False)]
    for name, buffer in got.named_buffers(remove_duplicate=False):
        assert as_bytes(buffer) == as_bytes(buffers[name]), name
    assert list(got.state_dict()) == list(wanted.state_dict())


def shared(named):
    """Return the sets of names that refer to one object."""
    return {
        frozenset(name for name, other in named.items() if other is value)
        for value in named.values()
    }


# Placements ---------------------------------------------------------------------------------------


def place(rank):
    """Fill tensors of many shapes and placements; compare with the shards that torch makes."""
    placements = [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(1)),
        (Replicate(), Replicate()),
    ]
    with rank.process_group():
        mesh = init_device_mesh("cpu", (2, 2))
        for shape, wanted in itertools.product([(8, 4), (7, 5), (1, 3), (2, 1, 3)], placements):
            module = nn.Module()
            module.weight = nn.Parameter(torch.randn(shape, generator=torch.manual_seed(1)))
            expected = distribute_tensor(module.weight.detach(), mesh, wanted)
            weights = fsdp.take_weights(module)
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, wanted))
            assert module.weight.is_meta
            fsdp.fill(module, weights)
            assert module.weight.placements == wanted
            assert torch.equal(module.weight.to_local(), expected.to_local()), (shape, wanted)


def parallelize(rank):
    """Apply FSDP to a model that tensor parallelism has sharded, along either dimension."""
    with rank.process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model, wanted = _two_layers(), _two_layers()
        weights = fsdp.take_weights(model)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        fsdp.fill(model, weights)
        for name, parameter in wanted.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name
        inputs = torch.randn(3, 6, generator=torch.manual_seed(2))
        torch.testing.assert_close(model(inputs), wanted(inputs))


def shard_columns(rank):
    """Shard along the second dimension."""
    with rank.process_group():
        model, wanted = _two_layers()[1], _two_layers()[1]
        fsdp.shard(model, shard_placement_fn=lambda parameter: Shard(1))
        assert model.weight.to_local().shape == (6, 12 // rank.world_size)
        assert torch.equal(model.weight.full_tensor(), wanted.weight)


def _two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6, bias=False))


# Memory -------------------------------------------------------------------------------------------


def take_little(rank, source, component, how):
    """Shard a large model with a memory limit that only fits the rank's part."""
    with rank.process_group():
        before = _status("RssAnon")
        module = getattr(
            shmload.load_pipeline(
                source, components=[component], torch_dtype="bfloat16", keep=True
            ),
            component,
        )
        whole = sum(parameter.nbytes for parameter in module.parameters())
        assert _status("RssAnon") - before < _SLACK_NBYTES
        assert len(mapped()) > 0
        allowed = whole // rank.world_size + _SLACK_NBYTES
        # VmData: writable private memory, including everything allocated so far.
        limit = _status("VmData") + allowed
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(whole, dtype=torch.uint8)
        if how == "fsdp":
            fsdp.shard(module)
        else:
            parts = zero.partition(module, rank.rank, rank.world_size)
            assert len(parts) > 0
        taken = _status("RssAnon") - before
        assert mapped() == []
        assert whole // rank.world_size < taken < allowed
        return [whole, taken]


def mapped():
    """Return this process's mappings of segments and weight files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "shmload-" in line or ".safetensors" in line]


def _status(key):
    """Return a size from /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


# Deaths -------------------------------------------------------------------------------------------


def lose_one(rank, source, component, how):
    """Kill or stop the rank that decodes, while the others wait for it.

    Killed: another rank takes over. Stopped: the others fail within the deadline.
    """
    os.environ["SHMLOAD_WAIT_TIMEOUT_S"] = "0.5" if how == "stop" else "30"
    settings.cache_clear()
    store, ranks = rank.store("steps"), range(rank.world_size)
    store.set(f"pid {rank.rank}", str(os.getpid()))
    with rank.process_group():
        if rank.rank == 0:

            def end(done, total):
                store.set("decoding", "")
                store.wait([f"waiting {other}" for other in ranks if other])
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                threading.Event().wait()  # until the signal reaches this thread

            fsdp.load_sharded(source, component, torch_dtype="bfloat16", progress=end)
        store.wait(["decoding"])
        _say_when_waiting(lambda: store.set(f"waiting {rank.rank}", ""))
        if how == "stop":
            with pytest.raises(shmload.SegmentTimeout):
                fsdp.load_sharded(source, component, torch_dtype="bfloat16")
            store.set(f"failed {rank.rank}", "")
            store.wait([f"failed {other}" for other in ranks if other])
            if rank.rank == 1:
                os.kill(int(store.get("pid 0")), signal.SIGKILL)
            return "failed"
        got = fsdp.load_sharded(source, component, torch_dtype="bfloat16")
        wanted = getattr(reference(source, torch.bfloat16), component).state_dict()
        for name, parameter in got.named_parameters():
            own = list(wanted[name].chunk(rank.world_size))[rank.rank :]
            local = parameter.to_local()
            assert torch.equal(local, own[0]) if own else not local.numel(), name
        # Collectives of the remaining ranks fail with torch's error instead of hanging.
        with pytest.raises(RuntimeError, match="gloo"):
            got.unshard()
        return "filled"


def _say_when_waiting(say):
    class Listen(logging.Handler):
        def emit(self, record):
            if "1 awaited" in record.getMessage():
                say()

    logging.getLogger("shmload").addHandler(Listen())
    logging.getLogger("shmload").setLevel(logging.INFO)
