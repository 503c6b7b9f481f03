"""The loggers that imports have made: a program finds them once it has imported the same.

A logger that the program asks for earlier is the one that the library has, as new: what the import
has set on it comes with the import.
"""

import sys
from collections.abc import Iterable
from typing import Any

ROOT = ""
"""Stands for the root logger among the names."""


class Loggers:
    """Hides the loggers that there are; make it when all modules are imported."""

    def __init__(self) -> None:
        self._logging: Any = sys.modules.get("logging")
        self._hidden: dict[str, Any] = {}
        self._settings: dict[str, dict[str, Any]] = {}
        """What imports have set on them, where that differs from a new one."""
        self._streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}

    def hide(self) -> None:
        """Hide all, and have each be as new; call it again when there are more."""
        if not hasattr(self._logging, "root"):
            return
        root = self._logging.root
        shown = dict(root.manager.loggerDict)
        self._hidden |= shown
        self._renew(ROOT, root, self._logging.WARNING)
        for name, logger in shown.items():
            if isinstance(logger, self._logging.Logger):
                self._renew(name, logger, self._logging.NOTSET)
        root.manager.loggerDict = _Shown(self)
        root.manager._clear_cache()

    def show_all(self) -> None:
        """Show all, with what imports have set on them."""
        if hasattr(self._logging, "root"):
            self.show([ROOT, *self._hidden])

    def show(self, names: Iterable[str]) -> None:
        """Show loggers, with what imports have set on them."""
        root: Any = None
        for name in names:
            self.show_new(name)
            settings = self._settings.pop(name, None)
            if settings:
                self._lead(settings.get("handlers", ()))
                root = self._logging.root
                _set(root if name == ROOT else root.manager.loggerDict[name], settings)
        if root:  # a level may be another now
            root.manager._clear_cache()

    def _lead(self, handlers: Iterable[Any]) -> None:
        """Let handlers write where the program has led a standard stream before its imports."""
        for handler in handlers:
            for name, own in self._streams.items():
                if vars(handler).get("stream") is own and getattr(sys, name) is not own:
                    handler.stream = getattr(sys, name)

    def show_new(self, name: object) -> None:
        """Show a logger as a new one, if it is hidden."""
        logger = self._hidden.get(name)  # type: ignore[call-overload]
        if logger is not None:
            # In this order: another thread finds it in one of the two.
            dict.setdefault(self._logging.root.manager.loggerDict, name, logger)
            self._hidden.pop(name, None)  # type: ignore[call-overload]

    def _renew(self, name: str, logger: Any, level: int) -> None:
        """Make a logger as new; keep what was set on it."""
        new = {"level": level, "propagate": True, "disabled": False, "handlers": [], "filters": []}
        held = vars(logger)
        found = {key: held[key] for key, value in new.items() if held[key] != value}
        held.update(new)
        if found:
            self._settings[name] = found


def _set(logger: Any, settings: dict[str, Any]) -> None:
    """Set on a logger what an import has set, and leave what the program has set before."""
    held = vars(logger)
    for key, value in settings.items():
        held[key] = held[key] + value if isinstance(value, list) else value


class _Shown(dict[str, Any]):
    """`Manager.loggerDict`, with the loggers that are shown; shows a hidden one that is asked for.

    Args:
        loggers: knows the hidden ones.
    """

    def __init__(self, loggers: Loggers) -> None:
        super().__init__()
        self._loggers = loggers

    def __contains__(self, name: object) -> bool:
        self._loggers.show_new(name)
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self._loggers.show_new(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a logger, or the default; see `dict.get`."""
        self._loggers.show_new(name)
        return super().get(name, default)
