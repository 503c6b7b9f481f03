"""Which offloading calls the installed diffusers lacks."""

import diffusers
import pytest

_OF_0_35 = {
    "blocks": "its pipelines have no enable_group_offload",
    "leaves": "its pipelines have no enable_group_offload",
    "manager": "its ComponentsManager asks CUDA for the free memory",
}


def skip_what_is_lacking(call):
    """Skip a test of a call, one of `offloading.CALLS`, that diffusers 0.35 does not offer."""
    if diffusers.__version__.startswith("0.35.") and call in _OF_0_35:
        pytest.skip(f"diffusers 0.35: {_OF_0_35[call]}")
