"""What one load has built is what the library builds, and all later loads get it."""

import functools
import gc
import json
import os
import re
import shutil
import sys
import threading
import time

import diffusers
import pytest
import torch
import transformers
from comparing import assert_equal, assert_modules_equal, reference
from mappings import copied_nbytes
from pipelines import FAMILIES, build
from remembering import BF16, change_scheduler, change_weights_at_the_same_time, kept, load
from safetensors.torch import load_file, save_file

import shmload
from shmload._building import code, keeping, parts, remembered
from shmload._building.build import Build
from shmload._loading.trace import current

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts", "remembers")]

# What is recalled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_later_loads_get_what_the_first_has_built(saved, built, family):
    source = saved(family)
    wanted = reference(source, BF16)
    for keep in (True, True, False):
        pipe = load(source, keep=keep)
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert len(built) == 1
    assert kept() == ["whole"]


@pytest.mark.parametrize("family", FAMILIES)
def test_where_not_all_can_be_kept_the_models_are(saved, family, monkeypatch):
    take_apart = keeping.take_apart

    def refuse(thing):
        if hasattr(thing, "scheduler"):
            raise parts.CannotKeep("scheduler: for no reason")
        return take_apart(thing)

    monkeypatch.setattr(keeping, "take_apart", refuse)
    source = saved(family)
    wanted = reference(source, BF16)
    for _ in range(2):
        pipe = load(source)
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert kept() == ["models: scheduler: for no reason"]


@pytest.mark.usefixtures("unfrozen")
def test_no_collection_falls_into_a_recall(saved):
    source = saved("stable-diffusion")
    load(source)
    ran = []

    def note(_phase, info):
        if current():  # in the call
            ran.append(info)

    gc.callbacks.append(note)
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        load(source)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert not ran


def test_listing_says_how_much_is_kept(saved, command):
    load(saved("stable-diffusion"))
    listed = command("ls", "--long")[1]
    assert re.search(r"keeps what was built: whole +/", listed)


def test_load_without_keep_keeps_nothing(saved, shm_names):
    pipe = load(saved("stable-diffusion"), keep=False)
    assert kept() == []
    del pipe
    assert shm_names() == []


def test_single_model_is_remembered(saved, built):
    source = saved("stable-diffusion") / "unet"
    wanted = diffusers.UNet2DConditionModel.from_pretrained(source)
    for _ in range(2):
        model = shmload.load_model(diffusers.UNet2DConditionModel, source, keep=True)
        assert_modules_equal(model, wanted, "unet")
    assert len(built) == 1


def test_what_a_program_does_to_one_changes_no_other(saved):
    source = saved("stable-diffusion")
    wanted = reference(source, BF16)
    first = load(source)
    for _ in range(2):
        pipe = load(source)
        assert_equal(pipe, wanted)
        for each in (first, pipe):
            each.tokenizer.add_tokens(["<new>"])
            each.scheduler.set_timesteps(3)
            each.unet.register_to_config(sample_size=999)
            each.unet.train()
            with torch.no_grad():
                each.unet.conv_in.weight.zero_()
    assert_equal(load(source), wanted)


def test_weight_that_was_written_to_while_it_was_built_is_copied(saved, monkeypatch):
    source = saved("stable-diffusion")
    make = remembered._keep

    def change(part, key, made, before):
        with torch.no_grad():
            made.unet.conv_in.bias.fill_(3)
        return make(part, key, made, before)

    monkeypatch.setattr(remembered, "_keep", change)
    load(source)
    assert load(source).unet.conv_in.bias.eq(3).all()
    bias = shmload.load_state_dict(source / "unet", "bfloat16")["conv_in.bias"]
    assert not bias.eq(3).any()


# What invalidates ---------------------------------------------------------------------------------


def change_behind_a_link(source, monkeypatch):
    folder = source / "scheduler"
    behind = folder.rename(source.parent / "behind")
    folder.symlink_to(behind)
    load(source)
    change_scheduler(source, monkeypatch)


def add_a_file(source, monkeypatch):
    (source / "tokenizer" / "added_tokens.json").write_text("{}")


def set_a_variable(source, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_SLOW_IMPORT", "0")


def install_a_package(source, monkeypatch):
    folder = source.parent / "packages" / "new-1.0.dist-info"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))


def install_a_package_again(source, monkeypatch):
    install_a_package(source, monkeypatch)
    load(source)
    os.utime(source.parent / "packages" / "new-1.0.dist-info", ns=(0, 0))


