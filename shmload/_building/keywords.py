"""The keywords of the libraries, and what is no keyword of anything: refused before a decode.

`from_pretrained` only warns about such a keyword and ignores it, so a mistyped dtype would give
float32. Taken are the arguments of `DiffusionPipeline.from_pretrained` in any supported version,
and those of the pipeline's constructor: components and flags. The constructor is asked only about
other names than `model_index.json` has, because importing diffusers takes 3 s.

In doubt a keyword is let through, and the library decides: a class may load in its own way.
"""

import contextlib
import enum
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import PosixPath
from types import NoneType
from typing import Any, NamedTuple

from shmload._checkpoints.indexes import read_json
from shmload._checkpoints.source import Source
from shmload._checkpoints.wanted import named_arguments
from shmload.errors import ShmloadError, UnknownArgument


class Effect(enum.Enum):
    """What a keyword changes, where shmload has to know it."""

    FINDS = enum.auto()
    """Which files are read: the models are those of the files."""
    QUANTISES = enum.auto()
    """The library quantises the weights, and makes new tensors of them."""
    BYPASSES = enum.auto()
    """The library reads other files, or makes new tensors of what it reads."""
    CHOOSES = enum.auto()
    """The base class of pipelines makes another class than the source's."""


class Keyword(NamedTuple):
    """One keyword of the libraries."""

    taken_by: str = ""
    """Who of diffusers reads or documents it: `from_pretrained` of pipelines (P) and of models (M),
    and `from_single_file` (F)."""
    effect: Effect | None = None
    neutral: tuple[object, ...] = ()
    """Values that change nothing: the default, and what the libraries' own functions pass, such as
    `transformers.pipeline`. `redirect` drops them; with other values the library loads."""
    passed: str = ""
    """To whom (P, M, F) `redirect` passes it on, because it means the same to shmload."""
    types: tuple[type, ...] = ()
    """Types that it may have then."""


_PATH = (str, PosixPath, NoneType)
_TEXT = (str, NoneType)
# Of diffusers 0.35 to 0.42, which a test compares with their source, and what is known of others.
KEYWORDS: dict[str, Keyword] = {
    "adapter_kwargs": Keyword("", neutral=(None,)),
    "cache_dir": Keyword("PMF", Effect.FINDS, passed="PMF", types=_PATH),
    "code_revision": Keyword("", neutral=(None,)),
    "config": Keyword("F", neutral=(None,), passed="F", types=_PATH),
    "config_revision": Keyword("F"),
    "custom_pipeline": Keyword("P", Effect.CHOOSES, neutral=(None,)),
    "custom_revision": Keyword("P", neutral=(None,)),
    "dduf_entries": Keyword("M"),
    "dduf_file": Keyword("P"),
    "device": Keyword("F"),
    "device_map": Keyword("PM", neutral=(None,)),
    "disable_mmap": Keyword("PMF", neutral=(False,)),
    "extract_ema": Keyword("F"),
    "flashpack_kwargs": Keyword("M"),
    "force_download": Keyword("PMF", Effect.FINDS, neutral=(False,)),
    "from_flax": Keyword("PM"),
    "gguf_file": Keyword("", Effect.BYPASSES),
    "ignore_mismatched_sizes": Keyword("M", neutral=(False,)),
    "image_size": Keyword("F"),
    "key_mapping": Keyword("", Effect.BYPASSES),
    "load_connected_pipeline": Keyword("P", Effect.CHOOSES, neutral=(False,)),
    "load_in_4bit": Keyword("", Effect.QUANTISES),
    "load_in_8bit": Keyword("", Effect.QUANTISES),
    "load_safety_checker": Keyword("F"),
    "local_dir": Keyword("M"),
    "local_dir_use_symlinks": Keyword("M"),
    "local_files_only": Keyword("PMF", Effect.FINDS, passed="PMF", types=(bool, NoneType)),
    "low_cpu_mem_usage": Keyword("PMF", neutral=(True,)),
    "max_memory": Keyword("PM", neutral=(None,)),
    "mirror": Keyword("PM"),
    "num_in_channels": Keyword("F"),
    "offload_folder": Keyword("PM", neutral=(None,)),
    "offload_state_dict": Keyword("PM", neutral=(None,)),
    "original_config": Keyword("F", passed="F", types=_PATH),
    "original_config_file": Keyword("F"),
    "output_loading_info": Keyword("PM", neutral=(False,), passed="M", types=(bool,)),
    "parallel_config": Keyword("M"),
    "prediction_type": Keyword("F"),
    "provider": Keyword("P"),
    "provider_options": Keyword("P"),
    "proxies": Keyword("PMF", neutral=(None,)),
    "quantization_config": Keyword("PMF", Effect.QUANTISES, neutral=(None,)),
    "revision": Keyword("PMF", Effect.FINDS, passed="PMF", types=_TEXT),
    "scaling_factor": Keyword("F"),
    "scheduler_type": Keyword("F"),
    "sess_options": Keyword("P"),
    "state_dict": Keyword("", Effect.BYPASSES),
    "subfolder": Keyword("MF", Effect.FINDS, neutral=("",), passed="MF", types=_TEXT),
    "token": Keyword("PMF", Effect.FINDS, passed="PMF", types=(str, bool, NoneType)),
    "trust_remote_code": Keyword("PM", neutral=(False, None)),
    "upcast_attention": Keyword("F"),
    "use_flashpack": Keyword("PM", Effect.BYPASSES, neutral=(False,)),
    "use_onnx": Keyword("P", Effect.BYPASSES, neutral=(None,)),
    "use_safetensors": Keyword("PM", Effect.FINDS),
    "user_agent": Keyword("M"),
    "variant": Keyword("PM", Effect.FINDS, passed="PMF", types=_TEXT),
    "weights_only": Keyword("", neutral=(True,)),
}


