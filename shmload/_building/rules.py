"""Derives dtype rules from the model classes of diffusers and transformers.

The sources of truth are `load_model_dict_into_meta` in diffusers (0.35 to 0.42) and, in
transformers, `_load_state_dict_into_meta_model` (4.57) and `convert_and_load_state_dict_in_model`
(5.x).
"""

import importlib
from typing import Any

from packaging import version

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.library import making
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.source import Checkpoint
from shmload._compat import (
    float32_patterns,
    kept_in_float32,
    make_from_config,
    unrenamed,
)
from shmload._wording import logger_of

logger = logger_of(__name__)

# Without torch_dtype parameters get the dtype of a new model, float32, but buffers may not.
# Widening loses no bits, whatever cast follows.
_WIDENED = Rule(target="F32", is_widening=True)


def import_libraries() -> None:
    """Import what `derive_rule` needs."""
    with making():
        import diffusers
        import transformers

        _ = diffusers.ModelMixin, transformers.PreTrainedModel  # both are imported at first use


def derive_rule(
    checkpoint: Checkpoint, target: str | None, model_class: type | None = None
) -> Rule:
    """Derive from a checkpoint's class which dtypes its tensors get.

    Args:
        checkpoint: with library, class and configuration.
        target: the wanted safetensors dtype, or None.
        model_class: the class, if no library has it.

    Returns:
        The rule; the raw one if the class is unknown or the rule cannot be derived.
    """
    with making():
        import transformers
        from diffusers import ModelMixin
        from transformers import PreTrainedModel

        found = model_class or find_class(checkpoint)
        if found is None or not issubclass(found, (ModelMixin, PreTrainedModel)):
            return RAW
        if issubclass(found, ModelMixin):
            # A tensor keeps float32 under every dtype if a part of its dotted name is listed here.
            parts = tuple(sorted(kept_in_float32(found))) if target != "F32" else ()
            return Rule(target=target, fp32_parts=parts) if target else _WIDENED
        if target is None:
            # Up to version 4 that means float32, from 5 on the checkpoint's own dtype.
            return _WIDENED if version.parse(transformers.__version__).major < 5 else RAW
        try:
            return _transformers_rule(found, checkpoint, target)
        except Exception as exc:  # whatever went wrong: the library can still cast by itself
            logger.info("no dtype rule for %s: %s", found.__name__, exc)
    return RAW


def find_class(checkpoint: Checkpoint) -> type | None:
    """Find a class as diffusers does, in a module of its pipelines or in a library; or None."""
    from diffusers import pipelines

    try:
        home = getattr(pipelines, checkpoint.library, None)
        home = home or importlib.import_module(checkpoint.library)
        found = getattr(home, checkpoint.class_name)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def _transformers_rule(model_class: Any, checkpoint: Checkpoint, target: str) -> Rule:
    """Return the rule of a transformers class.

    Builds the model on the meta device to see which parameters keep another dtype than `target` (a
    safetensors name). If some do, the rule converts only the others, and of these only those whose
    names do not change while loading. RAW for other targets than F32, F16 and BF16.

    May raise anything that the library raises.
    """
    import torch

    if target not in ("F32", "F16", "BF16"):
        return RAW
    dtype = getattr(torch, TORCH_NAMES[target])
    model = make_meta_model(model_class, checkpoint, dtype)
    patterns = float32_patterns(model, target)
    tensors = model.state_dict()
    exceptions = {
        name
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() and tensor.dtype != dtype)
        # As plain text, which matches at least as much as the patterns of either version.
        or any(pattern.strip("*.^$") in name for pattern in patterns)
    }
    if not exceptions:
        return Rule(target=target)
    # Many classes rename tensors while they load. A tensor that is renamed may be one of the
    # exceptions, so only unrenamed ones are listed.
    return Rule(target=target, only=frozenset(unrenamed(model, set(tensors) - exceptions, tensors)))


def make_meta_model(model_class: Any, checkpoint: Checkpoint, dtype: Any) -> Any:
    """Make a transformers model on the meta device, with the dtypes of `from_pretrained`."""
    import torch

    config = model_class.config_class.from_pretrained(checkpoint.folder)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype  # as from_pretrained does: nested models take it from here
    with torch.device("meta"):
        return make_from_config(model_class, config, dtype)
