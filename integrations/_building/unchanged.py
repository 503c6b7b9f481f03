"""Whether what a pipeline was built of and by is still the same: files, code, settings.

It compares; it reads no file and runs no code of a library.
"""

import os
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

import torch

_LIBRARIES = {"accelerate", "diffusers", "huggingface_hub", "safetensors", "transformers"}
_VARIABLES = ("DIFFUSERS_", "HF_", "SHMLOAD_", "TRANSFORMERS_")


class Facts:
    """What a build depends on, as it was at one moment.

    Args:
        folder: of the source.
        built: the modules that were built; their classes count.
    """

    def __init__(self, folder: str, built: list[torch.nn.Module]) -> None:
        self._folder = folder
        self._files = files_below(folder)
        self._settings = settings_now()
        self._code = [(owner, _code_in(owner)) for owner in _owners(built)]

    def why_changed(self) -> str | None:
        """Return what is not the same any more; None if all is."""
        if files_below(self._folder) != self._files:
            return f"a file in {self._folder} has changed"
        if settings_now() != self._settings:
            return "a setting of torch, or a variable, has changed"
        for owner, code in self._code:
            now = vars(owner)
            for name, value in code.items():
                if now.get(name) is not value:
                    return f"{owner.__name__}.{name} was replaced"
        return None


def files_below(folder: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return each file below a directory with what changes when it is written or replaced."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            stat = os.stat(path)
            found.append(
                (path, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
            )
    return found


def settings_now() -> tuple[object, ...]:
    """Return the settings of this process that a build may depend on."""
    return (
        sorted(pair for pair in os.environ.items() if pair[0].startswith(_VARIABLES)),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        sys.getrecursionlimit(),
    )


def _owners(built: list[torch.nn.Module]) -> Iterator[ModuleType | type]:
    """Yield the modules of the libraries, and the classes of what was built."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES and isinstance(module, ModuleType):
            yield module
    kinds = {base for each in built for module in each.modules() for base in type(module).__mro__}
    yield from kinds - {object}


def _code_in(owner: ModuleType | type) -> dict[str, object]:
    """Return the functions and classes of a module or class."""
    kinds = (FunctionType, type, classmethod, staticmethod, property)
    kept = vars(owner).get("_class_to_module", ())  # a lazy package gives these again when asked
    return {
        name: value
        for name, value in list(vars(owner).items())
        if isinstance(value, kinds) and name not in kept
    }
