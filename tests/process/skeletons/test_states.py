"""What was built in one state of the process is not taken in another: for each entry of the list.

Both a skeleton and a pipeline that was loaded ahead: the load gives what the library gives there.
"""

import builtins
import contextlib
import copy
import logging
import sys
import warnings
from types import ModuleType

import diffusers
import pytest
import torch
import transformers
from comparing import assert_equal, assert_loads_equal, reference
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

import shmload
from shmload._building import build, prepared
from shmload._building.conditions import Trace, conditions_of, why_unmet
from shmload._building.pickling import PickledModels
from shmload._building.prepared import Prepared
from shmload._building.skeletons import Skeleton
from shmload._building.state import MODES, constants
from shmload._building.unchanged import Facts
from shmload._host.fingerprint import files_below

pytestmark = pytest.mark.slow


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def setting(set_value, value, usual):
    set_value(value)
    try:
        yield
    finally:
        set_value(usual)


@contextlib.contextmanager
def hooked():
    def mark(parent, name, child):
        child.mark = name

    handle = module_hooks.register_module_module_registration_hook(mark)
    try:
        yield
    finally:
        handle.remove()


future = torch.__future__
# How each mode is set to something else.
CHANGES = {
    "the default dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "the default device": lambda: torch.device("meta"),
    "gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "the precision of products": lambda: setting(
        torch.set_float32_matmul_precision, "high", "highest"
    ),
    "TF32": lambda: setting(
        lambda value: setattr(torch.backends.cuda.matmul, "allow_tf32", value), True, False
    ),
    "autocast": lambda: torch.autocast("cpu"),
    "modes of functions": Functions,
    "modes of operations": Operations,
    "flash attention": lambda: setting(torch._C._set_sdp_use_flash, False, True),
    "plain attention": lambda: setting(torch._C._set_sdp_use_math, False, True),
    "attention in little memory": lambda: setting(torch._C._set_sdp_use_mem_efficient, False, True),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "hooks for all modules": hooked,
    "overwritten parameters": lambda: setting(
        future.set_overwrite_module_params_on_conversion, True, False
    ),
    "swapped parameters": lambda: setting(future.set_swap_module_params_on_conversion, True, False),
    "the recursion limit": lambda: setting(sys.setrecursionlimit, 900, sys.getrecursionlimit()),
}


def _other(*args, **kwargs):
    raise AssertionError


# What a program may put into libraries, and what is said of it.
PATCHES = {
    "torch.linspace was replaced": lambda patch: patch.setattr(torch, "linspace", _other),
    "builtins.input was replaced": lambda patch: patch.setattr(builtins, "input", _other),
    "diffusers.DDIMScheduler was replaced": lambda patch: patch.setattr(
        diffusers, "DDIMScheduler", diffusers.EulerDiscreteScheduler
    ),
    "diffusers.schedulers.scheduling_ddim.torch was replaced": lambda patch: patch.setattr(
        "diffusers.schedulers.scheduling_ddim.torch", object()
    ),
    "diffusers.configuration_utils.open was added": lambda patch: patch.setattr(
        diffusers.configuration_utils, "open", _other, raising=False
    ),
    "the module diffusers was replaced": lambda patch: patch.setitem(
        sys.modules, "diffusers", ModuleType("diffusers")
    ),
}


@pytest.fixture(autouse=True)
def _usual_filters():
    """Undo the filters of pytest: a program that asks for all warnings gets nothing made ahead."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        yield


def test_each_mode_has_a_change():
    assert CHANGES.keys() == MODES.keys()


@pytest.fixture(scope="module")
def conditions():
    with (trace := Trace()):
        model = diffusers.AutoencoderTiny()
    return conditions_of(trace, {type(each) for each in model.modules()})


@pytest.mark.parametrize("name", MODES)
def test_other_mode_is_noticed(conditions, tmp_path, name):
    facts = Facts(str(tmp_path), {}, [])
    with CHANGES[name]():
        reasons = [facts.why_changed(), why_unmet(conditions)]
    # Some are set by others: the precision of products is that of TF32.
    assert all(reason and reason.endswith("it is another") for reason in reasons)
    assert (facts.why_changed(), why_unmet(conditions)) == (None, None)


@pytest.mark.parametrize("has_versions", [False, True])
@pytest.mark.parametrize("reason", PATCHES)
def test_patch_is_noticed(tmp_path, monkeypatch, reason, has_versions):
    assert diffusers.DDIMScheduler
    facts = Facts(str(tmp_path), {}, [])
    if has_versions:
        facts.note_versions()
    assert facts.why_changed() is None
    with monkeypatch.context() as patch:
        PATCHES[reason](patch)
        assert facts.why_changed() == reason
    assert facts.why_changed() is None


def test_hook_of_a_program_is_no_patch(tmp_path, monkeypatch):
    facts = Facts(str(tmp_path), {}, [])
    monkeypatch.setattr(sys, "excepthook", _other)
    assert facts.why_changed() is None


def test_skeleton_is_not_used_after_a_class_of_a_lazy_package_was_replaced(monkeypatch, conditions):
    skeleton = Skeleton(
        source="", root="", class_name="", dtype="",
        models=PickledModels(tensors=[], models=b""),
        conditions=conditions,
    )  # fmt: skip
    assert skeleton.why_not() is None
    monkeypatch.setattr(diffusers, "AutoencoderTiny", diffusers.AutoencoderKL)
    assert skeleton.why_not() == "diffusers.AutoencoderTiny was replaced"


def test_logger_of_one_module_that_hears_details_is_noticed(tmp_path):
    facts = Facts(str(tmp_path), {}, [])
    logger = logging.getLogger("diffusers.pipelines.pipeline_utils")
    with setting(logger.setLevel, "DEBUG", logging.NOTSET):
        assert facts.why_changed() == "the libraries are asked to log more than warnings"


def test_higher_recursion_limit_is_none(tmp_path):
    facts = Facts(str(tmp_path), {}, [])
    with setting(sys.setrecursionlimit, 5000, sys.getrecursionlimit()):
        assert facts.why_changed() is None


def test_mode_of_fake_tensors_is_noticed(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    facts = Facts(str(tmp_path), {}, [])
    with FakeTensorMode():
        assert "modes of operations" in facts.why_changed()


# Loads --------------------------------------------------------------------------------------------


class Mine(torch.nn.Module):
    """An activation of a program's own."""

    def forward(self, x):
        return x


