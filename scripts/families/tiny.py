"""Makes tiny pipelines with the components of diffusers' own tests, without the hub."""

import importlib
from dataclasses import dataclass
from pathlib import Path

from families.stand_ins import replace_the_hub


@dataclass(frozen=True, slots=True)
class Candidate:
    """A class of pipelines, and the test that can make one."""

    family: str
    class_name: str
    module: str
    """The module of the test, below the checkout."""
    test: str


def save_tiny(candidate: Candidate, source: Path) -> None:
    """Make a tiny pipeline and save it; call it in a child, which it changes.

    Raises:
        ValueError: the pipeline has no weights.
        Exception: whatever a test raises that cannot make its components.
    """
    import diffusers
    import torch

    replace_the_hub(source.parent)
    test = getattr(importlib.import_module(candidate.module), candidate.test)()
    torch.manual_seed(0)
    components = test.get_dummy_components()
    pipe = getattr(diffusers, candidate.class_name)(**components)
    pipe.save_pretrained(source)
    if not list(source.glob("*/*.safetensors")):
        raise ValueError("it has no weights")
