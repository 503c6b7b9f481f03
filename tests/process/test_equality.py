"""What `load_pipeline` returns is what `from_pretrained` of the pipeline's own class returns."""

import bisect
import contextlib
import gc
import json
import logging
import math
import os
import re
import shutil
import threading
import traceback
import types
import warnings
from collections import defaultdict
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
from pipelines import FAMILIES, run
from safetensors.torch import load_file, save_file

import shmload
from shmload._load import Load
from shmload._rules import Rule
from shmload.integrations import rules
from shmload.workers.fill import Filler

# How a pipeline is stored: dtype, variant, sharded.
STORED = {
    f"{dtype}{'-sharded' if sharded else ''}": (dtype, variant, sharded)
    for dtype, variant in (("float32", None), ("bfloat16", None), ("float16", "fp16"))
    for sharded in (False, True)
}
# The argument given to shmload, and the one that means the same to every diffusers.
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16-by-name": ("bfloat16", torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "none": (None, None),
    "dict": ({"transformer": torch.bfloat16, "unet": torch.bfloat16, "default": torch.float16},)
    * 2,
    "dict-without-default": ({"vae": torch.bfloat16, "text_encoder": torch.float16},) * 2,
}
# Everything with everything for two: Stable Diffusion has the most kinds of components, Wan keeps
# parts in float32 and has an encoder that does so in float16. Of the others, whose code paths are
# the same, each takes every dtype once, and the way it is stored moves on from one family to the
# next: five families and seven dtypes make 35 cases in which each pair of dtype and storage occurs.
WHOLE = ("stable-diffusion", "wan")
CASES = [(f, s, d) for f in FAMILIES if f in WHOLE for s in STORED for d in DTYPES] + [
    (family, list(STORED)[(number + 2 * shift) % len(STORED)], dtype)
    for number, family in enumerate(f for f in FAMILIES if f not in WHOLE)
    for shift, dtype in enumerate(DTYPES)
]
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))
_LIBRARIES = ("diffusers", "transformers", "huggingface_hub", "accelerate")


def reference(source, torch_dtype=None, **kwargs):
    """Load with the library alone, as the class that the pipeline names."""
    name = json.loads(Path(source, "model_index.json").read_text())["_class_name"]
    return from_pretrained(getattr(diffusers, name), source, torch_dtype, **kwargs)


def from_pretrained(pipeline_class, source, torch_dtype, **kwargs):
    # The newer name where the library warns of the older one.
    keyword = (
        "dtype" if "_resolve_dtype" in vars(diffusers.pipelines.pipeline_utils) else "torch_dtype"
    )
    given = {} if torch_dtype is None else {keyword: torch_dtype}
    return pipeline_class.from_pretrained(source, **given, **kwargs)


# Comparing ----------------------------------------------------------------------------------------


def assert_equal(got, wanted):
    assert type(got) is type(wanted)
    assert_alike(got.config, wanted.config, "pipe.config")
    assert_alike(got.name_or_path, wanted.name_or_path, "pipe.name_or_path")
    assert list(got.components) == list(wanted.components)
    for name, part in wanted.components.items():
        assert_component_equal(getattr(got, name), part, name)


def assert_component_equal(got, wanted, name):
    assert type(got) is type(wanted), name
    if isinstance(wanted, torch.nn.Module):
        assert_modules_equal(got, wanted, name)
    elif isinstance(wanted, transformers.PreTrainedTokenizerBase):
        assert got.get_vocab() == wanted.get_vocab(), name
        assert repr(got) == repr(wanted)
        assert_alike(got.name_or_path, wanted.name_or_path, name)
        assert_alike(got.init_kwargs, wanted.init_kwargs, name)
        assert_alike(vars(got), vars(wanted), name)
    elif wanted is not None:
        assert_alike(vars(got), vars(wanted), name)


