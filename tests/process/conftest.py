"""Fixtures of the process tests: checkpoints, orders of build and decode, devices."""

import functools
import json
import threading

import pytest
import single_files
import torch
from devices import LateDevice
from diffusers import FluxPipeline
from pipelines import build as build_pipeline
from pipelines import save_with_large_tensors
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection
from warming import TENSORS

from shmload._building import placing, remembered
from shmload._building.build import Build
from shmload._cli.main import main
from shmload._decoding.allowance import Bound
from shmload._devices import destination
from shmload._loading.load import Load
from shmload._placement import inventory
from shmload._placement.inventory import parse_inventory
from shmload.workers.fill import Filler

# Checkpoints --------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path, evicts):
    """A new checkpoint file for each test."""
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    save_file(TENSORS, path, {"format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path, evicts):
    """A component of three shards, with an index and a configuration that names no class."""
    path = tmp_path / "component"
    path.mkdir()
    weight_map = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: tensor}, path / shard, {"format": "pt"})
        weight_map[name] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def shards(tmp_path):
    """Four files, each of 1 MiB in bfloat16."""
    paths = []
    for number in range(4):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file({"weight": torch.full((1 << 19,), float(number))}, paths[-1])
    return paths


@pytest.fixture(scope="module")
def one_file(tmp_path_factory):
    """A function that saves a family's pipeline; returns its directory, and it as one file."""
    made = {}

    def write(family, suffix=".safetensors"):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = pipe, folder = _widened(build_pipeline(family)), folder
            pipe.save_pretrained(folder / "config")
        pipe, folder = made[family]
        path = folder / f"model{suffix}"
        if not path.exists():
            single_files.write(pipe, path)
        return str(folder / "config"), path

    return write


def _widened(pipe):
    """Give SDXL encoders of two widths, by which diffusers tells them apart."""
    second = getattr(pipe, "text_encoder_2", None)
    if second is not None:
        config = second.config
        config.hidden_size, config.projection_dim = 48, 48
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            pipe.register_modules(text_encoder_2=CLIPTextModelWithProjection(config).eval())
    return pipe


# Commands -----------------------------------------------------------------------------------------


@pytest.fixture
def command(capfd):
    """Run a command in this process: `code, printed, said = command("rm", source)`."""

    def run(*arguments):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)], prog_name="shmload")
        return ended.value.code or 0, *capfd.readouterr()

    return run


# Orders -------------------------------------------------------------------------------------------


@pytest.fixture
def bytes_come_last(monkeypatch):
    """Decode in this process, and only after the pipeline is built from empty segments."""
    is_wanted = threading.Event()
    begin, fill = Load._begin, Filler.fill

    def begin_anew(load):
        is_wanted.clear()
        begin(load)

    def fill_late(*args):
        assert is_wanted.wait(60)
        return fill(*args)

    def then(method):
        def call(load):
            is_wanted.set()
            method(load)

        return call

    monkeypatch.setattr(Load, "_begin", begin_anew)
    for method in (Load.wait, Load.close, Load.discard):
        monkeypatch.setattr(Load, method.__name__, then(method))
    monkeypatch.setattr(Filler, "fill", fill_late)


@pytest.fixture
def bytes_come_first(monkeypatch):
    """Decode all weights before the pipeline is built."""
    begin = Load._begin

    def begin_and_end(load):
        begin(load)
        if load._work:
            load._work.join()

    monkeypatch.setattr(Load, "_begin", begin_and_end)


@pytest.fixture(params=["bytes_come_first", "bytes_come_last"])
def either_order(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def weight_changes(monkeypatch):
    """Have the constructor of Flux's pipeline write zeros to a weight."""
    init = FluxPipeline.__init__

    @functools.wraps(init)  # diffusers reads its signature
    def init_and_change(pipe, **components):
        init(pipe, **components)
        with torch.no_grad():
            pipe.vae.decoder.conv_in.bias.zero_()

    monkeypatch.setattr(FluxPipeline, "__init__", init_and_change)


@pytest.fixture
def large_pipeline(tmp_path):
    """A pipeline whose tensors have several pages, so that the kernel's page counts show reads."""
    return save_with_large_tensors(tmp_path / "large", 64)


@pytest.fixture
def remembers(configure, monkeypatch):
    """Have loads with `keep` remember what they build, and return that in place of any copy."""
    configure(remember=1)
    monkeypatch.setattr(remembered, "_MUCH_NBYTES", 1)


@pytest.fixture
def built(monkeypatch):
    """Count how often the libraries build models."""
    calls = []
    build_models = Build.run

    def count(*args, **kwargs):
        calls.append(None)  # a build keeps what it was given
        return build_models(*args, **kwargs)

    monkeypatch.setattr(Build, "run", count)
    return calls


# Accelerators -------------------------------------------------------------------------------------


@pytest.fixture
def accelerators(monkeypatch):
    """Two GPUs of 1 GiB, by name; each copies as late as it may."""
    devices = {name: LateDevice() for name in ("cuda:0", "cuda:1")}
    monkeypatch.setattr(placing, "runtime_of", lambda device: devices[str(device)])
    monkeypatch.setattr(
        inventory, "machine_inventory", lambda *_: parse_inventory("2x1GiB,cpu=8GiB")
    )
    yield devices
    for device in devices.values():
        assert device.pending == 0
        assert not device.registered


@pytest.fixture
def streams(monkeypatch):
    """Record the parts whose pages loads free behind copies to a device, by their inodes."""
    seen = []
    give_back = Load.give_back

    def note_and_give_back(load, piece):
        if load.is_bounded:
            seen.append(piece.part.inode)
        give_back(load, piece)

    monkeypatch.setattr(Load, "give_back", note_and_give_back)
    return seen


@pytest.fixture
def little_ahead(monkeypatch):
    """Have loads hold at most 64 KiB at a time on the host; even small pipelines have more."""
    monkeypatch.setattr(
        destination, "bound_of", lambda _workers, limit: Bound(32 << 10, 64 << 10, limit)
    )
