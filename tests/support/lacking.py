"""What the oldest supported diffusers lacks: offloading calls."""

import diffusers
import pytest

_NO_GROUPS = "its pipelines have no enable_group_offload"
_OF_0_35 = {
    "blocks": _NO_GROUPS,
    "leaves": _NO_GROUPS,
    "streams-leaves": _NO_GROUPS,
    "streams-little-leaves": _NO_GROUPS,
    "manager": "its ComponentsManager asks CUDA for the free memory",
}


def skip_what_is_lacking(call):
    """Skip a test of a call, such as one of `offloading.CALLS`, that diffusers 0.35 lacks."""
    if diffusers.__version__.startswith("0.35.") and call in _OF_0_35:
        pytest.skip(f"diffusers 0.35: {_OF_0_35[call]}")