def assert_modules_equal(got, wanted, name):
    assert [(n, type(m)) for n, m in got.named_modules()] == [
        (n, type(m)) for n, m in wanted.named_modules()
    ]
    assert not any(module.training for module in got.modules()), name
    assert got.dtype == wanted.dtype, name
    for (path, inner), (_, other) in zip(got.named_modules(), wanted.named_modules(), strict=True):
        # Configurations, names, constants: all but what is compared below, and the hooks.
        mine, theirs = (
            {key: value for key, value in vars(module).items() if key not in _MODULE_INTERNALS}
            for module in (inner, other)
        )
        assert_alike(mine, theirs, f"{name}.{path}")
    found, expected = tensors_of(got), tensors_of(wanted)
    assert list(found) == list(expected), name
    for key, tensor in expected.items():
        other = found[key]
        assert type(other) is type(tensor), (name, key)
        assert describe(other) == describe(tensor), (name, key)
        assert as_bytes(other) == as_bytes(tensor), (name, key)
    assert ties(found) == ties(expected), name
    assert list(got.state_dict()) == list(wanted.state_dict()), name


def tensors_of(module):
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def describe(tensor):
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.device


def as_bytes(tensor):
    # As bytes, because NaN equals nothing and -0.0 equals 0.0.
    if tensor.is_meta:
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def ties(tensors):
    """Return the sets of names that lie in the same memory."""
    names = defaultdict(set)
    for name, tensor in tensors.items():
        if tensor.numel():
            names[tensor.data_ptr()].add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def assert_alike(got, wanted, where, depth=0):
    """Compare plain data, arrays and what objects hold, with types and to the last bit."""
    if depth == 0 and isinstance(wanted, os.PathLike):
        got, wanted = os.fspath(got), os.fspath(wanted)
    assert type(got) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert describe(got) == describe(wanted), where
        assert as_bytes(got) == as_bytes(wanted), where
    elif isinstance(wanted, np.ndarray):
        assert (got.dtype, got.shape, got.tobytes()) == (
            wanted.dtype,
            wanted.shape,
            wanted.tobytes(),
        ), where
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted), where
        for key, value in wanted.items():
            assert_alike(got[key], value, f"{where}.{key}", depth + 1)
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_alike(got[number], value, f"{where}[{number}]", depth + 1)
    elif hasattr(wanted, "__dict__") and not isinstance(wanted, type) and depth < 6:
        assert_alike(vars(got), vars(wanted), where, depth + 1)
    elif type(wanted).__module__ in ("builtins", "pathlib", "numpy", "torch"):
        assert got == wanted, where


class Messages(logging.Handler):
    """Everything that is logged or warned of inside the block, by whatever library."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def texts(self):
        """What was warned of. Remarks may differ: rules are derived with the libraries' help."""
        return [
            (record.name, record.getMessage())
            for record in self.records
            if record.levelno >= logging.WARNING
        ] + [str(warning.message) for warning in self.warned]

    def __enter__(self):
        # "Once" means once per process, so the second of two equal loads would be silent.
        for name in ("info_once", "warning_once"):
            getattr(logging.Logger, name).cache_clear()
        self._stack = contextlib.ExitStack()
        self.warned = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for name in (None, *_LIBRARIES):
            logger = logging.getLogger(name)
            level = logger.level
            self._stack.callback(logger.setLevel, level)
            self._stack.callback(logger.removeHandler, self)
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc_info):
        self._stack.close()


# Mentions of a view -------------------------------------------------------------------------------

_SKIPPED = (type, types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)


def strings_reachable_from(root):
    """Walk what the garbage collector would, but not into classes, modules and frames."""
    seen, waiting, found = set(), [root], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _SKIPPED):
            continue
        seen.add(id(item))
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, bytes):
            found.add(item.decode(errors="replace"))
        elif isinstance(item, types.FunctionType):
            # Its globals are a module.
            cells = [
                cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()
            ]
            waiting += [item.__dict__, item.__defaults__, item.__kwdefaults__, *cells]
        else:
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                found.add(str(item.untyped_storage().filename))
            waiting += gc.get_referents(item)
    return found


def mentions_of_view(root):
    return sorted(text for text in strings_reachable_from(root) if "shmload-" in text)


def test_the_search_for_mentions_finds_what_is_hidden():
    secret = f"/dev/shm/{'shmload'}-view"
    module = torch.nn.Linear(1, 1)
    module.hidden = [{"a": (Path(secret),)}]
    module.register_forward_hook(lambda *_: secret)
    assert secret in mentions_of_view(module)
    module.hidden = None
    assert secret in mentions_of_view(module)
    assert not mentions_of_view(torch.nn.Linear(1, 1))