def config_name(patch):
    patch.setattr(diffusers.ModelMixin, "config_name", "other.json")


def own_config_name(patch):
    patch.setattr(diffusers.AutoencoderKL, "config_name", "other.json", raising=False)


def kept_in_float32(patch):
    patch.setattr(diffusers.UNet2DConditionModel, "_keep_in_fp32_modules", ["conv_in"])


def activation(patch):
    patch.setitem(ACT2FN, "quick_gelu", Mine)


def activation_of_diffusers(patch):
    patch.setitem(diffusers.models.activations.ACT2CLS, "silu", Mine)


def attention(patch):
    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    patch.setitem(table._global_mapping, "sdpa", lambda *args, **kwargs: None)


def class_of_a_table(patch):
    table = transformers.models.auto.modeling_auto.MODEL_MAPPING
    patch.setitem(table._extra_content, transformers.CLIPTextConfig, Mine)


def loadable_class(patch):
    table = diffusers.pipelines.pipeline_loading_utils.LOADABLE_CLASSES
    patch.setitem(table["diffusers"], "Mine", ["save_pretrained", "from_pretrained"])


@contextlib.contextmanager
def patched(change):
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        yield


STATES = {
    "registration hook": hooked,
    "mode of operations": Operations,
    **{
        change.__name__: lambda change=change: patched(change)
        for change in (
            *(config_name, own_config_name, kept_in_float32, activation),
            *(activation_of_diffusers, attention, class_of_a_table, loadable_class),
        )
    },
}
# No constructor reads these: a model with them is what a model without them is.
READ_LATER = {"class_of_a_table", "loadable_class"}


class NotParked:
    """Segments that were not given up."""

    def resume(self):
        pass


@pytest.fixture
def ahead(saved, monkeypatch):
    """A pipeline that was loaded ahead, and is taken by the next load of it."""
    source = saved("stable-diffusion")
    monkeypatch.setattr(prepared, "on_load", lambda request, way: None)
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    request = prepared.request_of(source, torch.bfloat16, False, None)
    facts = Facts(str(source), files_below(source), [pipe, *pipe.components.values()])
    prepared.put(Prepared(request, pipe, facts, NotParked(), lambda: None))
    yield source, pipe
    prepared.drop()


def test_pipeline_loaded_ahead_is_taken_in_the_same_state(ahead):
    source, pipe = ahead
    assert shmload.load_pipeline(source, dtype=torch.bfloat16) is pipe


@pytest.mark.parametrize("name", STATES)
def test_pipeline_loaded_ahead_is_not_taken_in_another_state(ahead, name):
    source, pipe = ahead
    with STATES[name]():
        got, wanted = both(source)
        assert got is not pipe
        assert_same(got, wanted)


def test_skeleton_is_not_used_in_another_state(saved, built, skeletons, monkeypatch):
    source = saved("stable-diffusion")
    for _ in range(2):
        assert_loads_equal(source, "bf16")
    assert (len(built), len(skeletons())) == (1, 1)
    monkeypatch.setattr(build, "ask", lambda request: None)
    for name in STATES.keys() - READ_LATER:
        before = len(built)
        with STATES[name]():
            assert_same(*both(source))
        assert len(built) > before, name
    before = len(built)
    assert_loads_equal(source, "bf16")
    assert len(built) == before


def both(source):
    """Load with shmload and with the library; return the pipelines, or the errors' classes."""
    results = []
    for load in (lambda: shmload.load_pipeline(source, dtype=torch.bfloat16), reference):
        try:
            given = () if load is not reference else (source, torch.bfloat16)
            results.append(load(*given))
        except Exception as exc:
            results.append(type(exc))
    return results


def assert_same(got, wanted):
    if isinstance(wanted, type):
        assert got is wanted
        return
    assert_equal(got, wanted)
    marks = [
        [getattr(each, "mark", None) for each in pipe.unet.modules()] for pipe in (got, wanted)
    ]
    assert marks[0] == marks[1]


def test_copy_of_an_object_changes_no_constant():
    class Slotted:
        __slots__ = ("value",)
        SIZE = 3

    before = constants(Slotted)
    made = Slotted()
    made.value = 1
    copy.copy(made)
    assert "__slotnames__" in vars(Slotted)
    assert constants(Slotted) == before