def _taken_by(kind: str) -> frozenset[str]:
    return frozenset(name for name, keyword in KEYWORDS.items() if kind in keyword.taken_by)


def _with(*effects: Effect) -> frozenset[str]:
    return frozenset(name for name, keyword in KEYWORDS.items() if keyword.effect in effects)


PIPELINE_KEYWORDS = _taken_by("P")
MODEL_KEYWORDS = _taken_by("M")
FILE_KEYWORDS = _taken_by("F")
FINDING_KEYWORDS = _with(Effect.FINDS)
QUANTISING_KEYWORDS = _with(Effect.QUANTISES)
BYPASSING_KEYWORDS = _with(Effect.QUANTISES, Effect.BYPASSES)
CHOOSING_KEYWORDS = _with(Effect.CHOOSES)
_REFUSED = re.compile(r"__init__\(\) got an unexpected keyword argument '(\w+)'")


def require_taken(
    kwargs: dict[str, Any],
    source: Source,
    function: Callable[..., Any],
    find_class: Callable[[Source], Any],
) -> None:
    """Refuse a keyword that neither shmload, the library nor the pipeline takes.

    Args:
        kwargs: what a function got beside the arguments in its signature.
        source: the pipeline.
        function: the function, for errors.
        find_class: returns the class to build from the source.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    listed = PIPELINE_KEYWORDS.union(source.components)
    if kwargs.keys() <= listed or any(map(kwargs.get, CHOOSING_KEYWORDS)):
        return
    listed = listed.union(read_json(source.root / "model_index.json"))
    unknown = kwargs.keys() - listed
    if not unknown:
        return
    chosen = find_class(source)
    from diffusers import DiffusionPipeline

    _require_listed(kwargs, listed, chosen, DiffusionPipeline.from_pretrained, function)


def require_taken_by_file(
    kwargs: Collection[str], function: Callable[..., Any], find_class: Callable[[], Any]
) -> None:
    """Refuse a keyword that neither `from_single_file` nor the constructor takes.

    The method is diffusers' own: classes that have it do not write another.

    Args:
        kwargs: what a function got beside the arguments in its signature.
        function: the function, for errors.
        find_class: returns the class.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    if not FILE_KEYWORDS.issuperset(kwargs):
        chosen = find_class()
        _require_listed(kwargs, FILE_KEYWORDS, chosen, chosen.from_single_file, function)


def require_taken_by_model(
    kwargs: dict[str, Any], function: Callable[..., Any], find_class: Callable[[], Any]
) -> None:
    """Refuse a keyword that neither shmload, diffusers nor a model of diffusers takes.

    Models of transformers refuse it themselves: see `explained_keywords`.

    Args:
        kwargs: what a function got beside the arguments in its signature.
        function: the function, for errors.
        find_class: returns the model's class: the one that is made, where it is known.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    if kwargs.keys() <= MODEL_KEYWORDS or kwargs.get("trust_remote_code"):
        return
    chosen = find_class()
    from diffusers import ModelMixin

    _require_listed(kwargs, MODEL_KEYWORDS, chosen, ModelMixin.from_pretrained, function)


@contextlib.contextmanager
def explained_keywords(
    kwargs: Collection[str], function: Callable[..., Any], class_name: str
) -> Iterator[None]:
    """Name the keyword that a model's constructor refuses, in place of Python's own error.

    Only the library can tell: it gives a keyword to the model's configuration or constructor.

    Args:
        kwargs: what the function got beside the arguments in its signature.
        function: the function, for errors.
        class_name: what the caller has called the class.

    Raises:
        UnknownArgument: with the nearest argument of the function.
    """
    try:
        yield
    except TypeError as exc:
        found = _REFUSED.search(str(exc))
        if isinstance(exc, ShmloadError) or found is None or found[1] not in kwargs:
            raise
        functions = [function.__qualname__, f"{class_name}.from_pretrained"]
        raise UnknownArgument(found[1], functions, named_arguments(function)) from None


def _require_listed(
    kwargs: Collection[str],
    listed: Collection[str],
    chosen: Any,
    method: Any,
    function: Callable[..., Any],
) -> None:
    """Refuse a keyword that is not listed and that the constructor of a class does not take.

    Args:
        kwargs: the keywords.
        listed: what the method takes.
        chosen: the class. One that loads by another method of this name may take anything.
        method: of diffusers, by which classes load.
        function: the function, for errors.

    Raises:
        UnknownArgument: with the nearest name that is taken.
    """
    own = getattr(chosen, method.__name__)
    if getattr(own, "__func__", None) is not method.__func__:
        return
    taken = _parameters_of(chosen)
    if taken is None:
        return
    for name in sorted(set(kwargs).difference(listed, taken)):
        known = {each for each in (*listed, *taken) if not each.startswith("_")}
        raise UnknownArgument(
            name,
            [function.__qualname__, f"{chosen.__name__}.{method.__name__}"],
            known | named_arguments(function),
        )


def _parameters_of(found: type) -> set[str] | None:
    """Return the names that a constructor takes; None if it may take any."""
    parameters = inspect.signature(found.__init__).parameters  # type: ignore[misc]
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return None
    return parameters.keys() - {"self"}