# Equality -----------------------------------------------------------------------------------------


@pytest.fixture
def bytes_come_last(monkeypatch):
    """Let this process decode, and only when the pipeline was built from what is there before."""
    is_wanted = threading.Event()
    begin, wait, close, fill = Load._begin, Load.wait, Load.close, Filler.fill

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
    monkeypatch.setattr(Load, "wait", then(wait))
    monkeypatch.setattr(Load, "close", then(close))
    monkeypatch.setattr(Filler, "fill", fill_late)


@pytest.fixture
def bytes_come_first(monkeypatch):
    """Let all be decoded before the pipeline is built."""
    begin = Load._begin

    def begin_and_end(load):
        begin(load)
        if load._thread:
            load._thread.join()

    monkeypatch.setattr(Load, "_begin", begin_and_end)


@pytest.fixture(params=["bytes_come_first", "bytes_come_last"])
def either_order(request):
    return request.getfixturevalue(request.param)


def assert_loads_equal(source, dtype, **kwargs):
    """Load twice, and compare what comes and what is said; returns shmload's pipeline."""
    given, meant = DTYPES[dtype]
    torch.manual_seed(0)  # for what is in no file
    with Messages() as said:
        got = shmload.load_pipeline(source, torch_dtype=given, **kwargs)
    torch.manual_seed(0)
    with Messages() as wanted_said:
        wanted = reference(source, meant, **kwargs)
    assert_equal(got, wanted)
    assert said.texts == wanted_said.texts
    assert not mentions_of_view([got, [vars(r) for r in said.records], said.texts])
    return got


@pytest.mark.parametrize(("family", "stored", "dtype"), CASES)
def test_pipeline_equals_the_librarys(
    saved, shm_names, worker_pids, configure, family, stored, dtype
):
    stored_dtype, variant, sharded = STORED[stored]
    source = saved(family, stored_dtype, variant, sharded=sharded)
    if sharded:
        configure(inline_nbytes=0, workers=2)  # worker processes; else this process decodes
    assert_loads_equal(source, dtype, variant=variant)
    assert (shm_names(), worker_pids()) == ([], [])


@pytest.mark.usefixtures("bytes_come_last")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline_built_before_any_byte_is_there_is_equal(saved, family, dtype):
    assert_loads_equal(saved(family), dtype)


@pytest.fixture
def large_pipeline(tmp_path):
    """A pipeline with tensors of several pages, of which the kernel can tell who has read them."""
    source = tmp_path / "large"
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(source)
    return source


def note_sum(model):
    model.note = sum(p.detach().double().sum().item() for p in model.parameters())


def copy_weight(model):
    model.register_buffer("copied", model.conv_in.weight.detach().clone())


@pytest.mark.usefixtures("either_order")
@pytest.mark.parametrize("look", [note_sum, copy_weight])
def test_weights_that_the_library_looks_at_while_it_loads_are_there(
    large_pipeline, monkeypatch, look
):
    def load_and_look(cls, *args, **kwargs):
        model = plain(*args, **kwargs)
        look(model)
        return model

    plain = diffusers.UNet2DModel.from_pretrained
    monkeypatch.setattr(diffusers.UNet2DModel, "from_pretrained", classmethod(load_and_look))
    assert_loads_equal(large_pipeline, "bf16")


@pytest.mark.usefixtures("bytes_come_last")
def test_what_others_log_meanwhile_is_heard(copied, monkeypatch):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["mid_block.resnets.0.norm1.weight"]  # so that it has to be built twice
    save_file(tensors, path, {"format": "pt"})
    plain = diffusers.AutoencoderKL.from_pretrained

    def load_beside_others(cls, *args, **kwargs):
        calls.append(args)
        other = threading.Thread(target=logging.getLogger("somebody.else").warning, args=("tick",))
        other.start()
        other.join()
        return plain(*args, **kwargs)

    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", classmethod(load_beside_others))
    calls = []
    with Messages() as said:
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert len(calls) == 2
    assert said.texts.count(("somebody.else", "tick")) == 2


