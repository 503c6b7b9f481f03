"""Private names of the model libraries and of torch, and what reads them: they stand here alone.

The table has each. A release may move one: then a quicker way is lost, or an answer becomes an
error; it is never a wrong result. A test looks for each, and fails by its name. The classes of
torch's own modes, and what a module has its parts in, are used where they are needed. Nothing heavy
is imported at the top.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TESTED = {"diffusers": ("0.35", "0.42"), "transformers": ("4.57", "5.24")}
"""The oldest and the newest release of each that the tests run with."""
_CASTS = "the library casts, after the decode"
_TWICE = "models whose dtypes come out otherwise are loaded again"
NAMES = {
    "torch._C:DisableTorchFunctionSubclass": "an error of moves to the host",
    "torch._C:_len_torch_dispatch_stack": "redirect leaves all to the libraries",
    "torch._C:_len_torch_function_stack": "redirect leaves all to the libraries",
    "torch._C:_get_privateuse1_backend_name": "devices that a package adds to torch are refused",
    "torch._dynamo.eval_frame:OptimizedModule": "models that are compiled cannot be published",
    "torch:Tensor._make_subclass": "an error of published tensors of a class of their own",
    "torch:_has_compatible_shallow_copy_type": "an error of moves to devices",
    "torch.nn:Module._apply": "weights that come back from a device are copies",
    "torch.nn:Module._buffers": "an error",
    "torch.nn:Module._modules": "an error",
    "torch.nn:Module._parameters": "an error",
    "torch.utils._python_dispatch:TorchDispatchMode": "an error at import",
    "peft.tuners.tuners_utils:BaseTunerLayer._active_adapter": "`update` leaves it as it is",
    "peft.tuners.tuners_utils:BaseTunerLayer._disable_adapters": "`update` leaves it as it is",
    "diffusers.hooks.group_offloading:ModuleGroup.cpu_param_dict": "an error of updates",
    "diffusers.hooks.group_offloading:ModuleGroup.offload_to_disk_path": "an error of updates",
    "diffusers.models.modeling_utils:ModelMixin._keep_in_fp32_modules": _TWICE,
    "diffusers.loaders.lora_base:LoraBaseMixin._merged_adapters": "`update` leaves it as it is",
    "diffusers:ModularPipeline._component_specs": "an error of modular pipelines",
    "diffusers.models.modeling_utils:ModelMixin._no_split_modules": "plans divide more modules",
    "diffusers.pipelines.pipeline_utils:DiffusionPipeline._load_connected_pipes": "a combined "
    "pipeline is recalled with a prior that has changed",
    "diffusers.pipelines.pipeline_utils:_resolve_dtype": "diffusers warns of the older keyword",
    "diffusers.utils.import_utils:DummyObject": "the library's own error for a missing package",
    "transformers:AutoModel._model_mapping": _CASTS,
    "transformers:CLIPTokenizerFast._wrap_decode_method_backend_tokenizer": "published tokenizers "
    "of CLIP decode otherwise",
    "transformers:GenerationConfig._original_object_hash": "restored models that generate warn",
    "transformers:PreTrainedModel._from_config": _CASTS,
    "transformers:PreTrainedModel._keep_in_fp32_modules": _TWICE,
    "transformers:PreTrainedModel._keep_in_fp32_modules_strict": _TWICE,
    "transformers:PreTrainedModel._no_split_modules": "plans divide more modules",
    "transformers:PreTrainedModel.initialize_weights": "an error of restored models",
    "transformers.conversion_mapping:get_model_conversion_mapping": _CASTS,
    "transformers.core_model_loading:rename_source_key": _CASTS,
    "transformers.utils.output_capturing:install_output_capuring_hook": "a pipeline that was used "
    "may not be published",
}
"""Each name, and what is lost without it."""

ADAPTER_STATE = frozenset(
    {
        "_active_adapter",
        "_disable_adapters",
        "_merged_adapters",
        "lora_alpha",
        "merged_adapters",
        "peft_config",
        "r",
        "scale",
        "scaling",
    }
)
"""Attributes that say what the weights of adapters do: of peft's layers, of models that have such
layers, of pipelines, and of diffusers' layers of IP adapters."""

