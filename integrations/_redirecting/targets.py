"""The classes whose `from_pretrained` is led through shared memory, by the modules they lie in."""

from types import ModuleType
from typing import Literal

METHOD = "from_pretrained"

Kind = Literal["pipeline", "diffusers model", "transformers model"]

# A name that ends with a star stands for all classes of the module whose names begin so.
_CLASSES: dict[str, tuple[Kind, str]] = {
    "diffusers.pipelines.pipeline_utils": ("pipeline", "DiffusionPipeline"),
    "diffusers.pipelines.auto_pipeline": ("pipeline", "AutoPipelineFor*"),
    "diffusers.models.modeling_utils": ("diffusers model", "ModelMixin"),
    "diffusers.models.auto_model": ("diffusers model", "AutoModel"),
    "transformers.modeling_utils": ("transformers model", "PreTrainedModel"),
    "transformers.models.auto.modeling_auto": ("transformers model", "AutoModel*"),
}

MODULES = tuple(_CLASSES)
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")
"""Packages whose code makes up the libraries' own `from_pretrained`."""


def classes_of(module: ModuleType) -> list[tuple[type, Kind]]:
    """Return the classes of a module that have a `from_pretrained` of their own to patch."""
    kind, pattern = _CLASSES[module.__name__]
    prefix = pattern.removesuffix("*")
    return [
        (found, kind)
        for name, found in sorted(vars(module).items())
        if (name.startswith(prefix) if pattern.endswith("*") else name == pattern)
        and isinstance(found, type)
        and found.__module__ == module.__name__
        and isinstance(vars(found).get(METHOD), classmethod)
    ]
