"""Proofs: what the judge has found out of a class, whatever the dtype and the checkpoint.

To look at all objects of a process, before and after, takes most of an examination. What it finds
depends on the code that runs. So it is done once for a class and its configuration, and the judge
notes which code ran. A build of another checkpoint or in another dtype that runs no other code is
compared in all else, and its look is limited to the modules whose code ran (`reach`).
"""

import hashlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shmload._building.conditions import SKIPPED, Conditions, Trace, why_unmet
from shmload._building.parts import modules
from shmload._building.skeletons import process_facts
from shmload._checkpoints.resolve import Source
from shmload._host.memo import Memo
from shmload._wording import logger_of

logger = logger_of(__name__)

_FOLDER = "proofs"
_VERSION = 1
# What they name differs in each checkpoint, and decides nothing.
_OF_THE_FILE = frozenset({"dtype", "torch_dtype", "transformers_version"})
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = ("site-packages", "dist-packages")


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What building a class uses, and that it leaves nothing that a skeleton cannot leave."""

    codes: frozenset[int]
    """Digests of the code that ran, other than the standard library's."""
    kinds: frozenset[str]
    """The classes of what was built."""
    reach: tuple[str, ...]
    """The modules whose code ran, as far as a change in them counts."""
    conditions: Conditions
    modules: tuple[str, ...]
    """As in `Skeleton`."""
    names: dict[str, tuple[str, ...]]
    """As in `Skeleton`."""
    reason: str = ""
    """What building leaves that a skeleton cannot; empty if there is nothing."""

    def lacks(self, trace: Trace, kinds: Iterable[type]) -> str:
        """Name code that a build has run, or a class that it has made, and this proof has not.

        Returns:
            Nothing if the proof covers the build.
        """
        places = _places_of(trace)
        found = [places[digest] for digest in places.keys() - self.codes]
        return min([*found, *(names_of(kinds) - self.kinds)], default="")


def codes_of(trace: Trace) -> frozenset[int]:
    """Return digests of the code that ran, other than the standard library's and shmload's."""
    return frozenset(_places_of(trace))


def _places_of(trace: Trace) -> dict[int, str]:
    homes = _homes()
    found = {}
    for code in trace.codes:
        file = code.co_filename
        if not _is_standard(file) and not _is_skipped(homes.get(file, "")):
            place = f"{file}:{code.co_firstlineno}:{code.co_qualname}"
            digest = hashlib.blake2b(place.encode(), digest_size=7).digest()
            found[int.from_bytes(digest)] = place
    return found


def names_of(kinds: Iterable[type]) -> frozenset[str]:
    """Return the names of classes."""
    return frozenset(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def reach_of(trace: Trace) -> tuple[str, ...]:
    """Return the modules whose code ran, other than the standard library's and shmload's.

    Nor torch's private ones: what changes in them counts as a memory (`is_memo`).
    """
    homes = _homes()
    files = {code.co_filename for code in trace.codes}
    found = {homes[file] for file in files if file in homes and not _is_standard(file)}
    return tuple(sorted(e for e in found if not (_is_skipped(e) or e.startswith("torch._"))))


def _homes() -> dict[str, str]:
    """Return the names of modules by their files."""
    files = ((vars(module).get("__file__"), name) for name, module in modules())
    return {file: name for file, name in files if isinstance(file, str)}


def modules_in(reach: Iterable[str]) -> dict[str, types.ModuleType]:
    """Return those modules that are imported."""
    return {name: sys.modules[name] for name in reach if name in sys.modules}


def recall_proof(memo: Memo[Proof]) -> Proof | None:
    """Return the proof of some classes; None if there is none that holds in this process."""
    found = memo.read(is_use=True)
    if found and (reason := why_unmet(found.conditions)):
        logger.info("a class is examined again: %s", reason)
        return None
    return found


def proof_memo(source: Source, maker: object) -> Memo[Proof]:
    """Return what remembers the proof of a pipeline's or model's classes and configurations.

    Args:
        source: as the maker takes it.
        maker: as for `skeleton_key`.
    """
    facts = (
        _VERSION,
        *process_facts(),
        (source.class_name, maker),
        [
            (each.component, each.library, each.class_name, _plain(each.config))
            for each in source.checkpoints
        ],
    )
    return Memo(_FOLDER, Proof, facts)


def _plain(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what a configuration says of its model, not of its file."""
    return sorted(
        (name, _plain(value) if isinstance(value, dict) else repr(value))
        for name, value in config.items()
        if not name.startswith("_") and name not in _OF_THE_FILE
    )


def _is_skipped(module: str) -> bool:
    return module.partition(".")[0] in SKIPPED


def _is_standard(file: str) -> bool:
    is_below = file.startswith(_STANDARD) and not any(each in file for each in _PACKAGES)
    return is_below or file.startswith("<frozen")
