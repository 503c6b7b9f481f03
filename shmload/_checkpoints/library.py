"""The one door from the core to the model libraries.

The core imports neither diffusers nor transformers nor torch: importing them takes 3 s. Some
questions need them. Modules of `_building` answer these, and are imported when the first is asked.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

from shmload.errors import LibraryError


@contextlib.contextmanager
def whole_libraries() -> Iterator[None]:
    """Refuse to import or use a library whose import was cut short before, as by Ctrl-C.

    Python forgets a package whose import fails, and not the modules in it. Torch's extension cannot
    be loaded a second time: that raises odd errors, or ends the process.

    Raises:
        LibraryError: that was so before the block.
    """
    _require_whole_torch()
    yield


def _require_whole_torch() -> None:
    for name in list(sys.modules):
        parent = name.rpartition(".")[0]
        if name.startswith("torch.") and parent not in sys.modules:
            raise LibraryError(
                f"an import of {parent} ended halfway in this process, by its own error or by "
                "Ctrl-C, and cannot be repeated; restart the process (in a notebook, the kernel)"
            )


def library(module: Literal["makers", "module_trees", "rules"]) -> Any:
    """Import a module of `_building`, which answers with the help of the model libraries.

    Raises:
        LibraryError: as `whole_libraries`.
    """
    _require_whole_torch()
    return importlib.import_module(f"shmload._building.{module}")
