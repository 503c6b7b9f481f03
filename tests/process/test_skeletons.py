"""Models that are built from a skeleton are those that the libraries built, or there is none."""

import functools
import gc
import json
import os
import pickle
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
import xxhash
from comparing import assert_loads_equal, reference
from mappings import copied_nbytes
from pipelines import FAMILIES, run
from safetensors.torch import load_file, save_file

import shmload
from shmload.integrations import build
from shmload.integrations.build import Build
from shmload.integrations.pickling import PickledModels, Unfit, unpickle_models
from shmload.integrations.skeletons import _write

pytestmark = pytest.mark.skipif(
    transformers.__version__ < "5", reason="diffusers 0.35 has transformers 4 warn at every load"
)


@pytest.fixture(autouse=True)
def skeletons(configure, tmp_path, monkeypatch):
    """Remember models, in a directory of this test's own; returns what is there."""
    configure(skeletons=1, cache_dir=tmp_path / "cache")
    monkeypatch.setattr(build, "_has_ever_warned", False)
    return lambda: sorted((tmp_path / "cache" / "skeletons").glob("*"))


@pytest.fixture
def built(monkeypatch):
    """Count how often the libraries build the models."""
    calls = []
    build_models = Build._build_models

    def count(*args, **kwargs):
        calls.append(args)
        return build_models(*args, **kwargs)

    monkeypatch.setattr(Build, "_build_models", count)
    return calls


def draws(source):
    """Tell whether the library draws random numbers when it loads a pipeline."""
    before = torch.get_rng_state()
    reference(source)
    return not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "none", "dict"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_load_is_equal_too(saved, built, skeletons, shm_names, family, dtype):
    source = saved(family)
    fits = not draws(source)
    assert_loads_equal(source, dtype)
    assert (len(built), len(skeletons())) == (1, fits)
    assert_loads_equal(source, dtype)
    assert (len(built), len(skeletons())) == (1 if fits else 2, fits)
    assert not shm_names()


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_second_load_of_shards_and_variants_is_equal_too(saved, built, stored):
    variant = "fp16" if stored == "float16" else None
    source = saved("flux", stored, variant, sharded=True)
    for _ in range(2):
        assert_loads_equal(source, "bf16", variant=variant)
    assert len(built) == 1


@pytest.mark.usefixtures("bytes_come_last")
def test_models_are_built_before_their_bytes_are_there(saved, built, monkeypatch):
    def note(self, models=None, **kwargs):
        pipe = from_view(self, models, **kwargs)
        unfinished.append(len(self._load.unfinished_components()))
        return pipe

    unfinished = []
    from_view = Build._from_view
    monkeypatch.setattr(Build, "_from_view", note)
    source = saved("stable-diffusion")
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert len(built) == 1
    assert unfinished == [4, 4]


@pytest.mark.usefixtures("bytes_come_last")
def test_pipeline_that_looks_at_weights_gets_them(large_pipeline, built, monkeypatch):
    def look(self, unet, scheduler):
        plain(self, unet=unet, scheduler=scheduler)
        self.note = sum(p.detach().double().sum().item() for p in unet.parameters())

    shmload.load_pipeline(large_pipeline, torch_dtype=torch.bfloat16)
    plain = diffusers.DDPMPipeline.__init__
    monkeypatch.setattr(diffusers.DDPMPipeline, "__init__", look)
    got = shmload.load_pipeline(large_pipeline, torch_dtype=torch.bfloat16)
    assert got.note == reference(large_pipeline, torch.bfloat16).note != 0


@pytest.mark.parametrize("family", FAMILIES)
def test_random_numbers_go_on_as_after_the_librarys_load(saved, family):
    source = saved(family)
    states = []
    for load in (reference, shmload.load_pipeline, shmload.load_pipeline):
        torch.manual_seed(5)
        load(source, torch_dtype=torch.bfloat16)
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


# The libraries note in tables of the process what they have built; here they have built nothing.
_RUN_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
import json
import torch
import diffusers
import pipelines
import shmload
from shmload.integrations.build import Build
diffusers.utils.logging.disable_progress_bar()
del Build._build_models
for family, source in json.loads(sys.argv[2]).items():
    pipe = shmload.load_pipeline(source, torch_dtype=torch.float32)
    print("IMAGE", pipelines.run(pipe).tobytes().hex(), flush=True)
