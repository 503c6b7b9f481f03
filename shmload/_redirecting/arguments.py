"""Reads the arguments of one `from_pretrained`, and finds those that only the library knows."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import PosixPath
from types import CodeType, NoneType
from typing import Any, NamedTuple

from shmload._building.keywords import BYPASSING_KEYWORDS
from shmload._checkpoints.wanted import named_arguments
from shmload._redirecting.patches import LIBRARIES, OF_FILES, OF_PIPELINES, Kind, layers
from shmload.integrations.diffusers import load_pipeline
from shmload.integrations.models import load_model

# What `transformers.pipeline` tells: its task, for the hub's statistics; in transformers 4 also the
# commit in which it found the configuration.
_HINTS = ("_from_pipeline", "_commit_hash")
_ATTENTIONS = ("eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
_TRANSFORMERS_DTYPES = ("auto", "bfloat16", "float16", "float32")
_DTYPES = ("dtype", "torch_dtype")
_PATH = (str, PosixPath, NoneType)
_TEXT = (str, NoneType)
_OF_ALL = {
    "cache_dir": _PATH,
    "local_files_only": (bool, NoneType),
    "revision": _TEXT,
    "token": (str, bool, NoneType),
    "variant": _TEXT,
}
_OF_A_FILE = {"config": _PATH, "original_config": _PATH, "subfolder": _TEXT}
_OF_A_MODEL = {"output_loading_info": (bool,), "subfolder": _TEXT}
# Values that change nothing: defaults, and what the libraries' own functions pass, such as
# `transformers.pipeline`. They are dropped; with other values the library loads.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            "adapter_kwargs",
            "code_revision",
            "config",
            "custom_pipeline",
            "custom_revision",
            "device_map",
            "max_memory",
            "offload_folder",
            "offload_state_dict",
            "proxies",
            "quantization_config",
            "use_onnx",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            "disable_mmap",
            "force_download",
            "ignore_mismatched_sizes",
            "load_connected_pipeline",
            "output_loading_info",
            "use_flashpack",
        ),
        (False,),
    ),
    "low_cpu_mem_usage": (True,),
    "subfolder": ("",),
    "trust_remote_code": (False, None),
    "weights_only": (True,),
}
# Arguments of shmload's functions, which mean nothing to the libraries.
_OWN = (named_arguments(load_pipeline) | named_arguments(load_model)).difference(
    _OF_ALL, _OF_A_MODEL, _NEUTRAL, _DTYPES
)
_THEIRS = _OWN.union(_NEUTRAL, BYPASSING_KEYWORDS)
# Components that the library's method names in its own text.
_COMPONENTS = ("safety_checker", "scheduler", "tokenizer")


class InDoubt(Exception):
    """Whether shmload would do as the library does is not known; str says why."""


class Call(NamedTuple):
    """One `from_pretrained`, as `load_pipeline` or `load_model` take it."""

    source: str | PosixPath
    dtype: Any
    kwargs: dict[str, Any]


def read_call(
    kind: Kind,
    known: Collection[str],
    path_argument: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Call:
    """Read the arguments of a call.

    Args:
        kind: what the class loads.
        known: the names that the library's code takes by itself; its version decides.
        path_argument: the name of the argument that says what to load.
        args: after the class.
        kwargs: stay as they are.

    Raises:
        InDoubt: an argument is left to the library.
    """
    left = {name: _resolved(value) for name, value in kwargs.items()}
    if args and path_argument not in left:
        left[path_argument] = args[0]
        args = args[1:]
    source = left.pop(path_argument, None)
    if args:
        raise InDoubt("it has more than one argument without a name")
    if type(source) not in (str, PosixPath) or str(source)[:1] in ("", "~"):
        raise InDoubt(f"it loads {source!r}")
    dtype = _read_dtype(kind, known, left)
    given = {name: value for name, value in left.items() if _is_passed(kind, known, name, value)}
    return Call(source, dtype, given)


def _is_passed(kind: Kind, known: Collection[str], name: str, value: object) -> bool:
    """Tell whether an argument goes to shmload; one with its default value need not.

    Raises:
        InDoubt: it is left to the library.
    """
    if name in known and any(value is neutral for neutral in _NEUTRAL.get(name, ())):
        return False
    of_kind = _OF_A_FILE if kind in OF_FILES else {} if kind in OF_PIPELINES else _OF_A_MODEL
    if name in known and (types := (_OF_ALL | of_kind).get(name)):
        if type(value) not in types or value == "":
            raise InDoubt(f"{name}={value!r}")
        return value is not None
    if name == "use_safetensors" and name in known:
        if value is None or value is True:
            return value is True
    elif name == "quantization_config" and name in known:
        if type(value).__module__.partition(".")[0] in LIBRARIES:
            return True
    elif kind == "transformers model" and name == "config" and name in known:
        if _is_plain_config(value):
            return True
    elif kind == "transformers model" and name in _HINTS and name in known:
        if value is None or type(value) is str:
            return False
    elif name == "attn_implementation" and kind == "transformers model":
        if type(value) is str and value in _ATTENTIONS:
            return True
    elif kind in OF_PIPELINES and (name in _COMPONENTS or name not in _THEIRS.union(known)):
        return True  # a component or an argument of the class
    raise InDoubt(f"{name}={_short(value)}")


def _resolved(value: Any) -> Any:
    """Return the commit that a revision of huggingface_hub's own type stands for, or the value."""
    is_hubs = type(value).__module__.partition(".")[0] == "huggingface_hub"
    return getattr(value, "resolved", value) if is_hubs and isinstance(value, str) else value


def _is_plain_config(value: object) -> bool:
    """Tell whether a configuration is of a class of transformers, and quantises nothing."""
    return (
        type(value).__module__.partition(".")[0] == "transformers"
        and hasattr(value, "model_type")
        and not getattr(value, "quantization_config", None)
        and not getattr(value, "auto_map", None)
    )


def _read_dtype(kind: Kind, known: Collection[str], left: dict[str, Any]) -> Any:
    """Take the dtype out of the arguments and return it.

    Raises:
        InDoubt: it is left to the library.
    """
    import torch  # which is imported, or there would be no class to call

    given = {name: left.pop(name) for name in _DTYPES if name in left}
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        return None
    (name, dtype), *others = named.items()
    is_dict = kind == "pipeline" and type(dtype) is dict
    is_name = kind == "transformers model" and type(dtype) is str
    values = list(dtype.values()) if is_dict else [dtype]
    is_plain = all(isinstance(each, torch.dtype) and each.is_floating_point for each in values)
    if (
        others
        or name not in known
        or not (is_plain or (is_name and dtype in _TRANSFORMERS_DTYPES))
        or (is_dict and not all(type(each) is str for each in dtype))
    ):
        raise InDoubt(", ".join(f"{name}={_short(value)}" for name, value in named.items()))
    return dtype


def names_known(*methods: Any) -> frozenset[str]:
    """Return the texts in the code of some methods of a library, and the names of arguments.

    An argument that a method takes out of its keywords is among the texts.
    """
    return frozenset(
        name
        for method in methods
        for layer in layers(method)
        if hasattr(layer, "__code__")
        for name in (*_texts(layer.__code__.co_consts), *_arguments(layer.__code__))
    )


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple):
            yield from _texts(each)


def _short(value: object) -> str:
    """Write a value in a few words: its repr may be that of a whole model."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:60]
    return f"<{type(value).__name__}>"
