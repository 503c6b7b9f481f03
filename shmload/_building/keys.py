"""The keys of what is remembered: digests of all that a built object depends on."""

import copy
import dataclasses
import enum
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shmload import __version__
from shmload._building.maker import Maker
from shmload._building.options import (
    BYPASSING_KEYWORDS,
    CHOOSING_KEYWORDS,
    FINDING_KEYWORDS,
    QUANTISING_KEYWORDS,
    Options,
)
from shmload._checkpoints.formats.known import format_named
from shmload._checkpoints.library import LIBRARIES, default_dtype
from shmload._checkpoints.remote import mirrors_folder
from shmload._checkpoints.source import Source
from shmload._compat import is_in_mode
from shmload._host.files import files_below, fingerprint
from shmload._runtimes.kinds import may_have_accelerators
from shmload._segments.names import built_name
from shmload._settings import settings

# Increment it when objects are kept or restored in another way.
_VERSION = 1
_VARIABLES = ("ATEN_", "DIFFUSERS_", "TRANSFORMERS_")
_SEEN_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Arguments with which a single file is loaded.
_CONFIGS = ("config", "original_config")
# Methods of quantisers. No set: what a configuration names may have no hash.
_BY_GPU = ("fp8", "mxfp4")
# Plain values that have the library run other code, or return something else.
_MEANS_MORE = {
    "from_flax", "ignore_mismatched_sizes", "output_loading_info", "trust_remote_code",
}  # fmt: skip


class Key(NamedTuple):
    """Identifies what a load builds."""

    name: str
    """The name of its segment."""
    file: str
    """A file of its weights: the segment belongs to the model of that file."""
    read: tuple[Path, ...]
    """The directories and files that it is made from."""
    files: str
    """A digest of all files below."""

    def holds(self) -> bool:
        """Tell whether what it is made from is still the same."""
        return _files_of(self.read) == self.files


def key_of_load(
    cls: type | str | None,
    source: Source,
    maker: Maker,
    dtype: object,
    options: Options,
    kwargs: Mapping[str, Any],
) -> Key | None:
    """Return the key of what a load makes; None if an equal load might make something else.

    Args:
        cls: the class that was asked for, or its name; None for the source's own.
        source: what is loaded.
        maker: of it.
        dtype: as given.
        options: how it is loaded.
        kwargs: for `from_pretrained`.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    is_quantised = not QUANTISING_KEYWORDS.isdisjoint(given)
    # With links, files lie in no segment.
    is_asked = is_quantised or (settings().remember and not options.may_link)
    configs = [given[name] for name in _CONFIGS if name in given]
    quantised = [each.config.get("quantization_config") for each in source.checkpoints]
    # An adapter names its base model, whose files lie elsewhere.
    adapter = source.root / str(given.get("subfolder", "")) / "adapter_config.json"
    if (
        is_chosen_elsewhere(source.root, given)
        or not (is_asked and options.leaves_on_host)
        or not _is_of_library(cls)
        or adapter.exists()
        or any(map(_depends_on_gpu, (given.get("quantization_config"), *quantised)))
        or not all(_is_comparable(name, value) for name, value in given.items())
        or not all(isinstance(each, str | Path) and os.path.exists(each) for each in configs)
    ):
        return None
    facts = {
        "class": [type(maker).__name__, _name_of(cls), source.class_name],
        # Components that are left out are there as None.
        "components": [source.components, source.unread, sorted(kwargs)],
        "folders": sorted(source.folders),
        # The models note it.
        "given_as": [os.fspath(source.given), isinstance(source.given, str), maker.takes_path],
        "dtype": spelled(dtype),
        "given": given,
    }
    # An index may name shards outside of the source.
    read = (source.root, *source.shards, *map(Path, configs), *source.folders.values())
    if not source.is_pipeline:
        read += _folders_beside(source.root)
    try:
        return key_of(read, facts, next(iter(source.shards), None))
    except Incomparable:
        return None


def is_chosen_elsewhere(root: Path, given: Mapping[str, Any]) -> bool:
    """Tell whether diffusers chooses a configuration by a file's keys, in the hub."""
    return root.is_file() and given.get("config") is None


def _depends_on_gpu(quantised: object) -> bool:
    """Tell whether transformers makes floats of such weights where no GPU can compute with them.

    Args:
        quantised: the configuration of a quantiser.
    """
    values = quantised if isinstance(quantised, Mapping) else getattr(quantised, "__dict__", {})
    return values.get("quant_method") in _BY_GPU


def _folders_beside(folder: Path) -> tuple[Path, ...]:
    """Return the folders that `MultiControlNetModel` also reads, and the next, which is missing."""
    found = [Path(f"{folder}_1")]
    while found[-1].is_dir():
        found.append(Path(f"{folder}_{len(found) + 1}"))
    return tuple(found)