def test_message_that_cannot_be_formatted_is_no_error_of_the_load(saved, monkeypatch):
    plain = diffusers.AutoencoderKL.from_pretrained

    def load_and_log(cls, *args, **kwargs):
        logging.getLogger("diffusers.models").debug("%d weights", "many")
        return plain(*args, **kwargs)

    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", classmethod(load_and_log))
    monkeypatch.setattr(logging.getLogger("diffusers"), "level", logging.DEBUG)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("diffusers.models").manager._clear_cache()
    shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_generate_the_same(saved, family):
    got = run(shmload.load_pipeline(saved(family), torch_dtype=torch.float32))
    wanted = run(reference(saved(family), torch.float32))
    assert np.isfinite(wanted).all()
    assert np.abs(got - wanted).max() <= 1e-5


def test_comparison_sees_ties_and_non_persistent_buffers(saved):
    # Else the tests above would say less than they seem to.
    encoder = reference(saved("wan")).text_encoder
    assert any("shared.weight" in group for group in ties(tensors_of(encoder)))
    transformer = reference(saved("stable-diffusion")).text_encoder
    assert set(tensors_of(transformer)) > set(transformer.state_dict())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "none"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_nan_infinity_and_negative_zero_keep_their_bits(copied, stored, dtype):
    source = copied("flux", stored)
    given, meant = DTYPES[dtype]
    for path in sorted(source.rglob("*.safetensors")):
        tensors = load_file(path)
        for number, tensor in enumerate(tensors.values()):
            odd = [math.nan, -math.nan, math.inf, -math.inf, -0.0, 1e-40, -1e-7, 3e38, 65519.0]
            flat = tensor.view(-1)
            place = number % 7 if flat.numel() > 16 else 0
            count = min(len(odd), flat.numel() - place)
            flat[place : place + count] = torch.tensor(odd[:count], dtype=torch.float64)
        save_file(tensors, path, {"format": "pt"})
    got = shmload.load_pipeline(source, torch_dtype=given)
    assert_equal(got, reference(source, meant))
    assert got.transformer.proj_out.weight.isnan().any()


@pytest.mark.usefixtures("either_order")
@pytest.mark.parametrize("dtype", ["bf16", "none"])
def test_missing_and_unexpected_keys_are_told_and_filled_alike(copied, dtype):
    source = copied("stable-diffusion")
    for path, missing in {
        "unet/diffusion_pytorch_model.safetensors": "mid_block.resnets.0.norm1.weight",
        "text_encoder/model.safetensors": ".mlp.fc1.weight",
    }.items():
        tensors = load_file(source / path)
        del tensors[next(name for name in tensors if name.endswith(missing))]
        tensors["unexpected.weight"] = torch.ones(3)
        save_file(tensors, source / path, {"format": "pt"})
    with Messages() as said:
        reference(source)
    assert str(said.texts).count("unexpected.weight") >= 2
    assert "mlp.fc1.weight" in str(said.texts)
    assert_loads_equal(source, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "none"])
@pytest.mark.parametrize("family", ["stable-diffusion", "sdxl"])
def test_clip_checkpoint_with_the_hubs_names_is_equal(copied, family, dtype):
    # Those on the hub were saved by transformers 4 and older: a prefix, and a buffer that is gone.
    source = copied(family)
    for path in source.glob("text_encoder*/model.safetensors"):
        tensors = {
            name
            if name.startswith(("text_model.", "text_projection."))
            else f"text_model.{name}": t
            for name, t in load_file(path).items()
        }
        tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        save_file(tensors, path, {"format": "pt"})
    assert_loads_equal(source, dtype)


@pytest.mark.parametrize("spelling", ["path", "slash", "relative", "dotted", "relative-path"])
def test_source_is_named_as_the_library_would(saved, monkeypatch, spelling):
    source = saved("wan")
    monkeypatch.chdir(source.parent)
    given = {
        "path": source,
        "slash": f"{source}/",
        "relative": source.name,
        "dotted": f"./{source.name}",
        "relative-path": Path(source.name),
    }[spelling]
    got = shmload.load_pipeline(given, torch_dtype=torch.bfloat16)
    wanted = reference(given, torch.bfloat16)
    assert_equal(got, wanted)
    assert not mentions_of_view(got)