"""


def test_models_compute_the_same_in_a_process_that_built_none(saved, child):
    sources = {family: str(saved(family)) for family in FAMILIES if not draws(saved(family))}
    for source in sources.values():
        shmload.load_pipeline(source, torch_dtype=torch.float32)
    other = child(_RUN_ALL, Path(__file__).parents[1], json.dumps(sources))
    for source in sources.values():
        wanted = run(reference(source, torch.float32))
        got = np.frombuffer(bytes.fromhex(other.expect("IMAGE")), wanted.dtype)
        assert got.tobytes() == wanted.tobytes()


def test_tensors_are_private_and_lie_in_the_segments(saved, built, evicts):
    source = saved("flux")
    for _ in range(2):
        pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert len(built) == 1
    assert copied_nbytes(pipe) == 0
    other = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    weight = next(pipe.transformer.parameters())
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(next(other.transformer.parameters()), before)


def test_segments_are_leased_as_long_as_the_models_live(saved, built, evicts):
    source = saved("stable-diffusion")
    for _ in range(2):
        pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    gc.collect()
    assert len(built) == 1
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict(source)
    assert len(shmload.segments()) == 4
    del pipe
    gc.collect()
    assert len(shmload.evict(source)) == 4


# What has no skeleton -----------------------------------------------------------------------------


def test_models_that_were_warned_of_are_warned_of_again(copied, built, skeletons):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"left.over": torch.ones(3)}, path, {"format": "pt"})
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (len(built), skeletons()) == (2, [])


def test_weights_that_are_in_no_file_are_drawn_anew(copied, built, skeletons):
    source = copied("stable-diffusion")
    path = source / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if name.endswith("fc1.weight"))]
    save_file(tensors, path, {"format": "pt"})
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (len(built), skeletons()) == (2, [])


def test_component_that_is_left_out_is_left_out(saved, built):
    source = saved("stable-diffusion")
    for _ in range(2):
        assert assert_loads_equal(source, "bf16", safety_checker=None).safety_checker is None
    assert len(built) == 1
    assert shmload.load_pipeline(source, torch_dtype=torch.bfloat16).safety_checker is not None
    assert len(built) == 2


def test_component_that_is_passed_in_is_used(saved, built):
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    vae = diffusers.AutoencoderKL.from_pretrained(source / "vae")
    assert shmload.load_pipeline(source, torch_dtype=torch.bfloat16, vae=vae).vae is vae
    assert len(built) == 2


@pytest.mark.parametrize(
    ("name", "is_wrapped"),
    [("from_pretrained", False), ("from_pretrained", True), ("__init__", True)],
)
def test_what_the_libraries_were_patched_to_do_is_done(
    saved, built, skeletons, monkeypatch, name, is_wrapped
):
    plain = vars(diffusers.AutoencoderKL).get(name) or diffusers.ModelMixin.from_pretrained.__func__

    def patched(first, *args, **kwargs):
        model = plain(first, *args, **kwargs) or first
        object.__setattr__(model, "mark", "patched")
        return None if name == "__init__" else model

    if is_wrapped:
        patched = functools.wraps(plain)(patched)
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    (made,) = skeletons()
    with monkeypatch.context() as patch:
        method = patched if name == "__init__" else classmethod(patched)
        patch.setattr(diffusers.AutoencoderKL, name, method)
        for number in range(2):
            pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
            assert (pipe.vae.mark, len(built)) == ("patched", number + 2)
    assert skeletons() == [made]
    assert not hasattr(shmload.load_pipeline(source, torch_dtype=torch.bfloat16).vae, "mark")
    assert len(built) == 3


def test_layer_that_was_replaced_is_not_mistaken(saved, built, monkeypatch):
    class Other(torch.nn.Linear):
        pass

    source = saved("flux")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    Other.__name__ = "Linear"
    monkeypatch.setattr(torch.nn, "Linear", Other)
    assert_loads_equal(source, "bf16")
    assert len(built) == 2


def test_silence_is_not_remembered(copied, skeletons):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(path) | {"left.over": torch.ones(3)}, path, {"format": "pt"})
    level = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    try:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    finally:
        diffusers.utils.logging.set_verbosity(level)
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert skeletons() == []


def test_inference_mode_makes_what_the_library_makes(saved, skeletons):
    source = saved("stable-diffusion")
    with torch.inference_mode():
        got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
        wanted = reference(source, torch.bfloat16)
    for name in ("unet", "text_encoder"):
        flags = [
            [p.is_inference() for p in getattr(pipe, name).parameters()] for pipe in (got, wanted)
        ]
        assert flags[0] == flags[1]
    assert skeletons() == []


# A load that fails --------------------------------------------------------------------------------


def break_scheduler(source):
    (source / "scheduler" / "scheduler_config.json").write_text("{")


def test_failed_load_leaves_nothing_although_its_error_is_kept(copied, shm_names):
    source = copied("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    break_scheduler(source)
    with pytest.raises(OSError, match="scheduler") as caught:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == []
    assert caught.value.__traceback__


def test_failed_load_does_not_keep_others_waiting(copied, child):
    source = copied("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)

    def wait_and_fail(done, total):
        if not waiting:
            other = child(
                "import sys, shmload\n"
                "print('BEGUN', flush=True)\n"
                "shmload.load_state_dict(sys.argv[1], 'bfloat16')\n"
                "print('LOADED', flush=True)",
                source / "vae",
            )
            other.expect("BEGUN")
            waiting.append(other)
        raise ValueError("given up")

    waiting = []
    with pytest.raises(ValueError, match="given up") as caught:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, progress=wait_and_fail)
    waiting[0].expect("LOADED")
    assert caught.value.__traceback__


def test_setting_turns_it_off(saved, built, skeletons, configure):
    configure(skeletons=0)
    for _ in range(2):
        shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)
    assert (len(built), skeletons()) == (2, [])


# What makes another one ---------------------------------------------------------------------------


def change_config(source, monkeypatch, tmp_path):
    path = source / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scaling_factor": 0.5}))


def change_shard(source, monkeypatch, tmp_path):
    path = source / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: t + 1 for name, t in load_file(path).items()}, path, {"format": "pt"})


def install_something(source, monkeypatch, tmp_path):
    (tmp_path / "site" / "flash_attn-3.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "site")


def set_variable(source, monkeypatch, tmp_path):
    monkeypatch.setenv("DIFFUSERS_GC_CHECKPOINTS", "1")


@pytest.mark.parametrize(
    "change",
    [change_config, change_shard, install_something, set_variable],
    ids=lambda f: f.__name__,
)
def test_change_is_not_overlooked(copied, built, monkeypatch, tmp_path, change):
    source = copied("stable-diffusion")
    assert_loads_equal(source, "bf16")
    change(source, monkeypatch, tmp_path)
    assert_loads_equal(source, "bf16")
    assert len(built) == 2


def test_source_that_moved_speaks_of_itself(copied, built):
    source = copied("stable-diffusion")
    assert_loads_equal(source, "bf16")
    assert_loads_equal(source.rename(source.with_name("moved")), "bf16")
    assert len(built) == 2


# What is not trusted ------------------------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, 5)


def open_to_all(path):
    path.chmod(0o666)


def open_folder_to_all(path):
    path.parent.chmod(0o777)


def give_away(path):
    os.chown(path, 65534, 65534)


def link(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "harm",
    [flip, truncate, open_to_all, open_folder_to_all, link]
    + ([give_away] if os.geteuid() == 0 else []),
    ids=lambda f: f.__name__,
)
def test_harmed_skeleton_is_not_used(saved, built, skeletons, harm):
    source = saved("stable-diffusion")
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    (path,) = skeletons()
    harm(path)
    assert_loads_equal(source, "bf16")
    assert len(built) == 2


class _Runs:
    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "call",
    [
        (os.mkdir, "made"),
        (eval, "__import__('os').mkdir('made')"),
        (shutil.copy, "/etc/hostname", "made"),
        (getattr, "text", "upper"),
    ],
    ids=["os", "builtin", "shutil", "attribute"],
)
def test_pickle_of_other_packages_is_unfit(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    pickled = PickledModels(stamps={}, tensors=[], models=pickle.dumps(_Runs(*call)))
    with pytest.raises(Unfit):
        unpickle_models(pickled, [])
    assert not Path("made").exists()


def test_directory_of_skeletons_stays_small(tmp_path):
    folder = tmp_path / "skeletons"
    for number in range(70):
        _write(folder / f"{number}", b"x")
        os.utime(folder / f"{number}", ns=(number, number))
    _write(folder / "last", xxhash.xxh3_128_digest(b""))
    left = {path.name for path in folder.iterdir()}
    assert len(left) == 64
    assert {"last", "69", "7"} <= left


_LOAD = """
import sys, torch, shmload
from shmload.integrations.build import Build
build_models = Build._build_models
def say(*args, **kwargs):
    print("BUILDS", flush=True)
    return build_models(*args, **kwargs)
