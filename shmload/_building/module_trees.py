"""Describes the modules of models with their sizes: the values that a placement is decided from.

A built model is described as it is. A model that is not built is made on torch's meta device,
without memory, and each tensor counts with the dtype that it will have when it is loaded.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shmload._building.maker import is_left_to_library
from shmload._building.mapped import modules_of
from shmload._building.rules import find_class, make_meta_model
from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES, converted_nbytes, parse_dtype
from shmload._checkpoints.library import making
from shmload._checkpoints.rule import Rule, own_dtype, rule_for, stored_tensors, wanted_dtype
from shmload._checkpoints.source import Checkpoint, Source
from shmload._checkpoints.weights import plain_weights_in
from shmload._compat import float32_patterns, indivisible_classes
from shmload._placement.modules import Component, Module, join, parent_of
from shmload._wording import logger_of

logger = logger_of(__name__)

NbytesOf = Callable[[str, torch.Tensor], int]
"""Says how many bytes a tensor takes, by its name in the model."""

# Names, in diffusers' pipelines, of the components that compute at every step of a generation.
_EVERY_STEP = re.compile(r"(transformer|unet|prior|prior_prior|decoder|controlnet\w*)(_\d+)?")


def component_of(name: str, model: torch.nn.Module, nbytes_of: NbytesOf | None = None) -> Component:
    """Describe a model, built or on the meta device.

    Args:
        name: name of the component in its pipeline; empty if there is none.
        model: any module. All buffers count, also those that are in no checkpoint. Modules stay
            whole if `_no_split_modules`, of the model or of any module in it, names their class.
        nbytes_of: returns the size of a tensor, in bytes; None for its present size.

    Returns:
        Its modules with sizes in bytes. A tensor with several names counts at the first.
    """
    whole = whole_classes(model)
    first: dict[torch.Tensor, str] = {}
    ties: dict[torch.Tensor, list[str]] = {}

    def size(path: str, tensor: torch.Tensor, home: str) -> int:
        if tensor in first:
            ties.setdefault(tensor, [first[tensor]]).append(home)
            return 0
        first[tensor] = home
        return nbytes_of(path, tensor) if nbytes_of else tensor.nbytes

    def walk(part: str, path: str, module: torch.nn.Module) -> Module:
        is_whole = type(module).__name__ in whole
        # Not named_children(), which leaves out a module's second name.
        inner = [(key, child) for key, child in module._modules.items() if child is not None]
        own = []
        # Without its submodules', under all of their names.
        named: list[tuple[str, torch.Tensor]] = []
        named += module.named_parameters(recurse=False, remove_duplicate=False)
        named += module.named_buffers(recurse=False, remove_duplicate=False)
        for key, tensor in named:
            tensor_path = join(path, key)
            # A tensor beside submodules is placed by itself, else with its module.
            home = tensor_path if inner else path
            own.append(Module(name=key, nbytes=size(tensor_path, tensor, home)))
        if not inner:
            nbytes = sum(tensor.nbytes for tensor in own)
            return Module(name=part, nbytes=nbytes, is_whole=is_whole)
        children = tuple(walk(key, join(path, key), child) for key, child in inner)
        return parent_of(part, (*own, *children), is_whole=is_whole)

    module = walk("", "", model)
    tied = tuple(dict.fromkeys(tuple(paths) for paths in ties.values() if len(set(paths)) > 1))
    # `walk` refers to itself: tensors in its reach would wait for a collection of garbage.
    first.clear()
    ties.clear()
    return _component(name, module, tied)


def whole_classes(model: torch.nn.Module) -> set[str]:
    """Return the names of the classes that a model, or a module in it, calls indivisible."""
    return {
        class_name for module in modules_of(model) for class_name in indivisible_classes(module)
    }


def components_of(source: Source, torch_dtype: object) -> tuple[Component, ...]:
    """Describe the wanted components of a source that have weights; read headers only.

    Args:
        source: the source to place.
        torch_dtype: as for `load_pipeline`.

    Returns:
        The components, in the source's order, with the sizes that they will have when they are
        loaded. A component that is quantised, whose class is unknown, or whose files only the
        library reads, is indivisible and has the size of its files.
    """
    # For a model of transformers `auto` is the dtype that sizes are computed with anyway.
    if not source.is_pipeline and is_left_to_library(torch_dtype):
        torch_dtype = None
    by_name = {checkpoint.component: checkpoint for checkpoint in source.checkpoints}
    found = []
    for name in source.components or tuple(by_name):
        if name in by_name:
            found.append(_describe(by_name[name], torch_dtype))
        elif name in source.unread:
            # The library alone reads its weights, if it has any.
            files = plain_weights_in(source.folder_of(name))
            if files:
                found.append(_opaque(name, sum(path.stat().st_size for path in files)))
    return tuple(found)


def _describe(checkpoint: Checkpoint, torch_dtype: object) -> Component:
    """Describe one component by its class, or else by its headers."""
    rule = rule_for(checkpoint, torch_dtype)
    # Without a configuration the class would make a model of default size.
    is_known = checkpoint.class_name and checkpoint.config
    if is_known and not checkpoint.config.get("quantization_config"):
        try:
            with making():
                return _from_class(checkpoint, rule, torch_dtype)
        except Exception as exc:  # whatever went wrong: the component is placed as a whole
            logger.info("%s cannot be divided: %s", checkpoint.class_name, exc)
    stored = stored_tensors(checkpoint)
    sizes = (converted_nbytes(each.nbytes, each.dtype, rule(each)) for each in stored)
    return _opaque(checkpoint.component, sum(sizes))


def _from_class(checkpoint: Checkpoint, rule: Rule, torch_dtype: object) -> Component:
    """Make the model without memory; each tensor counts with its size when it is loaded."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    model_class: Any = find_class(checkpoint)
    target = wanted_dtype(torch_dtype, checkpoint.component)
    kept: re.Pattern[str] | None = None
    if issubclass(model_class or object, ModelMixin):
        target = target or "F32"
        with torch.device("meta"):
            model = model_class.from_config(checkpoint.config)
        kept = _parts_pattern(rule.fp32_parts)
    elif issubclass(model_class or object, PreTrainedModel):
        # No dtype means float32 up to version 4, and from 5 on the checkpoint's own.
        target = target or rule.target or parse_dtype(own_dtype(checkpoint) or "float32")
        dtype = getattr(torch, TORCH_NAMES[target])
        model = make_meta_model(model_class, checkpoint, dtype)
        kept = _parts_pattern(float32_patterns(model, target))
    else:
        raise TypeError("its class is of no known library")
    stored = model.state_dict().keys()

    def nbytes_of(path: str, tensor: torch.Tensor) -> int:
        if path not in stored or not tensor.is_floating_point():
            return tensor.nbytes
        dtype = "F32" if kept and kept.search(path) else target
        return tensor.numel() * NBITS[dtype] // 8

    return component_of(checkpoint.component, model, nbytes_of)


def _parts_pattern(parts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern for names with one of some dotted parts; both libraries match like that."""
    return re.compile("|".join(rf"(^|\.){part}($|\.)" for part in parts)) if parts else None


def _opaque(name: str, nbytes: int) -> Component:
    return _component(name, Module(name="", nbytes=nbytes, is_whole=True))


def _component(name: str, module: Module, ties: tuple[tuple[str, ...], ...] = ()) -> Component:
    runs_each_step = _EVERY_STEP.fullmatch(name) is not None
    return Component(name=name, module=module, ties=ties, runs_each_step=runs_each_step)
