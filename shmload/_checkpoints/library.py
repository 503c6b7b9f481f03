"""The one door from the core to the model libraries.

The core imports neither diffusers nor transformers nor torch: importing them takes 3 s. Some
questions need them. Modules of `_building` answer these, and are imported when the first is asked.
"""

import contextlib
import importlib
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any, Literal

from shmload._host.limits import chain_of
from shmload.errors import LibraryError, ShmloadError

# Those of the model libraries that are imported in parts, beside torch.
_PACKAGES = ("accelerate", "diffusers", "huggingface_hub", "safetensors", "transformers")
_HALF_THERE = re.compile(r"partially initialized module '([\w.]+)'")
"""In Python's words for a module whose import has begun and not ended."""


@contextlib.contextmanager
def whole_libraries() -> Iterator[None]:
    """Refuse to import or use a library whose import was cut short before, as by Ctrl-C.

    Python forgets a package whose import fails, and not the modules in it. Torch's extension cannot
    be loaded a second time: that raises odd errors, or ends the process. Of the other libraries
    some can be imported again, and some cannot: only the attempt tells.

    Raises:
        LibraryError: that was so before the block. Of a library beside torch only if the block
            failed, and Python says that it met a module of this library that is half there. Every
            other error stays as it is: a broken package leaves the same traces in `sys.modules`.
    """
    _require_whole_torch()
    cut = _cut_packages(_PACKAGES)
    try:
        yield
    except ShmloadError:
        raise
    except Exception as exc:
        # Around Python's error stands another one: transformers raises its own.
        said = " ".join(map(str, chain_of(exc)))
        for module in _HALF_THERE.findall(said):
            if package := cut.get(module.partition(".")[0]):
                raise _cut_short(package) from exc
        raise


def _cut_packages(packages: Collection[str]) -> dict[str, str]:
    """Return the libraries of which modules are here whose own package is not, with its name."""
    below = tuple(f"{package}." for package in packages)
    return {
        name.partition(".")[0]: parent
        for name in list(sys.modules)
        if name.startswith(below) and (parent := name.rpartition(".")[0]) not in sys.modules
    }


def _cut_short(package: str) -> LibraryError:
    return LibraryError(
        f"an import of {package} ended halfway in this process, by its own error or by Ctrl-C, and "
        "cannot be repeated; restart the process (in a notebook, the kernel)"
    )


def _require_whole_torch() -> None:
    for package in _cut_packages(("torch",)).values():
        raise _cut_short(package)


def library(module: Literal["makers", "module_trees", "rules"]) -> Any:
    """Import a module of `_building`, which answers with the help of the model libraries.

    Raises:
        LibraryError: as `whole_libraries`.
    """
    _require_whole_torch()
    return importlib.import_module(f"shmload._building.{module}")
