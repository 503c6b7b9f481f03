"""A download from the hub while it lasts: which weights are there, and sure to be loaded."""

import os
from pathlib import Path

import msgspec

from shmload._checkpoints.indexes import listed_components, named_shards, read_json
from shmload._checkpoints.own_dtypes import names_auto
from shmload._checkpoints.quantised import have_scales
from shmload._checkpoints.resolve import Checkpoint, Source, describe_folder
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.weights import (
    Choice,
    choose,
    chosen_name,
    is_in_doubt,
    lacks_variant,
    why_file_is_unread,
)

_INDEX = "model_index.json"
# The files that come before the library has imported the pipeline's class are smaller, in bytes.
_LARGE_NBYTES = 1 << 20


class Incoming(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a repository on their way into the hub cache.

    Guarantee: the weights that it shows are complete, and are those that a load reads. It shows
    none that another file of the repository would take the place of.
    """

    wanted: Wanted
    names: frozenset[str]
    """All files of the repository; the download brings some of them."""
    snapshot: Path
    """The directory in the hub cache where they get their names, once they are complete."""
    is_pipeline: bool
    passed: frozenset[str]
    """Components that the caller passes: they are not loaded."""
    use_safetensors: bool | None
    """As for `from_pretrained`."""
    before: frozenset[str]
    """What `parts_there` returned before the download."""

    def there(self) -> frozenset[str]:
        """Return what there is by now, as `parts_there`."""
        return parts_there(self.snapshot, self.names)

    def has_begun(self, there: frozenset[str]) -> bool:
        """Tell whether the library brings weights.

        Before that it imports the pipeline's class. Another thread must not import classes then: of
        two imports that need each other, Python lets one see half a module.

        Args:
            there: what there is.
        """
        new = there - self.before
        return not self.is_pipeline or any(not name.endswith((_INDEX, ".py")) for name in new)

    def source(self) -> Source | None:
        """Return the source with the weights that are there; None if there are none yet.

        A checkpoint has only those of its shards that are there.

        Raises:
            IndexMalformed: an index cannot be read, or names a file outside its directory.
        """
        if not self.is_pipeline:
            subfolder = (self.wanted.hub.subfolder or "").strip("/")
            return self._source("", (), [self._checkpoint(subfolder, "", None)])
        if not self._is_there(_INDEX):
            return None
        index = read_json(self.snapshot / _INDEX)
        listed = dict(listed_components(index))
        only = self.wanted.components
        found = [
            self._checkpoint(name, name, described)
            for name, described in listed.items()
            if described[0] and name not in self.passed and (only is None or name in only)
        ]
        class_name = index.get("_class_name")
        return self._source(class_name if isinstance(class_name, str) else "", tuple(listed), found)

    def _source(
        self, class_name: str, components: tuple[str, ...], found: list[Checkpoint | None]
    ) -> Source | None:
        checkpoints = tuple(each for each in found if each)
        if not checkpoints:
            return None
        return Source(
            given=self.wanted.source,
            root=self.snapshot,
            class_name=class_name,
            components=components,
            checkpoints=checkpoints,
            variant=self.wanted.variant,
        )

    def _checkpoint(
        self, subfolder: str, component: str, described: tuple[str, str] | None
    ) -> Checkpoint | None:
        """Return a model with the shards that are there; None if its load is not certain yet.

        Args:
            subfolder: its folder in the repository.
            component: its name in the pipeline, or empty.
            described: its library and class, if the pipeline's index names them.
        """
        names = {os.path.basename(n) for n in self.names if os.path.dirname(n) == subfolder}
        folder = self.snapshot / subfolder
        if "config.json" in names and not self._is_there(f"{subfolder}/config.json"):
            return None
        library, class_name, config = describe_folder(folder)
        library, class_name = described or (library, class_name)
        choice = choose(self.wanted.variant, self.use_safetensors)
        shards = self._shards_there(subfolder, names, library, choice)
        if not shards:
            return None
        return Checkpoint(
            component=component,
            folder=folder,
            library=library,
            class_name=class_name,
            config=config,
            shards=shards,
        )

    def _shards_there(
        self, subfolder: str, names: set[str], library: str, choice: Choice
    ) -> tuple[Path, ...]:
        """Return the shards of a folder that are there and certain to be loaded."""
        # Without the variant a folder's plain files are loaded, but only if another folder has it.
        chosen = None if lacks_variant(names, choice) else chosen_name(names, library, choice)
        if chosen is None or not self._is_there(f"{subfolder}/{chosen}"):
            return ()
        path = self.snapshot / subfolder / chosen
        is_index = chosen.endswith(".json")
        shards = named_shards(path) if is_index else (path,)
        there = tuple(
            each for each in shards if self._is_there(str(each.relative_to(self.snapshot)))
        )
        # All of them tell what `auto` means, whether shmload reads files of some formats, and
        # whether a weight has scales, with which it is not cast.
        needs_all = (
            names_auto(self.wanted.dtype)
            or any(map(is_in_doubt, shards))
            or (is_index and have_scales(read_json(path)["weight_map"]))
        )
        if (needs_all and there != shards) or any(map(why_file_is_unread, there)):
            return ()
        return there

    def _is_there(self, name: str) -> bool:
        return _is_complete(self.snapshot, name.removeprefix("/"))


def parts_there(snapshot: Path, names: frozenset[str]) -> frozenset[str]:
    """Return what there is of a repository: names of its complete files, and of large parts.

    Args:
        snapshot: the repository's directory in the hub cache.
        names: of its files.
    """
    complete = {name for name in names if _is_complete(snapshot, name)}
    blobs = snapshot.parent.parent / "blobs"
    parts = {path.name for path in blobs.glob("*.incomplete") if _is_large(path)}
    return frozenset(complete | parts)


def _is_complete(snapshot: Path, name: str) -> bool:
    """Tell whether a file is complete: a name in the cache is a link, made last.

    On a file system without links it may be a copy in the making, and does not count.
    """
    return os.path.islink(snapshot / name) and os.path.exists(snapshot / name)


def _is_large(path: Path) -> bool:
    try:
        return path.stat().st_size > _LARGE_NBYTES
    except FileNotFoundError:  # complete by now
        return False