@pytest.mark.parametrize(
    "name", ["v1.0 (final).fp16", "%s %d", "mod\N{LATIN SMALL LETTER E WITH GRAVE}le"]
)
def test_odd_name_of_the_directory_is_no_matter(saved, tmp_path, name):
    # Whole paths are split at dots, formatted and printed by the libraries.
    source = tmp_path / name
    shutil.copytree(saved("flux", "float16", "fp16", sharded=True), source)
    assert_loads_equal(source, "bf16", variant="fp16")


def test_hub_id_is_named_as_the_library_would(saved, hub_cache):
    hub_cache.add("tiny/wan", saved("wan"))
    got = shmload.load_pipeline("tiny/wan", torch_dtype=torch.bfloat16, cache_dir=hub_cache.root)
    wanted = from_pretrained(
        diffusers.WanPipeline, "tiny/wan", torch.bfloat16, cache_dir=hub_cache.root
    )
    assert_equal(got, wanted)
    assert not mentions_of_view(got)


# Arguments ----------------------------------------------------------------------------------------


def test_optional_component_passed_in_is_the_one_used(saved, evicts):
    source = saved("wan")
    mine = diffusers.WanTransformer3DModel.from_pretrained(source / "transformer")
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, transformer=mine, keep=True)
    assert got.transformer is mine
    assert_equal(got, reference(source, torch.bfloat16, transformer=mine))
    decoded = {Path(info.source).parent.name for info in shmload.segments()}
    assert decoded == {"text_encoder", "vae"}


def test_component_passed_as_none_is_left_out(saved, evicts):
    source = saved("stable-diffusion")
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, safety_checker=None, keep=True)
    assert got.safety_checker is None
    decoded = {Path(info.source).parent.name for info in shmload.segments()}
    assert decoded == {"text_encoder", "unet", "vae"}
    assert_loads_equal(source, "bf16", safety_checker=None)


def test_tokenizer_and_scheduler_passed_in_are_the_ones_used(saved):
    source = saved("flux")
    other = reference(source)
    got = shmload.load_pipeline(
        source, torch_dtype=torch.bfloat16, tokenizer=other.tokenizer, scheduler=other.scheduler
    )
    assert got.tokenizer is other.tokenizer
    assert got.scheduler is other.scheduler