def own_quantisers(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with copies of the configurations, to which the library adds.

    The next call with one would seem to ask for something else.
    """
    return {
        name: copy.deepcopy(value) if name in QUANTISING_KEYWORDS else value
        for name, value in kwargs.items()
    }


def _is_of_library(cls: type | str | None) -> bool:
    """Tell whether a class is a library's: code of another one may run around a load."""
    module = cls.__module__ if isinstance(cls, type) else (cls or "").rpartition(".")[0]
    return not module or module.partition(".")[0] in LIBRARIES


def _name_of(cls: type | str | None) -> str | None:
    """Return the name by which a library has a class: by it or by itself it is the same."""
    if not isinstance(cls, type):
        return cls
    name, own = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
    public = getattr(sys.modules[cls.__module__.partition(".")[0]], name, None)
    return name if public is cls and name != "AutoModel" else own


def spelled(dtype: object) -> object:
    """Return a dtype as its name, also by component: both mean the same."""
    if isinstance(dtype, Mapping):
        return {name: spelled(each) for name, each in dtype.items()}
    return str(dtype).removeprefix("torch.")


def _is_comparable(name: str, value: object) -> bool:
    """Tell whether equal values of a keyword of `from_pretrained` mean the same to each load."""
    if name in QUANTISING_KEYWORDS or name in FINDING_KEYWORDS or name in _CONFIGS:
        return True
    if name in _MEANS_MORE.union(BYPASSING_KEYWORDS, CHOOSING_KEYWORDS):
        return False
    is_word = isinstance(value, str) and not ("/" in value or os.path.exists(value))
    return is_word or isinstance(value, bool | int | float)


def key_of(
    read: tuple[Path, ...], facts: Mapping[str, object], shard: Path | None = None
) -> Key | None:
    """Return the key of an object; None if in this process the libraries may make another one.

    Args:
        read: the directories and files that it is made from, its source first; all files below
            count.
        facts: what else counts.
        shard: a file of its weights; None for the first one of its source.

    Raises:
        Incomparable: a fact may mean more than it shows.
    """
    below = sorted((*read[0].glob("*"), *read[0].glob("*/*")))
    first = shard or next((each for each in below if format_named(each.name)), read[0])
    file = os.path.abspath(first)
    defaults = _defaults()
    if defaults is None or _lacks_weights() or not os.path.isfile(file):
        return None
    files = _files_of(read)
    known = {
        **facts,
        "version": [_VERSION, __version__],
        "files": files,
        "defaults": defaults,
        "python": [sys.version, sys.prefix, sys.flags.optimize, platform.machine()],
        # Without a GPU transformers makes other tensors of some quantised weights.
        "has_gpus": may_have_accelerators(),
        "hides_gpus": [os.environ.get(name) in ("", "-1") for name in _SEEN_GPUS],
        "packages": list(dict.fromkeys(n for folder in sys.path for n in _distributions(folder))),
        "variables": sorted(each for each in os.environ.items() if each[0].startswith(_VARIABLES)),
    }
    try:
        text = json.dumps(known, default=_plain, sort_keys=True)
    except (TypeError, ValueError) as exc:
        raise Incomparable(str(exc)) from exc
    return Key(built_name(_digest(text)), file, read, files)


def _files_of(read: tuple[Path, ...]) -> str:
    return _digest(repr([(os.path.realpath(each), stamps_of(each)) for each in read]))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape")).hexdigest()


class Incomparable(Exception):
    """Raised for a value that may mean more than it shows."""


def stamps_of(path: Path) -> Sequence[object]:
    """Return what changes with any change of a file, or of the files below a directory.

    Each load sets the times of files that point to objects in a bucket; a change replaces them.
    """
    files = files_below(path) if path.is_dir() else {str(path): fingerprint(path)}
    if mirrors_folder() in path.parents:
        return sorted(
            (name, found and (*found.place, found.nbytes)) for name, found in files.items()
        )
    return sorted(files.items())


def _defaults() -> list[str] | None:
    """Return torch's defaults, those of a new process if it is not imported; None under a mode."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "is_grad_enabled"):  # another thread imports it
        return [default_dtype(), "True"]
    if torch.is_inference_mode_enabled() or is_in_mode():  # a default device is such a mode
        return None
    return [default_dtype(), str(torch.is_grad_enabled())]


def _lacks_weights() -> bool:
    """Tell whether transformers reads only a part of the weights, for FSDP or DeepSpeed ZeRO-3."""
    deepspeed = sys.modules.get("transformers.integrations.deepspeed")
    if deepspeed is not None and deepspeed.is_deepspeed_zero3_enabled():
        return True
    asked = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    return asked.lower() not in ("", "0", "false")


def _distributions(folder: str) -> list[str]:
    """Return name, version and time of the packages that are installed in a directory."""
    try:
        with os.scandir(folder) as found:
            own = [each for each in found if each.name.endswith(".dist-info")]
            return sorted(f"{each.name} {each.stat().st_mtime_ns}" for each in own)
    except OSError:
        return []


def _plain(value: object) -> object:
    """Return the value as plain JSON; two results are equal only if the two values are.

    Raises:
        Incomparable: it may mean more than it shows.
    """
    if isinstance(value, type) and value.__module__ != "__main__":
        return f"{value.__module__}.{value.__qualname__}"
    torch = sys.modules.get("torch")
    if isinstance(value, Path) or (torch and isinstance(value, torch.dtype)):
        return repr(value)
    if isinstance(value, enum.Enum):
        return [type(value).__name__, value.name]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return dict(value)
    # A configuration of a quantiser; a model, or a function with arguments, shows less than it is.
    package = type(value).__module__.partition(".")[0]
    is_told = hasattr(value, "to_dict") or package in LIBRARIES or dataclasses.is_dataclass(value)
    if not is_told or package == "__main__" or (torch and isinstance(value, torch.nn.Module)):
        raise Incomparable(f"a {type(value).__name__}")
    return [f"{type(value).__module__}.{type(value).__qualname__}", vars(value)]
