"""Pipelines on accelerators that are none: the same bits, nothing left on the host."""

import functools
import gc

import pytest
import torch
from comparing import assert_equal, reference
from devices import LateDevice
from diffusers import FluxPipeline
from pipelines import FAMILIES
from torch import nn

import shmload
from shmload import _destination, _inventory
from shmload._inventory import parse_inventory
from shmload._load import Load
from shmload._ring import RingShape
from shmload._rules import Rule
from shmload.integrations import placing, rules
from shmload.integrations.build import Build


@pytest.fixture
def accelerators(monkeypatch):
    """Two GPUs of 1 GiB, by name; each copies as late as it may."""
    devices = {name: LateDevice() for name in ("cuda:0", "cuda:1")}
    monkeypatch.setattr(placing, "runtime_of", lambda device: devices[str(device)])
    monkeypatch.setattr(_inventory, "machine_inventory", lambda: parse_inventory("2x1GiB,cpu=8GiB"))
    yield devices
    for device in devices.values():
        assert device.pending == 0
        assert not device.registered


@pytest.fixture
def streams(monkeypatch):
    """Return what was hollow in each load that was placed."""
    seen = []
    drain = placing.Stream.drain

    def note_and_drain(stream):
        seen.append(len(stream._bases))
        drain(stream)

    monkeypatch.setattr(placing.Stream, "drain", note_and_drain)
    return seen


def load(source, torch_dtype=torch.bfloat16, device_map="cuda", **kwargs):
    return shmload.load_pipeline(
        source, torch_dtype=torch_dtype, device_map=device_map, pin="ring", **kwargs
    )


def models_of(pipe):
    return {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}


def assert_as_on_the_host(got, wanted):
    """Compare all but the notes of where modules are."""
    for model in models_of(got).values():
        del model.hf_device_map
    got.hf_device_map = None
    assert_equal(got, wanted)


def is_on_accelerator(tensor):
    return tensor.data_ptr() % 256 == 0 and not tensor.is_shared()


# A device for all ---------------------------------------------------------------------------------


