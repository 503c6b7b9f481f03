"""Where the models of segments lie on disk, and what a person would call them.

.../models--ORG--NAME/snapshots/REVISION/unet/FILE   hub cache: ORG/NAME
.../stable-diffusion/unet/FILE                       a pipeline: its folder has model_index.json
.../clip/FILE                                        a component: its folder has config.json
.../lora.safetensors                                 a file alone
"""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from shmload._checkpoints.formats.known import has_known_suffix
from shmload._checkpoints.identity import Identity, identify

_IN_HUB_CACHE = re.compile(r"(?P<root>.*/models--(?P<id>[^/]+)/snapshots/(?P<revision>[^/]+))/.+")
_REVISION_NCHARS = 7  # as git shortens it

# `model-00001-of-00003.safetensors`: a file that is never a model alone.
_NUMBERED = re.compile(r".*-\d+-of-\d+\.\w+")

# What diffusers calls components, for files that are gone and whose pipeline is gone too.
_COMPONENT = re.compile(
    r"(unet|transformer|vae|vqvae|text_encoder|image_encoder|prior|decoder|safety_checker|"
    r"controlnet|motion_adapter|feature_extractor|vocoder|language_model|projection_model)(_\w+)?"
)


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The directory or file that a model is loaded from."""

    path: str
    hub_id: str = ""
    """Such as `org/name`; empty outside a hub cache."""
    revision: str = ""
    """The snapshot's commit; empty outside a hub cache."""

    def component_of(self, source: str) -> str:
        """Return the component that a shard belongs to; empty for a model that has none."""
        folder = os.path.dirname(source)
        inside = folder.removeprefix(self.path).strip(os.sep) if folder != self.path else ""
        return inside.partition(os.sep)[0] if source.startswith(self.path + os.sep) else ""

    def names(self) -> Iterator[str]:
        """Yield what it may be called, the shortest first; only the last is surely its own."""
        if self.hub_id:
            yield self.hub_id
            yield f"{self.hub_id}@{self.revision[:_REVISION_NCHARS]}"
        else:
            folders = self.path.strip(os.sep).split(os.sep)
            yield from (os.sep.join(folders[-n:]) for n in range(1, len(folders)))
        yield self.path


def find_roots(sources: Iterable[str]) -> dict[str, Root]:
    """Return the model that each shard belongs to, by the shard's path.

    Looks for the configurations beside the shards. Where they are gone, the names have to do.
    """
    found: dict[str, Root] = {}
    by_folder: dict[tuple[str, bool], str] = {}
    for source in sources:
        match = _IN_HUB_CACHE.fullmatch(source)
        if match:
            repository = match["id"].replace("--", "/")
            root = Root(path=match["root"], hub_id=repository, revision=match["revision"])
        else:
            folder = os.path.dirname(source)
            key = (folder, _NUMBERED.fullmatch(source) is not None)
            if key not in by_folder:
                by_folder[key] = _root_of_folder(*key)
            root = Root(path=by_folder[key] or source)
        found[source] = root
    return found


def _root_of_folder(folder: str, is_numbered: bool) -> str:
    """Return the directory of a model that has a shard in this folder; empty for a file alone."""
    above = os.path.dirname(folder)
    if os.path.exists(os.path.join(folder, "model_index.json")):
        return folder
    if os.path.exists(os.path.join(above, "model_index.json")):
        return above
    if os.path.exists(os.path.join(folder, "config.json")):
        return folder
    if not os.path.exists(folder) and _COMPONENT.fullmatch(os.path.basename(folder)):
        return above
    return folder if is_numbered else ""


def tell_apart(roots: Iterable[Root]) -> dict[str, str]:
    """Return a name for each model, by its path: the shortest ones that all differ."""
    waiting = {root.path: list(root.names()) for root in roots}
    while True:
        taken: dict[str, int] = {}
        for names in waiting.values():
            taken[names[0]] = taken.get(names[0], 0) + 1
        alike = [names for names in waiting.values() if taken[names[0]] > 1 and len(names) > 1]
        if not alike:
            return {path: names[0] for path, names in waiting.items()}
        for names in alike:
            del names[0]


def shards_below(root: Root) -> Mapping[str, str]:
    """Return the component of each file of weights that a model has now, by `Identity.key`.

    Copies of one file in a hub cache, and hard links, have one identity: so models that share a
    text encoder are found.
    """
    return {found.key: root.component_of(found.path) for found in weights_below(root.path)}


def weights_below(path: str) -> Iterator[Identity]:
    """Yield the identity of each file of weights in a directory and in its folders.

    Nothing for what is a file itself, or gone.
    """
    folders = [path]
    try:
        folders += [entry.path for entry in os.scandir(path) if entry.is_dir()]
    except OSError:
        return
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in filter(has_known_suffix, os.listdir(folder)):
                file = os.path.join(folder, name)
                yield identify(file, os.stat(file))
