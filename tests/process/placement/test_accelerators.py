"""Pipelines on fake accelerators have the library's bits, and leave nothing on the host."""

import gc
import re

import generic_torch
import pytest
import torch
from accelerated import assert_as_on_the_host, assert_as_on_the_host_but_for_notes, load, models_of
from comparing import reference
from pipelines import FAMILIES
from torch import nn

import shmload
from shmload._building import placing, rules
from shmload._building.build import Build
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Checkpoint, Source
from shmload._devices.destination import Destination
from shmload._runtimes.runtime import Runtime
from shmload._segments import eviction

pytestmark = pytest.mark.libraries


def is_on_accelerator(tensor):
    return tensor.data_ptr() % 256 == 0 and not tensor.is_shared()


# A device for all ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_streamed_pipeline_equals_the_library(saved, accelerators, streams, shm_names, family):
    """As it is stored; `tests/gpu` has the same in bfloat16."""
    torch_dtype = None
    source = saved(family)
    got = load(source, torch_dtype, max_host_memory="64KiB")
    assert streams
    assert shm_names() == []
    assert got.hf_device_map == {"": "cuda:0"}
    assert all(model.hf_device_map == {"": "cuda:0"} for model in models_of(got).values())
    assert accelerators["cuda:0"].calls.count("copy") > 2
    assert accelerators["cuda:1"].calls == []
    assert_as_on_the_host(got, reference(source, torch_dtype))


@pytest.mark.parametrize("family", ["flux", "wan"])
@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_by_way_of_segments_equals_the_library(
    saved, accelerators, streams, evicts, family, keep
):
    source = saved(family)
    got = load(source, keep=keep)
    assert streams == []  # so little may be on the host at once
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


@pytest.mark.parametrize("limit", [None, "64KiB"])
def test_device_that_torch_feeds_by_generic_streams_gets_every_byte(
    saved, accelerators, streams, monkeypatch, limit
):
    calls = generic_torch.put_in(monkeypatch)
    runtime = Runtime(torch.device("cpu"))
    monkeypatch.setattr(placing, "runtime_of", lambda device: runtime)
    source = saved("flux")
    got = load(source, max_host_memory=limit)
    assert bool(streams) == (limit is not None)
    assert calls[-1] == "synchronize"  # no copy is under way
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


def test_nothing_of_the_host_is_held_afterwards(saved, accelerators, streams):
    got = load(saved("flux"), max_host_memory="64KiB")
    gc.collect()
    with open("/proc/self/maps") as lines:
        assert not [line for line in lines if re.search("(/dev/shm/|memfd:)shmload", line)]
    assert all(is_on_accelerator(p) for m in models_of(got).values() for p in m.parameters())


def test_pipeline_on_one_device_can_be_moved(saved, accelerators):
    got = load(saved("flux"))
    assert got.to(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("limit", ["32KiB", "1MiB", 65536, 1e8])
def test_limit_may_be_tiny_or_larger_than_all(saved, accelerators, limit):
    source = saved("wan")
    got = load(source, max_host_memory=limit)
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


@pytest.mark.parametrize("given", [{"components": ["vae"]}, {"text_encoder": None}], ids=str)
def test_strategy_within_a_limit_places_what_is_loaded(saved, accelerators, streams, given):
    source = saved("flux")
    got = load(source, device_map="balanced", max_host_memory="64KiB", **given)
    assert streams
    assert all(is_on_accelerator(p) for m in models_of(got).values() for p in m.parameters())


# What only the build finds out --------------------------------------------------------------------


def test_number_of_workers_bounds_what_the_host_holds(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    source = Source(
        given=path, root=path, checkpoints=(Checkpoint(folder=tmp_path, shards=(path,)),)
    )
    ahead = [Destination(device_map="cuda").bound(source, workers) for workers in (1, 4)]
    assert 4 * ahead[0].ahead_nbytes == ahead[1].ahead_nbytes


def test_pipeline_that_wants_its_bytes_on_the_host_gets_them(
    saved, accelerators, streams, monkeypatch, little_ahead
):
    build_early = Build._build_early
    monkeypatch.setattr(
        Build,
        "_build_early",
        lambda self: None if self._load.holdings.unfinished() else build_early(self),
    )
    source = saved("flux")
    assert_as_on_the_host(load(source), reference(source, torch.bfloat16))
    assert streams == []
    with pytest.raises(shmload.MemoryLimitExceeded, match="max_host_memory"):
        load(source, max_host_memory="64KiB")
    shmload.warm(saved("wan"))  # may go for it
    monkeypatch.setattr(eviction, "shm_free_nbytes", lambda: 0)  # is not where they would be
    assert_as_on_the_host(load(source), reference(source, torch.bfloat16))
    free = {True: eviction._MARGIN_NBYTES + (100 << 10), False: 1 << 40}
    monkeypatch.setattr(eviction, "machine_free_nbytes", lambda: free[bool(shmload.segments())])
    assert_as_on_the_host(load(source), reference(source, torch.bfloat16))
    assert shmload.segments() == []
    monkeypatch.setattr(eviction, "machine_free_nbytes", lambda: 0)
    with pytest.raises(shmload.MemoryLimitExceeded, match="the machine's memory leaves 0"):
        load(source)


@pytest.mark.usefixtures("accelerators", "little_ahead", "weight_changes")
def test_weight_that_is_changed_while_the_pipeline_is_built(saved, streams):
    source = saved("flux")
    got = load(source)
    assert not got.vae.decoder.conv_in.bias.any()
    assert streams == []
    assert_as_on_the_host_but_for_notes(got, reference(source, torch.bfloat16))


def test_streamed_weight_that_torch_must_move(
    saved, accelerators, streams, monkeypatch, little_ahead
):
    class Quantised(nn.Parameter):
        pass

    from_path = Build._from_path

    def wrap(self, root):
        pipe = from_path(self, root)
        layer = pipe.transformer.x_embedder
        layer.weight = Quantised(layer.weight.detach())
        return pipe

    monkeypatch.setattr(Build, "_from_path", wrap)
    got = load(saved("flux"))
    assert streams == []
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


def test_wrong_rule_is_found_out(
    saved, accelerators, configure, monkeypatch, tmp_path, little_ahead
):
    source = saved("wan")
    configure(cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "derive_rule", lambda *_: Rule(target="BF16"))
        shmload.plan(source, torch_dtype=torch.bfloat16)
    got = load(source)
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


def test_device_that_is_full_half_way(saved, accelerators, streams, shm_names):
    accelerators["cuda:0"]._fails_at = 20
    with pytest.raises(torch.OutOfMemoryError):
        load(saved("flux"), max_host_memory="64KiB")
    assert shm_names() == []
    accelerators["cuda:0"]._fails_at = None
    got = load(saved("flux"), max_host_memory="64KiB")
    assert_as_on_the_host(got, reference(saved("flux"), torch.bfloat16))