@pytest.mark.parametrize("torch_dtype", [torch.bfloat16, None], ids=["bf16", "none"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_streamed_pipeline_equals_the_library(
    saved, accelerators, streams, shm_names, family, torch_dtype
):
    source = saved(family)
    got = load(source, torch_dtype, max_host_memory="64KiB")
    assert streams
    assert min(streams) > 0
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
    assert streams == []  # the ring would be larger than the weights
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


def test_sharded_pipeline_with_a_variant(saved, accelerators, streams):
    source = saved("flux", "float16", variant="fp16", sharded=True)
    got = load(source, variant="fp16", max_host_memory="64KiB")
    assert min(streams) > 4
    assert_as_on_the_host(got, reference(source, torch.bfloat16, variant="fp16"))


def test_nothing_of_the_host_is_held_afterwards(saved, accelerators, streams):
    got = load(saved("flux"), max_host_memory="64KiB")
    gc.collect()
    with open("/proc/self/maps") as lines:
        assert not [line for line in lines if "shmload" in line]
    assert all(is_on_accelerator(p) for m in models_of(got).values() for p in m.parameters())


def test_resident_segments_are_used(saved, accelerators, streams, evicts):
    source = saved("flux")
    shmload.warm(source, torch_dtype=torch.bfloat16)
    read = []
    got = load(source, max_host_memory="64KiB", progress=lambda done, total: read.append(done))
    assert streams == []
    assert max(read, default=0) == 0
    assert_as_on_the_host(got, reference(source, torch.bfloat16))
    assert not any(info.is_leased for info in shmload.segments())


def test_pipeline_on_one_device_can_be_moved(saved, accelerators):
    got = load(saved("flux"))
    assert got.to(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("limit", ["8KiB", "1MiB", 65536, 1e6])
def test_ring_may_be_tiny_or_larger_than_all(saved, accelerators, limit):
    source = saved("wan")
    got = load(source, max_host_memory=limit)
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


# What is found out only when it is built ----------------------------------------------------------


@pytest.fixture
def large_rings(monkeypatch):
    """Let a ring of 64 KiB be as large as one without a limit."""
    monkeypatch.setattr(_destination, "ring_shape", lambda *_: RingShape(2, 32 << 10))


def test_pipeline_that_wants_its_bytes_on_the_host_gets_them(
    saved, accelerators, streams, monkeypatch, large_rings
):
    build_early = Build._build_early
    monkeypatch.setattr(
        Build, "_build_early", lambda self, parts: None if parts else build_early(self, parts)
    )
    source = saved("flux")
    assert_as_on_the_host(load(source), reference(source, torch.bfloat16))
    assert streams == []
    with pytest.raises(shmload.MemoryLimitExceeded, match="max_host_memory"):
        load(source, max_host_memory="64KiB")


def test_weight_that_is_changed_while_the_pipeline_is_built(
    saved, accelerators, streams, monkeypatch, large_rings
):
    def change(init):
        @functools.wraps(init)  # diffusers reads its signature
        def init_and_change(pipe, **components):
            init(pipe, **components)
            with torch.no_grad():
                pipe.vae.decoder.conv_in.bias.zero_()

        return init_and_change

    source = saved("flux")
    monkeypatch.setattr(FluxPipeline, "__init__", change(FluxPipeline.__init__))
    got = load(source)
    assert not got.vae.decoder.conv_in.bias.any()
    assert streams == []
    assert_as_on_the_host_but_for_notes(got, reference(source, torch.bfloat16))


@pytest.mark.parametrize("kind", ["class of its own", "transposed"])
def test_streamed_weight_that_is_no_run_of_bytes(
    saved, accelerators, streams, monkeypatch, large_rings, kind
):
    class Quantised(nn.Parameter):
        pass

    from_path = Build._from_path

    def wrap(self, root, models):
        pipe = from_path(self, root, models)
        layer = pipe.transformer.x_embedder
        if kind == "transposed":
            layer.register_buffer("other", layer.weight.detach().t())
        else:
            layer.weight = Quantised(layer.weight.detach())
        return pipe

    monkeypatch.setattr(Build, "_from_path", wrap)
    got = load(saved("flux")).transformer.x_embedder
    assert streams == []
    assert got.weight.any()
    assert kind == "class of its own" or torch.equal(got.other, got.weight.t())


def test_wrong_rule_is_found_out(
    saved, accelerators, configure, monkeypatch, tmp_path, large_rings
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


# Several devices ----------------------------------------------------------------------------------


def test_components_go_where_the_map_says(saved, accelerators):
    source = saved("flux")
    got = load(source, device_map={"transformer": 1, "text_encoder*": "cuda:0", "vae": "cpu"})
    assert got.hf_device_map == {
        "transformer": "cuda:1",
        "text_encoder": "cuda:0",
        "text_encoder_2": "cuda:0",
        "vae": "cpu",
    }
    assert got.transformer._hf_hook.execution_device == torch.device("cuda:1")
    sizes = {
        name: sum(p.nbytes for p in model.parameters()) for name, model in models_of(got).items()
    }
    assert all(sizes.values())
    with pytest.raises(ValueError, match="device mapping strategy"):
        got.to("cpu")
    got.reset_device_map()
    assert not hasattr(got.transformer, "_hf_hook")
    assert got.hf_device_map is None
    assert_as_on_the_host_but_for_notes(got, reference(source, torch.bfloat16))


def assert_as_on_the_host_but_for_notes(got, wanted):
    for name, model in models_of(wanted).items():
        found = models_of(got)[name].state_dict()
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("strategy", ["balanced", "balanced_low_0", "sequential", "auto"])
def test_strategies_place_every_component(saved, accelerators, strategy):
    got = load(saved("flux"), device_map=strategy)
    assert set(got.hf_device_map.values()) <= {"cuda:0", "cuda:1"}
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


@pytest.mark.parametrize("strategy", ["balanced", "auto"])
def test_strategy_that_needs_no_host_streams(saved, accelerators, streams, strategy):
    got = load(saved("flux"), device_map=strategy, max_host_memory="64KiB")
    assert min(streams) > 0
    assert set(got.hf_device_map.values()) <= {"cuda:0", "cuda:1"}
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


def test_model_that_is_divided(saved, accelerators):
    got = load(
        saved("flux"),
        device_map={
            "": "cuda:0",
            "transformer.transformer_blocks": "cuda:1",
        },
    )
    assert got.transformer.hf_device_map["transformer_blocks"] == "cuda:1"
    assert got.hf_device_map["transformer.transformer_blocks"] == "cuda:1"
    assert accelerators["cuda:1"].calls.count("empty") > 0
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


def test_cpu_for_everything_copies_nothing(saved, accelerators):
    source = saved("flux")
    got = load(source, device_map="cpu")
    assert got.hf_device_map == {"": "cpu"}
    assert accelerators["cuda:0"].calls == []
    assert_as_on_the_host(got, reference(source, torch.bfloat16))


def test_meta_takes_no_memory(saved, accelerators):
    got = load(saved("flux"), device_map={"": "cuda:0", "transformer": "meta"})
    assert all(parameter.is_meta for parameter in got.transformer.parameters())
    assert not any(parameter.is_meta for parameter in got.vae.parameters())


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_unknown_component_is_named_before_anything_is_decoded(saved, accelerators, keep):
    read = []
    with pytest.raises(shmload.UnknownComponent, match="text_encoder_2"):
        load(
            saved("flux"),
            device_map={"": 0, "text_encoder_3": "cuda:1"},
            keep=keep,
            progress=lambda *counts: read.append(counts),
        )
    assert read == []


def test_what_does_not_fit_is_said_with_the_numbers(saved, accelerators, shm_names):
    with pytest.raises(shmload.DoesNotFit, match="KiB"):
        load(saved("flux"), device_map="balanced", max_memory={0: "100KiB", 1: "100KiB"})
    assert shm_names() == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"device_map": {"": 0, "vae": "cpu"}},
        {"device_map": "balanced", "max_memory": {"cpu": "1GiB"}},
        {"device_map": None},
        {"keep": True},
        {"verify": True},
        {"use_safetensors": False},
    ],
    ids=str,
)
def test_limit_for_the_host_needs_a_way_off_it(saved, accelerators, arguments):
    with pytest.raises(shmload.ArgumentError, match="max_host_memory"):
        load(saved("flux"), max_host_memory="1MiB", **arguments)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_host_memory", "much"),
        ("max_host_memory", 5),
        ("pin", "fast"),
        ("device_map", "atuo"),
        ("device_map", {"": "gpu"}),
        ("device_map", {"": "disk"}),
        ("max_memory", "20GiB"),
    ],
)
def test_odd_arguments_are_refused_before_anything_is_decoded(saved, argument, value):
    read = []
    arguments = {"torch_dtype": torch.bfloat16, "device_map": "cuda", argument: value}
    with pytest.raises(shmload.ArgumentError, match=argument.replace("pin", "fast")[:4]):
        shmload.load_pipeline(
            saved("flux"), **arguments, keep=True, progress=lambda *counts: read.append(counts)
        )
    assert read == []