OWN_HASH = "_original_object_hash"
"""Where a config of generation keeps its own hash, which differs in each process."""
WRAPPED = "decode"
"""What tokenizers of CLIP replace in the tokenizer behind them, and a pickle of it lacks."""


def find(where: str) -> Any:
    """Return what one of the names leads to; None if it has moved."""
    home, _, path = where.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(home))
    except (ImportError, AttributeError):
        return None


def wrap_decode(tokenizer: object) -> None:
    """Have a tokenizer of CLIP replace a function again, as its constructor did."""
    wrap = getattr(type(tokenizer), "_wrap_decode_method_backend_tokenizer", None)
    if wrap is not None:
        wrap(tokenizer)


_CAPTURE = "transformers.utils.output_capturing", "install_output_capuring_hook"


def arguments_of_capture(function: FunctionType) -> dict[str, Any] | None:
    """Return what transformers has made a hook of that notes outputs; None of another function.

    Its models install such hooks when they are first asked for the outputs of their layers.
    """
    module, name = _CAPTURE
    if (function.__module__, function.__qualname__.partition(".")[0]) != _CAPTURE:
        return None
    known = inspect.getclosurevars(function).nonlocals
    taken = inspect.signature(find(f"{module}:{name}")).parameters
    return {each: known[each] for each in taken if each != "module"}


def make_capture(arguments: Mapping[str, Any]) -> Any:
    """Return such a hook."""
    import torch

    layer = torch.nn.Module()
    find(":".join(_CAPTURE))(layer, **arguments)
    (hook,) = layer._forward_hooks.values()
    return hook


# torch --------------------------------------------------------------------------------------------


def added_device_kind(torch: ModuleType) -> str | None:
    """Return the kind of device that a package has added to torch."""
    name = torch._C._get_privateuse1_backend_name()
    return str(name) if name else None


def takes_data_of(tensor: "torch.Tensor", other: "torch.Tensor") -> bool:
    """Tell whether a tensor's `data` may be set to the other, as `Module.to` asks."""
    import torch

    return bool(torch._has_compatible_shallow_copy_type(tensor, other))


def as_plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which a parameter of a library's class computes as a plain tensor."""
    import torch

    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def wrap_moves(move: "Callable[..., Any]") -> None:
    """Have a function called in place of `torch.nn.Module._apply`, by which all modules move.

    Args:
        move: gets torch's own, and its arguments: the module, the function that is applied to its
            tensors, and whether modules in it move too.
    """
    import torch

    of_torch: Any = getattr(torch.nn.Module, "_apply", None)
    if of_torch is None:
        return

    @functools.wraps(of_torch)
    def _apply(self: "torch.nn.Module", fn: Callable[..., Any], recurse: bool = True) -> Any:
        return move(of_torch, self, fn, recurse)

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def is_brought_from_copies(module: "torch.nn.Module") -> bool:
    """Tell whether group offloading of diffusers brings weights from tensors or files of its own.

    Args:
        module: whose own hook is looked at, without those of modules in it.
    """
    registry: Any = getattr(module, "_diffusers_hook", None)
    hook = registry.get_hook("group_offloading") if registry else None
    return hook is not None and bool(hook.group.cpu_param_dict or hook.group.offload_to_disk_path)


def make_tensor_of_class(kind: Any, data: "torch.Tensor", requires_grad: bool) -> "torch.Tensor":
    """Return a tensor of a class of its own over the data of a plain one."""
    import torch

    made: torch.Tensor = torch.Tensor._make_subclass(kind, data, requires_grad)
    return made