def hide_gpus(source, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def add_a_gpu(source, monkeypatch):
    monkeypatch.setattr("shmload._building.keys.may_have_accelerators", lambda: True)


def change_code(source, monkeypatch):
    stamp_of = code._stamp_of
    file = diffusers.AutoencoderKL.__init__.__wrapped__.__code__.co_filename
    monkeypatch.setattr(
        code, "_stamp_of", lambda path: (1, 1, 1) if path == file else stamp_of(path)
    )


def change_a_version(source, monkeypatch):
    monkeypatch.setattr("diffusers.__version__", "0.1")


CHANGES = [
    change_scheduler,
    change_behind_a_link,
    change_weights_at_the_same_time,
    add_a_file,
    set_a_variable,
    install_a_package,
    install_a_package_again,
    hide_gpus,
    add_a_gpu,
    change_code,
    change_a_version,
]


@pytest.mark.parametrize("change", CHANGES)
def test_change_has_it_built_anew(copied, built, change, monkeypatch):
    source = copied("stable-diffusion")
    load(source)
    change(source, monkeypatch)
    before = len(built)
    wanted = reference(source, BF16)
    for _ in range(2):
        assert_equal(load(source), wanted)
    assert len(built) == before + 1


def test_folders_beside_the_source_count_for_a_class_that_reads_them(tmp_path):
    net = diffusers.ControlNetModel.from_unet(build("stable-diffusion").unet)
    source = str(tmp_path / "net")
    for number, folder in enumerate((source, f"{source}_1", f"{source}_1", f"{source}_2")):
        with torch.no_grad():
            net.conv_in.bias.fill_(number)
        net.save_pretrained(folder)
        for _ in range(2):
            made = shmload.load_model("MultiControlNetModel", source, keep=True)
            assert made.nets[-1].conv_in.bias[0] == number


def test_change_of_a_dtype_or_mode_is_another(saved, built):
    source = saved("stable-diffusion")
    load(source)
    load(source, dtype="bfloat16")  # it means the same, and is spelled otherwise
    before = len(built)
    load(source, dtype=torch.float16)
    with torch.no_grad():
        load(source)
    torch.set_default_dtype(torch.float64)
    try:
        load(source)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(built) == before + 3


def test_default_dtype_counts_as_it_was_before_another_threads_build(saved, built, monkeypatch):
    source, other = saved("stable-diffusion"), saved("sdxl")
    unet, construct = diffusers.UNet2DConditionModel, diffusers.UNet2DConditionModel._set_time_proj
    load(source)

    def load_beside(*args, **kwargs):
        assert torch.get_default_dtype() is BF16
        thread = threading.Thread(target=load, args=(source,))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()  # it waits for no build
        return construct(*args, **kwargs)

    monkeypatch.setattr(unet, "_set_time_proj", load_beside)
    load(other)
    assert (len(built), kept()) == (2, ["whole"] * 2)


def test_program_that_chooses_other_dtypes_has_it_built_anew(
    saved, configure, tmp_path, monkeypatch
):
    configure(cache_dir=tmp_path)  # rules are not to outlive it
    source = saved("stable-diffusion")
    load(source)
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "_keep_in_fp32_modules", ["conv_in"])
    wanted = reference(source, BF16)
    assert wanted.unet.conv_in.weight.dtype is torch.float32
    for _ in range(2):
        assert_equal(load(source), wanted)


def replace_a_constructor(monkeypatch):
    plain = diffusers.DDIMScheduler.__init__

    @functools.wraps(plain)
    def construct(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        self.is_mine = True

    monkeypatch.setattr(diffusers.DDIMScheduler, "__init__", construct)


def replace_a_class(monkeypatch):
    class DDIMScheduler(diffusers.DDIMScheduler):
        is_mine = True

    monkeypatch.setattr(diffusers, "DDIMScheduler", DDIMScheduler)


def replace_a_class_where_it_is_made(monkeypatch):
    class DDIMScheduler(diffusers.DDIMScheduler):
        is_mine = True

    module = sys.modules[diffusers.DDIMScheduler.__module__]
    for home in (module, diffusers.schedulers):
        monkeypatch.setattr(home, "DDIMScheduler", DDIMScheduler)
    monkeypatch.delitem(vars(diffusers), "DDIMScheduler")  # not looked up there yet


@pytest.mark.parametrize(
    "replace", [replace_a_constructor, replace_a_class, replace_a_class_where_it_is_made]
)
def test_program_that_replaces_code_builds_for_itself(saved, built, replace, monkeypatch):
    source = saved("stable-diffusion")
    load(source)
    with monkeypatch.context() as replacing:
        replace(replacing)
        scheduler = load(source).scheduler
        assert type(scheduler) is diffusers.DDIMScheduler
        assert hasattr(scheduler, "is_mine")
    assert_equal(load(source), reference(source, BF16))
    assert len(built) == 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_error_that_the_program_handles_keeps_its_locals(saved, built, monkeypatch, is_kept):
    def fail():
        mine = "value"
        raise RuntimeError(mine)

    source = saved("stable-diffusion")
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "_load_connected_pipes", not is_kept)
    if is_kept:  # and not recalled below
        load(source)
        replace_a_constructor(monkeypatch)
    try:
        fail()
    except RuntimeError as error:
        load(source)
        frame = error.__traceback__.tb_next.tb_frame
    assert frame.f_locals == {"mine": "value"}
    assert len(built) == 1 + is_kept


