"""What a load has built is built anew when anything that it depends on has changed."""

import functools
import os
import sys
import threading
import time

import diffusers
import pytest
import torch
from comparing import assert_equal, reference
from pipelines import build
from remembering import BF16, change_scheduler, change_weights_at_the_same_time, kept, load

import shmload
from shmload._building import code

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts", "remembers")]


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