def test_limits_alone_mean_nothing(saved):
    with pytest.raises(shmload.ArgumentError, match="device_map"):
        shmload.load_pipeline(saved("flux"), max_memory={0: "1GiB"})


def test_machine_without_a_gpu_says_what_it_has(saved, monkeypatch):
    monkeypatch.setattr(_inventory, "machine_inventory", lambda: parse_inventory("cpu=8GiB"))
    with pytest.raises(shmload.DeviceMapMalformed, match="the devices are cpu"):
        shmload.to_device(nn.Linear(2, 2), "cuda")


# Any module ---------------------------------------------------------------------------------------


def test_any_module_goes_to_a_device(accelerators):
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weight = module[0].weight
    assert shmload.to_device(module, "cuda:1", pin="ring") is module
    assert module[0].weight is weight
    assert accelerators["cuda:1"].calls.count("copy") > 0
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_inference_mode(accelerators, is_made_inside):
    with torch.inference_mode(is_made_inside):
        module = nn.Linear(8, 8)
    wanted = module.weight.clone()
    with torch.inference_mode():
        shmload.to_device(module, 0, pin="ring")
        assert torch.equal(module.weight, wanted)


def test_module_stays_as_it_was_where_torch_cannot_move_a_part(accelerators, monkeypatch):
    class Stubborn(nn.Parameter):
        def to(self, *args):
            raise RuntimeError("no")

    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[1].weight = Stubborn(torch.zeros(8, 8))
    before = module[0].weight.data_ptr()
    with pytest.raises(RuntimeError, match="no"):
        shmload.to_device(module, 0, pin="ring")
    assert module[0].weight.data_ptr() == before


def test_what_is_on_the_host_needs_no_room_there(monkeypatch):
    monkeypatch.setattr(_inventory, "machine_inventory", lambda: parse_inventory("cpu=1KiB"))
    module = nn.Linear(64, 64)
    assert shmload.to_device(module, "cpu") is module


def test_module_stays_as_it_was_where_a_device_is_full(accelerators):
    accelerators["cuda:0"]._fails_at = 0
    module = nn.Linear(8, 8)
    before = module.weight.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        shmload.to_device(module, 0, pin="ring")
    assert module.weight.data_ptr() == before


def test_load_of_hollow_segments_makes_nothing_resident(saved, accelerators, monkeypatch):
    made = []
    begin = Load._begin

    def note(self):
        begin(self)
        made.append(self)

    monkeypatch.setattr(Load, "_begin", note)
    load(saved("wan"), max_host_memory="64KiB")
    assert made
    assert not any(held.segments() for held in made)
