"""Skeletons: built models without their weights, remembered on disk.

The libraries' building of models over mapped weights takes four fifths of an attach. A skeleton is
the pickle of what they built; in it each tensor is replaced by its shard and its name there. It
gives the same models in a tenth of that time, over any segments of the same shards (Stable
Diffusion 1.5: 0.03 s instead of 0.3 s; two cores of an AMD EPYC, 2026-11-20).

A skeleton skips the code that built the models. So a process of its own (`judging`) makes it: it
builds the same models in the ordinary way and from the skeleton, and compares the models, and what
either way left in the process. If they differ, the file says why, and the libraries go on building.
A load that finds other code or settings than the judge (`conditions`) builds in the ordinary way.

A skeleton is trusted like a `.pyc` file: it is not read if another user could have written it
(`Memo`). Nothing else protects from its content.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Iterable
from typing import Any, Self

import msgspec
import torch

from shmload._building.conditions import Conditions, changed_file, why_unmet
from shmload._building.draws import Draw, repeat, take_numbers
from shmload._building.effects import Message
from shmload._building.pickling import Files, Models, PickledModels, unpickle_models
from shmload._building.queued import Request
from shmload._checkpoints.identity import identify
from shmload._checkpoints.source import Checkpoint, Source
from shmload._host.memo import Memo, all_remembered
from shmload._loading.plan import ShardPlan
from shmload._wording import logger_of

logger = logger_of(__name__)

# Increment it when skeletons are written or read in another way.
_VERSION = 12
# Settings of the libraries that can change what they build.
_ENVIRONMENT = ("DIFFUSERS_", "TRANSFORMERS_")
_FOLDER = "skeletons"
_LIBRARIES = ("accelerate", "diffusers", "transformers", "torch")
_MAX_SKELETONS = 256
# An attempt that was not finished is made again after this many seconds.
_RETRY_S = 3600.0


class Skeleton(msgspec.Struct, frozen=True, kw_only=True):
    """The models of a pipeline without their weights, or why there are none."""

    source: str
    """As the user named it."""
    root: str
    """The source's directory."""
    class_name: str
    """Of the pipeline or model."""
    dtype: str
    """As it was asked for."""
    reason: str = ""
    """Why there are no models; empty if there are."""
    is_final: bool = True
    """Whether another attempt would come to the same end."""
    made_at: float = msgspec.field(default_factory=time.time)
    """In seconds since 1970."""
    models: PickledModels | None = None
    conditions: Conditions | None = None
    """What a load must find to use the models."""
    modules: tuple[str, ...] = ()
    """Python modules that building imports."""
    names: dict[str, tuple[str, ...]] = {}
    """Names that building fetches from modules that import them at their first use."""
    draws: tuple[Draw, ...] = ()
    """Random numbers that the libraries draw while they build the models."""
    hooks: int = 0
    """How many numbers of torch's hooks the build takes."""
    messages: tuple[Message, ...] = ()
    """What the libraries say each time while they build the models."""

    @classmethod
    def of(cls, request: Request, **content: Any) -> Self:
        """Return the skeleton of a load; the content is its other fields."""
        return cls(
            source=os.fspath(request.source.given),
            root=os.fspath(request.source.root),
            class_name=request.class_name,
            dtype=str(request.dtype),
            **content,
        )

    def build(self, files: Files) -> Models:
        """Build the models over some files.

        Args:
            files: the segments or shards; they stay the caller's. Their bytes may come later.

        Returns:
            The models by component. Their tensors lie in copy-on-write mappings of the files,
            which keep the segments' leases.

        Raises:
            Exception: whatever does not fit.
        """
        assert self.models is not None
        for name in self.modules:
            if name not in sys.modules:
                importlib.import_module(name)
        for home, names in self.names.items():
            for name in names:
                getattr(sys.modules.get(home), name, None)
        models = unpickle_models(self.models, files)
        take_numbers(models.values(), self.hooks)
        repeat(self.draws)
        return models

    def why_not(self) -> str | None:
        """Return why this process cannot use it; None if it can."""
        if self.models is None or self.conditions is None:
            return self.reason
        return why_unmet(self.conditions)

    @property
    def should_be_made_again(self) -> bool:
        """Whether another attempt may end otherwise.

        That is so if files of code have changed since, or if it was not finished.
        """
        if self.conditions is not None:
            return changed_file(self.conditions) is not None
        return not self.is_final and time.time() > self.made_at + _RETRY_S


def skeleton_key(
    source: Source,
    plans: Iterable[ShardPlan],
    torch_dtype: object,
    root: str,
    maker: tuple[str | None, bool],
) -> str | None:
    """Return the key of the skeleton of a pipeline's models.

    None if torch's default device is not the CPU, or if a library is an editable install.

    It is a digest of everything that the models may depend on, other than the code that runs in
    this process.

    Args:
        source: the pipeline or model.
        plans: of its shards.
        torch_dtype: as given to `load_pipeline`.
        root: the source's path as the models write it.
        maker: the name of the class that was asked for, None if none was; and whether the library
            gets a `Path`.
    """
    if torch.get_default_device().type != "cpu" or not all(map(_is_plain_install, _LIBRARIES)):
        return None
    facts = (
        _VERSION,
        # Two environments have the same code in other files, and one's conditions name its files.
        (sys.version, sys.prefix),
        # A model may compute tables, whose last bits depend on the processor's vector unit.
        (platform.machine(), torch.backends.cpu.get_cpu_capability()),
        sorted({name for folder in sys.path for name in _distributions(folder)}),
        sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)),
        str(torch.get_default_dtype()),
        repr(torch_dtype),
        (root, str(source.given), isinstance(source.given, str)),
        (source.class_name, maker),
        [(c.component, c.library, c.class_name, _files_of(c)) for c in source.checkpoints],
        [(s.component, identify(s.path, os.stat(s.path)).key, s.conversion) for s in plans],
    )
    return Memo(_FOLDER, Skeleton, facts).key


def skeleton_memo(key: str) -> Memo[Skeleton]:
    """Return what remembers a skeleton.

    Args:
        key: from `skeleton_key`.
    """
    return Memo.of_key(_FOLDER, Skeleton, key, most=_MAX_SKELETONS)


def skeletons_of(given: str) -> list[Skeleton]:
    """Return the remembered skeletons of a source, and the reasons why there are none.

    Args:
        given: the source as a user names it; a folder by any of its names.
    """
    wanted = _names(os.path.abspath(given)) | {given} if os.path.isdir(given) else {given}
    return [
        skeleton
        for skeleton in all_remembered(_FOLDER, Skeleton)
        if wanted & (_names(skeleton.source) | _names(skeleton.root))
    ]


def _names(source: str) -> set[str]:
    """Return a source's name, and the folder that it leads to. Relative ones lead elsewhere now."""
    return {source, os.path.realpath(source)} if os.path.isabs(source) else {source}


@functools.cache
def _is_plain_install(library: str) -> bool:
    """Tell whether a library's files are those of its version; False for an editable install."""
    found = importlib.util.find_spec(library)
    try:
        installed = importlib.metadata.distribution(library).locate_file(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    folder = os.path.dirname((found and found.origin) or "")
    return os.path.realpath(folder) == os.path.realpath(str(installed))


def _distributions(folder: str) -> list[str]:
    """Return name and version of the packages in a directory of `sys.path`."""
    try:
        return [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:
        return []


def _files_of(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return name and identity of each file in a component's directory: its configuration."""
    with os.scandir(checkpoint.folder) as entries:
        return sorted((e.name, identify(e.path, e.stat()).key) for e in entries if e.is_file())