@pytest.mark.usefixtures("either_order")
@pytest.mark.filterwarnings("ignore:unclosed file")  # diffusers, with disable_mmap
@pytest.mark.parametrize(
    "kwargs",
    [
        {"low_cpu_mem_usage": False},
        {"use_safetensors": True},
        {"local_files_only": True},
        {"dtype": torch.bfloat16},
        {"device_map": "balanced"},
        {"disable_mmap": True},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_other_arguments_reach_the_library(saved, kwargs):
    source = saved("sd3")
    dtype = None if "dtype" in kwargs else torch.bfloat16
    got = shmload.load_pipeline(source, torch_dtype=dtype, **kwargs)
    wanted = reference(
        source, torch.bfloat16, **{key: value for key, value in kwargs.items() if key != "dtype"}
    )
    assert_equal(got, wanted)


def test_float64_is_equal(saved):
    source = saved("flux")
    got = shmload.load_pipeline(source, torch_dtype=torch.float64)
    assert_equal(got, reference(source, torch.float64))


def test_float8_is_equal_where_the_library_can(saved):
    # transformers cannot build a model in it.
    dtype = {"transformer": torch.float8_e4m3fn, "default": torch.bfloat16}
    source = saved("flux")
    assert_equal(shmload.load_pipeline(source, torch_dtype=dtype), reference(source, dtype))


@pytest.mark.usefixtures("either_order")
def test_component_listed_as_absent_is_not_loaded_from_its_directory(copied):
    # How users take the safety checker out of a pipeline for good.
    source = copied("stable-diffusion")
    change_json(source / "model_index.json", safety_checker=[None, None])
    assert assert_loads_equal(source, "bf16").safety_checker is None


@pytest.mark.usefixtures("either_order")
def test_component_that_the_class_does_not_know_is_ignored(copied):
    source = copied("stable-diffusion")
    shutil.copytree(source / "vae", source / "other_vae")
    change_json(source / "model_index.json", other_vae=["diffusers", "AutoencoderKL"])
    assert_loads_equal(source, "bf16")


def test_variant_of_one_component_only_is_equal(copied):
    source = copied("flux")
    plain = source / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.half() for name, tensor in load_file(plain).items()}
    variant = plain.with_name("diffusion_pytorch_model.fp16.safetensors")
    save_file(tensors, variant, {"format": "pt"})
    assert_loads_equal(source, "bf16", variant="fp16")


def test_component_that_is_a_link_to_another_place_is_equal(copied):
    source = copied("flux")
    for name in ("transformer", "tokenizer_2"):
        (source / name).rename(source.parent / name)
        (source / name).symlink_to(source.parent / name)
    shard = source / "vae" / "diffusion_pytorch_model.safetensors"
    shard.rename(source.parent / "blob")
    shard.symlink_to("../../blob")
    assert_loads_equal(source, "bf16")


def test_component_stored_as_pickle_is_loaded_by_the_library(copied):
    source = copied("flux")
    path = source / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()
    got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert_equal(got, reference(source, torch.bfloat16))


def test_garbage_collector_is_left_as_it_was(saved):
    assert gc.isenabled()
    shmload.load_pipeline(saved("flux"), torch_dtype=torch.bfloat16)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# Errors -------------------------------------------------------------------------------------------


def break_configuration(source):
    (source / "transformer" / "config.json").write_text("{")


def break_shape(source):
    change_json(source / "transformer" / "config.json", joint_attention_dim=32)


def break_encoder_shape(source):
    change_json(source / "text_encoder" / "config.json", intermediate_size=8)


def break_tokenizer(source):
    (source / "tokenizer" / "tokenizer_config.json").write_text("{")
    (source / "tokenizer" / "tokenizer.json").unlink(missing_ok=True)


def remove_scheduler(source):
    shutil.rmtree(source / "scheduler")


def remove_configuration(source):
    (source / "vae" / "config.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [
        break_configuration,
        break_shape,
        break_encoder_shape,
        break_tokenizer,
        remove_scheduler,
        remove_configuration,
    ],
)
def test_error_of_the_library_speaks_of_the_source(copied, damage):
    source = copied("flux")
    damage(source)
    with Messages() as said, pytest.raises(Exception) as got:  # noqa: PT011  # see below
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    with pytest.raises(Exception) as wanted:  # noqa: PT011
        reference(source, torch.bfloat16)
    if isinstance(got.value, shmload.ShmloadError):
        assert str(source) in str(got.value)
    else:
        assert (type(got.value), str(got.value)) == (type(wanted.value), str(wanted.value))
    text = "".join(traceback.format_exception(got.value))
    assert not re.findall("shmload-[^ ]*", text)
    assert not mentions_of_view([vars(got.value), got.value.args, [vars(r) for r in said.records]])


def test_variant_that_is_not_there_is_the_librarys_error(saved):
    with pytest.raises(ValueError, match="variant=fp16") as got:
        shmload.load_pipeline(saved("flux"), variant="fp16")
    with pytest.raises(ValueError, match="variant=fp16") as wanted:
        reference(saved("flux"), variant="fp16")
    assert str(got.value) == str(wanted.value)


# Memory -------------------------------------------------------------------------------------------


class Mappings:
    """What /proc/self/maps says now."""

    def __init__(self):
        self._lines = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(None, 5)
            first, _, last = fields[0].partition("-")
            name = fields[5] if len(fields) > 5 else ""
            self._lines.append((int(first, 16), int(last, 16), name))

    def find(self, tensor):
        """Return start and name of the mapping that a tensor lies in."""
        address = tensor.data_ptr()
        start, end, name = self._lines[bisect.bisect(self._lines, (address, math.inf)) - 1]
        assert start <= address < end
        return start, name


