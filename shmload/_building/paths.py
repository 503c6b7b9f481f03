"""Keeps the path of a view out of everything that outlives it: objects, messages, errors.

A pipeline is built from a view, but it, its log records and its errors must speak of the source.
"""

import contextlib
import logging
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmload._segments.messages import message_of, repair_errors, repaired_messages, rewrite

_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# The loggers whose messages a second build would repeat.
_LIBRARIES = ("diffusers", "transformers", "accelerate", "py.warnings")
_VOCABULARY_COUNT = 10_000


class PathRepair:
    """Replaces paths below a view by those of the source.

    Args:
        view: the view's directory.
        root: the path of the source's directory, as the libraries would write it.
        given: the source as the user named it; replaces the view's directory itself.
        said: what earlier builds of the same pipeline logged; this build does not repeat it, and
            adds what it logs.
        unsaid: log messages that begin so are hidden.
    """

    def __init__(
        self,
        view: Path,
        root: str,
        given: str | os.PathLike[str],
        said: set[tuple[str, int, str]],
        unsaid: tuple[str, ...] = (),
    ) -> None:
        import torch

        self._leaves = (*_LEAVES, *_CODE, torch.Tensor)
        # Attributes of every module, which never hold a path and would take most of the time.
        self._internals = frozenset(vars(torch.nn.Module())) - {"_modules"}
        self._view = str(view)
        self._root = root
        self._given = given
        self._said = said
        self._saying: set[tuple[str, int, str]] = set()
        self._unsaid = unsaid

    def text(self, text: str) -> str:
        """Repair a text that mentions paths."""
        below = text.replace(f"{self._view}/", f"{self._root.rstrip('/')}/")
        return below.replace(self._view, os.fspath(self._given))

    def repair(self, pipe: object) -> None:
        """Repair every string reachable from a pipeline through attributes and containers.

        Args:
            pipe: where to begin; for a tuple, in each of its items.
        """
        seen: set[int] = set()
        waiting = list(pipe) if isinstance(pipe, tuple) else [pipe]
        while waiting:
            container = waiting.pop()
            if id(container) in seen:
                continue
            seen.add(id(container))
            if isinstance(container, dict):
                self._repair_dict(container, waiting)
            elif isinstance(container, list):
                for place, value in enumerate(container):
                    repaired = self._repaired(value, waiting)
                    if repaired is not value:
                        container[place] = repaired
            attributes = getattr(container, "__dict__", None)
            if isinstance(attributes, dict):
                waiting.append(attributes)

    def _repair_dict(self, container: dict[Any, Any], waiting: list[Any]) -> None:
        is_module = "_parameters" in container and "_modules" in container
        for key, value in list(container.items()):
            if is_module and key in self._internals:
                continue
            repaired = self._repaired(value, waiting)
            if repaired is not value:
                # Not container[key] = ...: diffusers' FrozenDict forbids that.
                dict.__setitem__(container, key, repaired)

    def _repaired(self, value: Any, waiting: list[Any]) -> Any:
        """Return a value with its paths replaced; queue it if others may hang from it."""
        if isinstance(value, str):
            if self._view not in value:
                return value
            return self._given if value == self._view else self.text(value)
        if isinstance(value, Path):
            return Path(self.text(str(value))) if self._view in str(value) else value
        if isinstance(value, tuple) and type(value) is tuple:
            repaired = tuple(self._repaired(item, waiting) for item in value)
            return value if all(a is b for a, b in zip(value, repaired, strict=True)) else repaired
        # Empty dicts of hooks, and vocabularies, would take most of the time.
        is_worth_it = not isinstance(value, (dict, list)) or 0 < len(value) < _VOCABULARY_COUNT
        if is_worth_it and not isinstance(value, self._leaves):
            waiting.append(value)
        return value

    @contextlib.contextmanager
    def in_messages(self) -> Iterator[None]:
        """Repair paths in log records and warnings of all threads, and in the block's error.

        Hides log records that are in `said` or `unsaid`, and adds to it what was logged.
        """
        try:
            with repaired_messages(self):
                yield
        except Exception as exc:
            repair_errors(exc, self.text)
            raise
        finally:
            self._said |= self._saying

    def repair_warning(self, filename: str, text: str) -> str:
        """Return the repaired text of a warning, and note it."""
        repaired = self.text(text)
        self._saying.add((filename, logging.WARNING, repaired))
        return repaired

    def repair_record(self, record: logging.LogRecord) -> None:
        """Repair a log record's message; hide one that was said before from all handlers."""
        message = self.text(message_of(record))
        if not message:
            return
        if record.name.startswith(_LIBRARIES):
            key = (record.name, record.levelno, message)
            if key in self._said or message.startswith(self._unsaid):
                record.levelno = -1  # below the level of any handler
            self._saying.add(key)
        rewrite(record, message)
