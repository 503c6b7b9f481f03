"""Which files a load needs of a repository on the hub: decided from names alone."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shmload._checkpoints.formats.known import is_of_weights
from shmload._checkpoints.formats.safetensors import SAFETENSORS

# What models of both libraries are called, and adapters that transformers loads by itself.
_MODELS = ("diffusion_pytorch_model", "pytorch_model", "model", "adapter_model")
_PICKLED = (".bin",)
_SMALL = (".json", ".txt", ".model", ".jinja")
# With these the library reads files of other kinds.
_OTHER_FILES = ("from_flax", "from_tf", "use_flashpack", "use_onnx")
# As in `model.fp16.safetensors`, with a shard's number on either side of the variant.
_OF_VARIANT = re.compile(r"[^.]+\.([A-Za-z]\w*)(?:-\d+-of-\d+)?\.\w+")


def files_of_model(
    names: Collection[str],
    *,
    subfolder: str = "",
    variant: str | None = None,
    weight_names: Collection[str] = (),
    kwargs: Mapping[str, Any],
) -> list[str]:
    """Return the files that one model, or an adapter, is made of.

    Args:
        names: all files of the repository.
        subfolder: the model's folder.
        variant: as for `from_pretrained`.
        weight_names: the files of weights; empty for those that the library would choose.
        kwargs: other arguments of `from_pretrained`.

    Returns:
        The files of weights, in the format that the library prefers, and the small files that may
        belong to them: configurations, code, tokenizers.
    """
    folder = subfolder.strip("/")
    inside = {os.path.basename(name): name for name in names if os.path.dirname(name) == folder}
    weights = [name for name in sorted(inside) if is_of_weights(name)]
    chosen = list(weight_names) or _chosen_weights(weights, variant, kwargs)
    small = [name for name in inside if name.endswith(_SMALL)]
    # The root has a pipeline's index; code may import other code of its repository.
    shared = (n for n in names if n.endswith(".py") or (n.endswith(".json") and "/" not in n))
    return sorted({*(inside[name] for name in (*chosen, *small) if name in inside), *shared})


def _chosen_weights(
    names: Collection[str], variant: str | None, kwargs: Mapping[str, Any]
) -> list[str]:
    """Return the files of weights in a folder that the library would load; all in doubt."""
    if any(map(kwargs.get, _OTHER_FILES)):
        return list(names)
    if kwargs.get("gguf_file"):
        return [kwargs["gguf_file"]]
    for is_preferred in _formats(kwargs.get("use_safetensors")):
        known = [name for name in names if is_preferred(name)]
        models = [name for name in known if name.startswith(_MODELS)]
        # Of adapters, which have names of any kind, the user chooses.
        if chosen := [name for name in models if variant_in(name) == variant] if models else known:
            return chosen
    return [] if variant or kwargs.get("use_safetensors") is not None else list(names)


def variant_in(name: str) -> str | None:
    """Return the variant that the name of a file of weights has, whatever its format; or None."""
    match = _OF_VARIANT.fullmatch(name)
    return match[1] if match else None


def are_in_format(folders: Iterable[Path], use_safetensors: bool | None) -> bool:
    """Tell whether each folder with weights has some in the format that was asked for.

    Args:
        folders: of models; one may be missing.
        use_safetensors: as for `from_pretrained`; None for any format.
    """
    if use_safetensors is None:
        return True
    is_wanted = _formats(use_safetensors)[0]
    listed = (os.listdir(folder) for folder in folders if os.path.isdir(folder))
    weights = ([name for name in names if is_of_weights(name)] for names in listed)
    return all(any(map(is_wanted, names)) for names in weights if names)


def _formats(use_safetensors: bool | None) -> Any:
    """Return tests of names, for the format that the library looks for first and for others."""
    both = (lambda name: name.endswith(SAFETENSORS.suffixes), lambda name: name.endswith(_PICKLED))
    return both if use_safetensors is None else both[:1] if use_safetensors else both[1:]
