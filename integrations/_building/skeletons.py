"""Skeletons: built models without their weights, remembered on disk.

The libraries' building of models over mapped weights takes four fifths of an attach. A skeleton is
the pickle of what they built; in it each tensor is replaced by its shard and its name there. It
gives the same models in a tenth of that time, over any segments of the same shards (Stable
Diffusion 1.5: 0.03 s instead of 0.3 s; two cores of an AMD EPYC, 2026-11-20).

Models from a skeleton equal, attribute by attribute, those that the libraries built in a process
that loaded the same pipeline with the same arguments. Models for which that is doubtful get no
skeleton: they have weights that are in no shard, or classes of other packages, or patched classes;
they draw random numbers; or the libraries warned about them, and a skeleton would not warn. But a
skeleton skips code, and not every effect of code can be known. So skeletons are off unless the
user turns them on (`SHMLOAD_SKELETONS`).

A skeleton is trusted like a `.pyc` file: it lies in a directory of the user, and is not read if
another user could have written it. Nothing else protects from its content.
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
from shmload.integrations._building.pickling import (
    Files,
    Models,
    PickledModels,
    Unfit,
    pickle_models,
    unpickle_models,
)

logger = logging.getLogger(__name__)

# Increment it when skeletons are written or read in another way.
_VERSION = 1
# Settings of the libraries that can change what they build.
_ENVIRONMENT = ("DIFFUSERS_", "TRANSFORMERS_")
_LIBRARIES = ("accelerate", "diffusers", "transformers", "torch")
_MAX_SKELETONS = 64
_DIGEST_NBYTES = 16


def skeleton_path(source: Source, load: Load, torch_dtype: object, root: str) -> Path | None:
    """Return the path of the skeleton of a pipeline's models.

    None if torch's default device is not the CPU, or if a library is an editable install.

    The file's name is a digest of everything that the models may depend on.

    Args:
        source: the pipeline.
        load: the load of its shards.
        torch_dtype: as given to `load_pipeline`.
        root: the source's path as the models write it.
    """
    if torch.get_default_device().type != "cpu" or not all(map(_is_plain_install, _LIBRARIES)):
        return None
    facts = (
        _VERSION,
        sys.version,
        # A model may compute tables, whose last bits depend on the processor's vector unit.
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
    """Build the models of a skeleton over some files; return None if that is not possible.

    Args:
        path: from `skeleton_path`.
        files: the segments or shards; they stay the caller's. Their bytes may come later.

    Returns:
        The models by component. Their tensors lie in copy-on-write mappings of the files, which
        keep the segments' leases.
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
    except Exception as exc:  # whatever is wrong: the libraries build the models then
        # The file stays until a process replaces it: it may fit other processes.
        # str(exc): a handler that keeps log records must not keep the traceback's mappings.
        logger.info("skeleton %s cannot be used: %s", path.name, str(exc))
        return None


def save_skeleton(path: Path, models: Models, files: Files) -> None:
    """Write the skeleton of models that were just built from some files.

    If that is not possible, it writes a line to the log and nothing else.

    Args:
        path: from `skeleton_path`.
        models: the models by component.
        files: as for `load_skeleton`.
    """
    try:
        pickled = pickle_models(models, files)
        unpickle_models(pickled, files)  # raises if the skeleton cannot be read
        encoded = msgspec.msgpack.encode(pickled)
        _write(path, xxhash.xxh3_128_digest(encoded) + encoded)
    except Exception as exc:  # a model may hold anything, and not everything can be pickled
        logger.info("no skeleton of %s: %s", ", ".join(models), str(exc))


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


def _read(path: Path) -> bytes:
    """Read a file.

    Raises:
        PermissionError: another user could have written it.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        for found in (os.fstat(fd), path.parent.stat()):
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(path)
        content = file.read()
        os.utime(fd)  # the least recently used skeletons are removed first
        return content


def _write(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing; remove the oldest of too many."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, mode=0o600) as file:
        file.write(content)
    with contextlib.suppress(FileNotFoundError):  # another process does the same
        oldest_first = sorted(path.parent.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
        for entry in oldest_first[:-_MAX_SKELETONS]:
            entry.unlink(missing_ok=True)
