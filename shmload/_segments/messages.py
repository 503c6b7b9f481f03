"""Log records and warnings that name a lent path: they name the source's instead.

Guarantee: no message of this process has a path that `repaired_messages` was told of, as long as
its block lasts, unless something else has taken over `warnings.showwarning`.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from shmload._host.changes import Change
from shmload._host.limits import chain_of


class MessageRepair(Protocol):
    """Repairs texts that mention a path."""

    def repair_record(self, record: logging.LogRecord) -> None:
        """Repair a log record in place."""

    def repair_warning(self, filename: str, text: str) -> str:
        """Return the repaired text of a warning that a file of code gave."""


class LentPath:
    """Puts one path in the place of another.

    Args:
        lent: the path to replace, and all below it.
        source: what to write instead.
    """

    def __init__(self, lent: str, source: str) -> None:
        self._lent = lent
        self._source = source

    def text(self, text: str) -> str:
        """Return a text with the source's path."""
        return text.replace(self._lent, self._source)

    def repair_record(self, record: logging.LogRecord) -> None:
        """Repair a log record in place."""
        rewrite(record, self.text(message_of(record)))

    def repair_warning(self, filename: str, text: str) -> str:
        """Return the repaired text of a warning."""
        return self.text(text)


def message_of(record: logging.LogRecord) -> str:
    """Return a log record's message; empty if its arguments are wrong, which logging reports."""
    try:
        return record.getMessage()
    except Exception:
        return ""


def rewrite(record: logging.LogRecord, message: str) -> None:
    """Give a log record another message; one that is the same changes nothing."""
    if message != message_of(record):
        record.msg, record.args = message, ()


@contextlib.contextmanager
def repaired_messages(repair: MessageRepair) -> Iterator[None]:
    """Repair the log records and warnings of all threads during the block.

    Several threads may be in such blocks at once.
    """
    with _repairing.made(repair):
        yield


_has_factory = False
_show: Any = None


def _install_record_factory() -> None:
    """Install a factory that repairs log records.

    It stays installed: removing it could also remove a factory that was installed later.
    """
    global _has_factory
    if _has_factory:
        return
    make = logging.getLogRecordFactory()

    def make_repaired(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        for repair in _repairing.values():
            repair.repair_record(record)
        return record

    logging.setLogRecordFactory(make_repaired)
    _has_factory = True


def _install() -> None:
    global _show
    _install_record_factory()
    if warnings.showwarning is not _show_repaired:
        _show, warnings.showwarning = warnings.showwarning, _show_repaired


def _remove_hook(_: object) -> None:
    if warnings.showwarning is _show_repaired:
        warnings.showwarning = _show


def _show_repaired(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = original = str(message)
    for repair in _repairing.values():
        text = repair.repair_warning(filename, text)
    shown = message if text == original else category(text)
    _show(shown, category, filename, lineno, file, line)


_repairing = Change("how warnings are shown", lambda: warnings.showwarning, _install, _remove_hook)


def repair_errors(error: BaseException | None, repair: Callable[[str], str]) -> None:
    """Repair the texts of an error and of its causes.

    Args:
        error: changed in place.
        repair: returns a text with the right paths.
    """
    for found in chain_of(error):
        found.args = tuple(repair(each) if isinstance(each, str) else each for each in found.args)
        if isinstance(found, OSError) and isinstance(found.filename, str):
            found.filename = repair(found.filename)