def copied_nbytes(pipe):
    """Return how many bytes of a pipeline's mappings this process has copied for itself.

    The field is "Anonymous": a page of shared memory that only one process maps at the moment
    counts as "Private_Dirty", although it is nobody's own.
    """
    starts = {start for start, _ in map(Mappings().find, state_of(pipe).values())}
    total, is_counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            is_counted = int(fields[0].partition("-")[0], 16) in starts
        elif is_counted and fields[0] == "Anonymous:":
            total += int(fields[1]) * 1024
    return total


def state_of(pipe):
    return {
        f"{name}.{key}": tensor
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for key, tensor in part.state_dict().items()
    }


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stored_tensor_lies_in_a_segment(saved, evicts, family, dtype, keep):
    stored = {"bf16": "float32", "fp32": "bfloat16"}[dtype]
    pipe = shmload.load_pipeline(saved(family, stored), torch_dtype=DTYPES[dtype][0], keep=keep)
    tensors = state_of(pipe)
    assert len(tensors) > 50
    mappings = Mappings()
    for name, tensor in tensors.items():
        assert mappings.find(tensor)[1].startswith("/dev/shm/shmload-"), name
    assert copied_nbytes(pipe) == 0


def test_same_dtype_maps_the_files_themselves(saved):
    source = saved("flux", "bfloat16")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    mappings = Mappings()
    for tensor in pipe.transformer.state_dict().values():
        assert mappings.find(tensor)[1].startswith(str(source))


def test_writing_is_private(saved, evicts):
    source = saved("flux")
    first = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    with torch.no_grad():
        for parameter in first.transformer.parameters():
            parameter.fill_(7)
    assert copied_nbytes(first) > 0
    second = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert_equal(second, reference(source, torch.bfloat16))
    assert len(shmload.verify()) == len(shmload.segments()) > 0


# Residency ----------------------------------------------------------------------------------------


def test_kept_segments_are_attached_and_nothing_is_read(saved, shm_names, evicts):
    source = saved("wan")
    before = shmload.plan(source, torch_dtype=torch.bfloat16)
    assert {shard.action for shard in before.shards} == {shmload.Action.DECODE}
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == sorted(shard.segment for shard in before.shards)
    after = shmload.plan(source, torch_dtype=torch.bfloat16)
    assert {shard.action for shard in after.shards} == {shmload.Action.ATTACH}
    assert after.decode_nbytes == 0
    assert after.resident_nbytes == sum(info.nbytes for info in shmload.segments())
    progress = []
    got = shmload.load_pipeline(
        source, torch_dtype=torch.bfloat16, progress=lambda *args: progress.append(args)
    )
    assert progress == []
    assert_equal(got, reference(source, torch.bfloat16))
    assert shm_names() == sorted(shard.segment for shard in before.shards)
    assert shmload.warm(source, torch_dtype=torch.bfloat16).read_nbytes == 0


def test_resident_segments_are_attached_by_a_load_that_keeps_nothing(saved, shm_names, evicts):
    source = saved("wan")
    names = shmload.warm(source, torch_dtype=torch.bfloat16).segments
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    assert shm_names() == sorted(names)
    assert all(info.is_leased for info in shmload.segments())
    assert Mappings().find(pipe.vae.encoder.conv_in.weight)[1].removeprefix("/dev/shm/") in names


def test_verify_looks_at_what_was_resident(saved, shm_names, evicts):
    source = saved("flux")
    shmload.warm(source, torch_dtype=torch.bfloat16)
    shmload.load_pipeline(source, torch_dtype=torch.bfloat16, verify=True)
    path = Path("/dev/shm", shm_names()[0])
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x5a")
    path.chmod(0o400)
    with pytest.raises(shmload.SegmentCorrupt, match=path.name):
        shmload.load_pipeline(source, torch_dtype=torch.bfloat16, verify=True)


