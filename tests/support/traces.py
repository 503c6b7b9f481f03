"""Collects the messages of a load, and searches its result for paths of the view."""

import contextlib
import gc
import logging
import re
import types
import warnings

import torch

from shmload._building.homes import Homes
from shmload._host.shm import SHM_DIR

_LIBRARIES = ("diffusers", "transformers", "huggingface_hub", "accelerate")


class Messages(logging.Handler):
    """Collects log records and warnings of all libraries inside the block."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def texts(self):
        """The warnings. Infos are left out: deriving rules makes the libraries log some."""
        return [
            (record.name, record.getMessage())
            for record in self.records
            if record.levelno >= logging.WARNING
        ] + [str(warning.message) for warning in self.warned]

    def __enter__(self):
        # These log once per process, so the second of two equal loads would be silent.
        for name in ("info_once", "warning_once"):
            getattr(logging.Logger, name).cache_clear()
        self._stack = contextlib.ExitStack()
        self.warned = self._stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for name in (None, *_LIBRARIES):
            logger = logging.getLogger(name)
            level = logger.level
            self._stack.callback(logger.setLevel, level)
            self._stack.callback(logger.removeHandler, self)
            logger.addHandler(self)
            logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc_info):
        self._stack.close()


def naming(source, texts):
    """Return messages with a source's path in place of a view's, which the libraries have met."""
    view = re.compile(rf"{SHM_DIR}/shmload-\d+-view-[0-9a-f]+")
    return [
        tuple(view.sub(str(source), each) for each in text)
        if isinstance(text, tuple)
        else view.sub(str(source), text)
        for text in texts
    ]


# Mentions of a view -------------------------------------------------------------------------------


# Homes name segments, which begin as views do.
_SKIPPED = (type, types.ModuleType, types.FrameType, types.CodeType, types.TracebackType, Homes)


def strings_reachable_from(root):
    """Yield strings of all objects that the collector reaches, but those of `_SKIPPED`."""
    seen, waiting, found = set(), [root], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _SKIPPED):
            continue
        seen.add(id(item))
        if isinstance(item, str):
            found.add(item)
        elif isinstance(item, bytes):
            found.add(item.decode(errors="replace"))
        elif isinstance(item, types.FunctionType):
            # A function's globals are a module.
            cells = [
                cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()
            ]
            waiting += [item.__dict__, item.__defaults__, item.__kwdefaults__, *cells]
        else:
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                found.add(str(item.untyped_storage().filename))
            waiting += gc.get_referents(item)
    return found


def mentions_of_view(root):
    return sorted(text for text in strings_reachable_from(root) if "shmload-" in text)
