"""The well-known pipelines that placements are compared on: their models, on the meta device.

sd15             stable-diffusion-v1-5/stable-diffusion-v1-5
sdxl             stabilityai/stable-diffusion-xl-base-1.0, its variant fp16
sd3              stabilityai/stable-diffusion-3-medium-diffusers
flux-dev         black-forest-labs/FLUX.1-dev
wan21-14b        Wan-AI/Wan2.1-T2V-14B-Diffusers
wan22-a14b       Wan-AI/Wan2.2-T2V-A14B-Diffusers
qwen-image       Qwen/Qwen-Image
hunyuan-video    hunyuanvideo-community/HunyuanVideo
ltx-video        Lightricks/LTX-Video, its first version

`published.toml` has the configurations. They are the ones that the models' authors publish on the
Hugging Face hub, reduced to what differs from the class's defaults. They are written from memory of
those files, not copied; a test compares each model with the published number of parameters.
"""

import importlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Model:
    """One model."""

    class_path: str
    """Its class, with the module that it is imported from."""
    parameters: int
    """Number of parameters of the published model, in millions."""
    config: dict[str, Any] = field(default_factory=dict)

    def make(self, **changes: Any) -> "torch.nn.Module":
        """Make the model on the meta device, with these changes of its configuration."""
        import torch

        module, _, name = self.class_path.rpartition(".")
        model_class = getattr(importlib.import_module(module), name)
        config = self.config | changes
        with torch.device("meta"):
            if hasattr(model_class, "config_class"):
                return model_class(model_class.config_class(**config))
            return model_class(**config)


def _read() -> dict[str, dict[str, Model]]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    models = {
        name: Model(table["class"], table["parameters"], table.get("config", {}))
        for name, table in tables["models"].items()
    }
    return {
        pipeline: {component: models[name] for component, name in components.items()}
        for pipeline, components in tables["pipelines"].items()
    }


PIPELINES = _read()
"""Models by component, by the names above."""
CLIP_WORDS = PIPELINES["sd15"]["text_encoder"].config["vocab_size"]
"""Entries of the vocabulary of CLIP's tokenizer."""