def original_of_compiled(thing: object) -> "torch.nn.Module | None":
    """Return the model that `torch.compile` has put another in front of; None if it is none."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if kind is None or not isinstance(thing, kind):
        return None
    original: torch.nn.Module = thing._orig_mod
    return original


def has_cuda_context(index: int) -> bool:
    """Tell whether this process has a context on a CUDA device; False in doubt."""
    import torch

    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # builds for the CPU have none
    return bool(ask and ask(index))


def is_in_mode() -> bool:
    """Tell whether torch calls a program's functions in place of its own, or that is unknown."""
    return any(
        read is None or read()
        for read in map(
            find, ("torch._C:_len_torch_function_stack", "torch._C:_len_torch_dispatch_stack")
        )
    )


# Both libraries -----------------------------------------------------------------------------------


def indivisible_classes(module: "torch.nn.Module") -> Iterable[str]:
    """Return the names of the classes that a model calls indivisible."""
    return getattr(module, "_no_split_modules", None) or ()


def is_missing(found: type) -> bool:
    """Tell whether a class stands for one whose packages are missing: it raises when it is used."""
    return type(found).__name__ == "DummyObject"


# diffusers ----------------------------------------------------------------------------------------


def dtype_keyword() -> str:
    """Return what diffusers calls the dtype; the older name still works but warns."""
    where = "diffusers.pipelines.pipeline_utils:_resolve_dtype"
    return "dtype" if find(where) else "torch_dtype"


def kept_in_float32(model_class: Any) -> set[str]:
    """Return the parts of tensors' names that a class of diffusers keeps in float32."""
    kept = getattr(model_class, "_keep_in_fp32_modules", None) or ()
    return {kept} if isinstance(kept, str) else set(kept)


def takes_connected(pipeline_class: Any) -> bool:
    """Tell whether a class of pipelines also loads what its source's card names."""
    return bool(getattr(pipeline_class, "_load_connected_pipes", False))


def component_specs(modular: Any) -> dict[str, Any]:
    """Return the specs of a modular pipeline's components by name; they are its own."""
    return dict(modular._component_specs)


# transformers -------------------------------------------------------------------------------------


def float32_patterns(model: Any, target: str) -> set[str]:
    """Return patterns of the names that a model keeps in float32.

    Args:
        model: the model.
        target: the safetensors name of the dtype that it is loaded in.
    """
    patterns: set[str] = set()
    if target == "F16":
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if target in ("F16", "BF16"):
        patterns |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return patterns


def make_from_config(model_class: Any, config: Any, dtype: Any) -> Any:
    """Make a model without its weights."""
    return model_class._from_config(config, dtype=dtype)


def class_mapped(automatic: Any, config: Mapping[str, Any]) -> type | None:
    """Return the class that an automatic class chooses for a configuration; None in doubt."""
    from transformers import CONFIG_MAPPING

    try:
        found = automatic._model_mapping[CONFIG_MAPPING[config["model_type"]]]
    except (AttributeError, KeyError, TypeError, ValueError, ImportError):
        return None
    if isinstance(found, tuple):  # several: the configuration names one, or else it is the first
        named = config.get("architectures") or ()
        found = next((each for each in found if each.__name__ in named), found[0])
    return found if isinstance(found, type) else None


def unrenamed(model: Any, names: set[str], tensors: dict[str, Any]) -> set[str]:
    """Return the names of a checkpoint's tensors that a model loads without renaming.

    Args:
        model: the model.
        names: to choose from.
        tensors: the model's state dict.

    Raises:
        Exception: the library cannot tell.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:  # transformers 4
        known = model._get_key_renaming_mapping(sorted(names))
        return {name for name in names if known.get(name) == name}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    return {
        name
        for name in names
        if rename_source_key(name, renamings, converters, prefix, tensors) == (name, None)
    }


def define_apply() -> None:
    """Have transformers 5 give torch's modules the method that it defines at its first build."""
    import torch
    from transformers import PreTrainedModel

    if hasattr(torch.nn.Module, "smart_apply"):
        return
    if not hasattr(PreTrainedModel, "initialize_weights"):  # an older one
        return
    empty: Any = torch.nn.Module()
    empty._initialize_weights = lambda *_: None  # 4.57 passes one argument, 5 two
    empty.is_custom_code = lambda: False
    PreTrainedModel.initialize_weights(empty)