def test_progress_of_a_pipeline_counts_to_the_end(saved, configure):
    configure(inline_nbytes=0)
    source = saved("wan", sharded=True)
    total = sum(shard.read_nbytes for shard in shmload.plan(source, torch_dtype="bf16").shards)
    seen = []
    shmload.load_pipeline(
        source,
        torch_dtype="bf16",
        workers=2,
        verify=True,
        progress=lambda *counts: seen.append(counts),
    )
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("attached", [False, True])
def test_lease_lasts_as_long_as_the_pipeline(saved, shm_names, evicts, attached):
    source = saved("flux")
    if attached:
        shmload.warm(source, torch_dtype=torch.bfloat16)
        assert not any(info.is_leased for info in shmload.segments())
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    assert all(info.is_leased for info in shmload.segments())
    names = shm_names()
    with pytest.raises(shmload.SegmentBusy) as busy:
        shmload.evict(str(source))
    assert sorted(busy.value.names) == names == shm_names()
    assert_equal(pipe, reference(source, torch.bfloat16))
    del pipe
    gc.collect()
    assert not any(info.is_leased for info in shmload.segments())
    assert len(shmload.evict(str(source))) == len(names)
    assert shm_names() == []


def test_one_tensor_that_lives_on_keeps_its_segments_lease(saved, evicts):
    source = saved("flux")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    bias = pipe.vae.decoder.conv_out.bias
    wanted = as_bytes(bias)
    del pipe
    gc.collect()
    leased = [info.source for info in shmload.segments() if info.is_leased]
    assert [Path(path).parent.name for path in leased] == ["vae"]
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict(*(info.name for info in shmload.segments()))
    assert [Path(info.source).parent.name for info in shmload.segments()] == ["vae"]
    assert as_bytes(bias) == wanted
    del bias
    assert not any(info.is_leased for info in shmload.segments())


def test_first_load_of_all_keeps_only_the_segments_it_uses(
    saved, configure, tmp_path, shm_names, evicts, bytes_come_first
):
    # No rule is remembered yet, and Wan's is not the likely one.
    configure(cache_dir=tmp_path)
    source = saved("wan")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=True)
    used = {Path(name).name for _, name in map(Mappings().find, state_of(pipe).values())}
    assert set(shm_names()) == used


# Rules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        Rule(target="BF16"),  # what Wan keeps in float32 is forgotten
        Rule(target="F16"),
        Rule(target="F8_E4M3"),
        Rule(target="F32"),
        Rule(target="BF16", fp32_parts=("norm1", "ffn", "to_q")),
        Rule(target="BF16", only=frozenset({"patch_embedding.weight", "shared.weight"})),
        Rule(),
    ],
    ids=lambda rule: rule.text.replace("/", "-"),
)
def test_remembered_rule_that_is_wrong_gives_a_right_pipeline(
    saved, configure, monkeypatch, tmp_path, evicts, either_order, wrong, keep
):
    source = f"{saved('wan')}/"
    configure(cache_dir=tmp_path)
    right = shmload.plan(source, torch_dtype=torch.bfloat16)
    configure(cache_dir=tmp_path / "wrong")
    with monkeypatch.context() as patch:
        patch.setattr(rules, "derive_rule", lambda *_: wrong)
        planned = shmload.plan(source, torch_dtype=torch.bfloat16)
        assert {shard.conversion for shard in planned.shards} <= {wrong.text, "raw"}
    with Messages() as said:
        got = shmload.load_pipeline(source, torch_dtype=torch.bfloat16, keep=keep)
    with Messages() as wanted_said:
        wanted = reference(source, torch.bfloat16)
    assert_equal(got, wanted)
    own = [text for text in said.texts if text[0].startswith("shmload")]
    assert [text for text in said.texts if text not in own] == wanted_said.texts
    assert not mentions_of_view(got)
    if own:
        # What was found wrong is not used a second time.
        again = shmload.plan(source, torch_dtype=torch.bfloat16)
        changed = [s for s in again.shards if s.conversion != wrong.text]
        assert set(changed) <= set(right.shards) or keep
        assert changed


def test_rule_that_narrows_what_the_model_keeps_is_found_out(
    saved, configure, monkeypatch, tmp_path
):
    # With no torch_dtype diffusers' models are float32; bits lost on the way must not go unseen.
    source = saved("flux")
    configure(cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rules, "derive_rule", lambda *_: Rule(target="BF16"))
        shmload.plan(source)
    assert_equal(shmload.load_pipeline(source), reference(source))
