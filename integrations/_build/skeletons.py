"""Skeletons: built models without their weights, remembered on disk.

Four fifths of an attach are the libraries' own building of models over mapped weights. A skeleton
is what they built, pickled, with each tensor replaced by the shard and the name that it has there;
from it the same models stand in a tenth of that time, over any segments of the same shards
(Stable Diffusion 1.5: 0.03 s and not 0.3 s; two cores of an AMD EPYC, 2026-11-20).

What is built from a skeleton is, attribute by attribute, what the libraries built in a process that
loaded the same pipeline with the same arguments. Where that is known to be doubtful there is none:
for models with weights that are in no shard, with classes of other packages or patched ones, that
draw random numbers, or of which the libraries have warned, since nobody would warn again. But code
that does not run leaves no effect, and not every effect can be known; so nobody gets a skeleton who
has not asked for it (`SHMLOAD_SKELETONS`).

A skeleton is trusted as a `.pyc` file is: it lies in a directory of the user's own, and is not read
if anybody else could have written it. Nothing else protects from what it may hold.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import stat
import sys
from pathlib import Path

import msgspec
import torch
import xxhash

from shmload._checkpoints.identity import identify
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._host.files import replacing
from shmload._loading.load import Load
from shmload._settings import settings
from shmload.integrations._build.pickling import (
    Files,
    Models,
    PickledModels,
    Unfit,
    pickle_models,
    unpickle_models,
)

logger = logging.getLogger(__name__)

# Raised whenever a skeleton is written or read differently than before.
_VERSION = 1
# Settings of the libraries that can change what they build.
_ENVIRONMENT = ("DIFFUSERS_", "TRANSFORMERS_")
_LIBRARIES = ("accelerate", "diffusers", "transformers", "torch")
_MAX_SKELETONS = 64
_DIGEST_NBYTES = 16


def skeleton_path(source: Source, load: Load, torch_dtype: object, root: str) -> Path | None:
    """Return where the skeleton of a pipeline's models is, or would be; None if it has none.

    Its name depends on everything that the models may.

    Args:
        source: the pipeline.
        load: of its shards.
        torch_dtype: as it was given.
        root: the source's path as the models spell it.
    """
    if torch.get_default_device().type != "cpu" or not all(map(_is_plain_install, _LIBRARIES)):
        return None
    facts = (
        _VERSION,
        sys.version,
        # Tables that a model computes depend on the processor's vector unit.
        (platform.machine(), torch.backends.cpu.get_cpu_capability()),
        sorted({name for folder in sys.path for name in _distributions(folder)}),
        sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)),
        str(torch.get_default_dtype()),
        repr(torch_dtype),
        root,
        source.class_name,
        [(c.component, c.library, c.class_name, _files_of(c)) for c in source.checkpoints],
        [(shard.component, shard.segment) for shard in load.holdings.plans],
    )
    name = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    return settings().cache_dir / "skeletons" / name


def load_skeleton(path: Path, files: Files) -> Models | None:
    """Build the models that are remembered, over some files, or return None.

    Args:
        path: from `skeleton_path`.
        files: stay the caller's; their weights need not be there yet.

    Returns:
        The models by component. Their tensors lie in copy-on-write mappings of the files, which
        keep the leases of segments.
    """
    try:
        content = _read(path)
    except OSError:
        return None
    try:
        encoded = content[_DIGEST_NBYTES:]
        if xxhash.xxh3_128_digest(encoded) != content[:_DIGEST_NBYTES]:
            raise Unfit("it is damaged")
        return unpickle_models(msgspec.msgpack.decode(encoded, type=PickledModels), files)
    except Exception as exc:  # whatever is wrong with it: the libraries build the models then
        # It stays, since it may fit other processes, until one of them writes it anew.
        # As text: whoever keeps log records must not keep the mappings in the traceback.
        logger.info("skeleton %s is of no use here: %s", path.name, str(exc))
        return None


def save_skeleton(path: Path, models: Models, files: Files) -> None:
    """Remember models that were just built from some files.

    Does nothing, beside a line in the log, where that is not possible.

    Args:
        path: from `skeleton_path`.
        models: by component.
        files: as for `load_skeleton`.
    """
    try:
        pickled = pickle_models(models, files)
        unpickle_models(pickled, files)  # what cannot be read is not worth keeping
        encoded = msgspec.msgpack.encode(pickled)
        _write(path, xxhash.xxh3_128_digest(encoded) + encoded)
    except Exception as exc:  # whatever a model may hold that cannot be pickled
        logger.info("no skeleton of %s: %s", ", ".join(models), str(exc))


@functools.cache
def _is_plain_install(library: str) -> bool:
    """Tell whether a library's files are those of its version: not so where it is editable."""
    found = importlib.util.find_spec(library)
    try:
        installed = importlib.metadata.distribution(library).locate_file(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    folder = os.path.dirname((found and found.origin) or "")
    return os.path.realpath(folder) == os.path.realpath(str(installed))


def _distributions(folder: str) -> list[str]:
    """Return name and version of what is installed in a directory of `sys.path`."""
    try:
        return [name for name in os.listdir(folder) if name.endswith(".dist-info")]
    except OSError:
        return []


def _files_of(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """Return name and identity of each file in a component's directory: its configuration."""
    with os.scandir(checkpoint.folder) as entries:
        return sorted((e.name, identify(e.path, e.stat()).key) for e in entries if e.is_file())


def _read(path: Path) -> bytes:
    """Read a file that nobody else can have written."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        for found in (os.fstat(fd), path.parent.stat()):
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(path)
        content = file.read()
        os.utime(fd)  # the least recently used go first
        return content


def _write(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing, and keep their number small."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, mode=0o600) as file:
        file.write(content)
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        oldest_first = sorted(path.parent.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
        for entry in oldest_first[:-_MAX_SKELETONS]:
            entry.unlink(missing_ok=True)