Build._build_models = say
shmload.load_pipeline(sys.argv[1], torch_dtype=torch.bfloat16)
print("LOADED", flush=True)
"""


@pytest.mark.parametrize("name", ["builtins.eval", "os.mkdir"])
def test_name_inside_a_module_is_no_way_to_another(name):
    # PROTO 4, two SHORT_BINUNICODE, STACK_GLOBAL, STOP
    code = b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(Unfit):
        unpickle_models(PickledModels(stamps={}, tensors=[], models=code), [])


_COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
import json
import diffusers
import shmload
import torch
from comparing import assert_equal, reference
from shmload.integrations.build import Build
diffusers.utils.logging.disable_progress_bar()
del Build._build_models
for source in json.loads(sys.argv[2]):
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert_equal(got, reference(source, torch.bfloat16))
    print("EQUAL", source, flush=True)
"""


def test_second_process_with_other_hashes_gets_the_same(saved, copied, child, monkeypatch):
    sources = [saved(family) for family in FAMILIES]
    sampled = copied("qwen-image")
    (sampled / "text_encoder" / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "temperature": 0.3})
    )
    sources = [source for source in (*sources, sampled) if not draws(source)]
    for source in sources:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    monkeypatch.setenv("PYTHONHASHSEED", "77")
    other = child(_COMPARE, Path(__file__).parents[1], json.dumps([str(s) for s in sources]))
    for source in sources:
        assert other.expect("EQUAL") == str(source)


def test_process_that_loads_once_remembers_for_the_next(saved, child):
    # What the libraries say when they are imported is not said of the models.
    source = saved("stable-diffusion")
    first = child(_LOAD, source)
    first.expect("BUILDS")
    first.expect("LOADED")
    child(_LOAD, source).expect("LOADED")
