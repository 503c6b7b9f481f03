"""The keywords of the libraries whose effect shmload has to know, and slips in its own.

All other keywords are the libraries' business: shmload passes them on.
"""

from collections.abc import Callable, Collection
from typing import Any

from shmload._checkpoints.wanted import named_arguments
from shmload._wording import nearest
from shmload.errors import ArgumentError

FINDING_KEYWORDS = frozenset(
    {
        "cache_dir",
        "force_download",
        "local_files_only",
        "revision",
        "subfolder",
        "token",
        "use_safetensors",
        "variant",
    }
)
"""Decide which files are read: the models are those of the files."""
QUANTISING_KEYWORDS = frozenset({"load_in_4bit", "load_in_8bit", "quantization_config"})
"""The library quantises the weights, and makes new tensors of them."""
BYPASSING_KEYWORDS = QUANTISING_KEYWORDS | {
    "gguf_file",
    "key_mapping",
    "state_dict",
    "use_flashpack",
    "use_onnx",
}
"""The library reads other files, or makes new tensors of what it reads."""
CHOOSING_KEYWORDS = frozenset({"custom_pipeline", "load_connected_pipeline"})
"""The base class of pipelines makes another class than the source's."""

# `kepp` is as near to `keep`. Of the libraries' keywords only `device` is, to `device_map`.
_NEAR = 0.75
_THEIRS = {"device"}


def require_no_slip(kwargs: Collection[str], function: Callable[..., Any]) -> None:
    """Refuse a keyword that is nearly one of a function's own.

    `from_pretrained` ignores what it does not know, with a warning at most: a mistyped dtype would
    give float32.

    Args:
        kwargs: the keywords that are meant for the library.
        function: the function that got them.

    Raises:
        ArgumentError: with the nearest name of the function's.
    """
    import difflib  # 2 ms, which a load without keywords does not pay

    own = named_arguments(function)
    for name in sorted(set(kwargs) - own - _THEIRS):
        if difflib.get_close_matches(name, own, 1, _NEAR):
            near = nearest(name, sorted(own))
            raise ArgumentError(f"{function.__qualname__} has no argument {name!r}{near}")