FORKED = """
import os, sys, diffusers, shmload
from shmload._building import code
os.environ["SHMLOAD_REMEMBER"] = "1"
stamp_of = code._stamp_of
code._stamp_of = lambda path: stamp_of(path)[:2] + (int(sys.argv[2]),)
shmload.load_pipeline(sys.argv[1], keep=True, progress=False)
print("LOADED", flush=True)
"""


@pytest.mark.parametrize("is_before", [True, False])
def test_child_is_as_old_as_the_code_of_its_parent(saved, warm_python, child, is_before):
    changed_at = 0 if is_before else time.time_ns()
    child(FORKED, saved("stable-diffusion"), changed_at).expect("LOADED")
    assert kept() == (["whole"] if is_before else [])


# What is not remembered ---------------------------------------------------------------------------


class Mine(diffusers.StableDiffusionPipeline):
    """A class of a script."""


@pytest.mark.parametrize(
    "given",
    [
        {"unet": "passed"},
        {"device_map": "cpu"},
        {"verify": True},
        {"trust_remote_code": True},
        {"keep": "converted"},
    ],
    ids=str,
)
def test_call_that_may_mean_more_is_built_each_time(saved, built, given):
    source = saved("stable-diffusion")
    if "unet" in given:
        unet = diffusers.UNet2DConditionModel.from_pretrained(source / "unet", torch_dtype=BF16)
        given = {"unet": unet}
    for _ in range(2):
        load(source, **given)
    assert (len(built), kept()) == (2, [])


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.device("cpu")], ids=["inference", "device"]
)
def test_in_a_mode_it_is_built_each_time(saved, built, mode):
    with mode():
        for _ in range(2):
            load(saved("stable-diffusion"))
    assert (len(built), kept()) == (2, [])


@pytest.mark.parametrize("kind", [Mine, f"{Mine.__module__}.{Mine.__name__}"])
def test_class_outside_of_the_libraries_is_built_each_time(saved, built, kind):
    source = saved("stable-diffusion")
    for _ in range(2):
        assert type(load(source, pipeline_class=kind)).__name__ == "Mine"
    assert (len(built), kept()) == (2, [])


def test_adapter_is_built_each_time(saved, tmp_path):
    source = saved("stable-diffusion") / "unet"
    adapted = tmp_path / "unet"
    shutil.copytree(source, adapted)
    (adapted / "adapter_config.json").write_text("{}")
    for path, count in ((source, 1), (adapted, 1)):
        shmload.load_model("UNet2DConditionModel", path, keep=True)
        assert len(kept()) == count


_REFUSES_FP8 = pytest.mark.skipif(transformers.__version__ < "5", reason="needs a GPU for fp8")


@pytest.mark.parametrize("method", ["mxfp4", pytest.param("fp8", marks=_REFUSES_FP8)])
def test_weights_that_become_floats_without_a_gpu_are_built_each_time(copied, built, method):
    source = copied("stable-diffusion")
    file = source / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    for _ in range(2):
        load(source)
    assert (len(built), kept()) == (2, [])


def test_pipeline_that_takes_a_prior_from_elsewhere_is_built_each_time(saved, built, monkeypatch):
    source = saved("stable-diffusion")
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "_load_connected_pipes", True)
    for _ in range(2):
        load(source)
    assert len(built) == 2
    assert kept() == ["nothing: the library loads its prior from another repository"]


def test_source_that_changes_while_it_is_built_is_not_kept(copied, monkeypatch):
    source = copied("stable-diffusion")
    build = Build.run

    def change(self):
        change_scheduler(source, monkeypatch)
        return build(self)

    monkeypatch.setattr(Build, "run", change)
    load(source)
    assert kept() == []


def test_load_within_a_load_of_the_same_does_not_wait(saved, monkeypatch):
    source = saved("stable-diffusion")
    build, within = Build.run, []

    def load_too(self):
        if not within:
            within.append(None)
            within[:] = [load(source)]
        return build(self)

    monkeypatch.setattr(Build, "run", load_too)
    assert_equal(load(source), within.pop())
    assert kept() == ["whole"]


def test_weights_that_are_drawn_at_random_are_drawn_each_time(copied, built):
    source = copied("stable-diffusion")
    file = source / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("token_embedding.weight"))
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    made = [load(source).text_encoder.get_input_embeddings().weight for _ in range(2)]
    assert not torch.equal(*made)
    assert len(built) == 2
    assert kept() == ["nothing: the library draws some of its weights at random"]
