"""The classes whose loading is led through shared memory, by the modules they lie in."""

from types import ModuleType
from typing import Literal

Kind = Literal[
    "pipeline", "diffusers model", "transformers model", "pipeline file", "diffusers model file"
]
OF_FILES: tuple[Kind, ...] = ("pipeline file", "diffusers model file")
OF_PIPELINES: tuple[Kind, ...] = ("pipeline", "pipeline file")

# A name that ends with a star stands for all classes of the module whose names begin so.
_CLASSES: dict[str, tuple[Kind, str]] = {
    "diffusers.pipelines.pipeline_utils": ("pipeline", "DiffusionPipeline"),
    "diffusers.pipelines.auto_pipeline": ("pipeline", "AutoPipelineFor*"),
    "diffusers.models.modeling_utils": ("diffusers model", "ModelMixin"),
    "diffusers.models.auto_model": ("diffusers model", "AutoModel"),
    "diffusers.loaders.single_file": ("pipeline file", "FromSingleFileMixin"),
    "diffusers.loaders.single_file_model": ("diffusers model file", "FromOriginalModelMixin"),
    "transformers.modeling_utils": ("transformers model", "PreTrainedModel"),
    "transformers.models.auto.modeling_auto": ("transformers model", "AutoModel*"),
}

MODULES = tuple(_CLASSES)
LIBRARIES = ("diffusers", "transformers", "huggingface_hub")
"""Packages whose code makes up the libraries' own methods."""


def method_of(kind: Kind) -> str:
    """Return the name of the method by which classes of a kind load."""
    return "from_single_file" if kind in OF_FILES else "from_pretrained"


def classes_of(module: ModuleType) -> list[tuple[type, Kind]]:
    """Return the classes of a module that have a method of their own to patch."""
    kind, pattern = _CLASSES[module.__name__]
    prefix = pattern.removesuffix("*")
    return [
        (found, kind)
        for name, found in sorted(vars(module).items())
        if (name.startswith(prefix) if pattern.endswith("*") else name == pattern)
        and isinstance(found, type)
        and found.__module__ == module.__name__
        and isinstance(vars(found).get(method_of(kind)), classmethod)
    ]
