"""The service's log on stderr: lines for people, or one JSON object a line for programs.

    {"time": "2026-11-22T10:05:00.123Z", "level": "INFO", "logger": "shmload._service.state",
     "message": "evicted …", "fields": {"segment": "…", "nbytes": 1024}}

Guarantee: in JSON each line is one object of these five keys, whatever a message or a field holds.
"""

import datetime
import json
import logging
import sys
import threading
from types import TracebackType
from typing import Literal

from shmload._wording import logger_of

logger = logger_of(__name__)

LogFormat = Literal["text", "json"]

# What every record has. Libraries give every record attributes of their own, with names that begin
# with an underscore. All others come from a call, with `extra=`, and are fields.
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            name: value
            for name, value in vars(record).items()
            if name not in _OF_EVERY_RECORD and not name.startswith("_")
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "fields": fields,
        }
        return json.dumps(line, default=str)


def log_steps(form: LogFormat) -> None:
    """Have the root logger's handlers write what the service does, with times."""
    logging.getLogger("shmload").setLevel(logging.INFO)
    logging.captureWarnings(True)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else text)
    if form == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(
    kind: type[BaseException], exc: BaseException, trace: TracebackType | None
) -> None:
    """Log an error that ends the process, whose traceback would be no JSON."""
    logger.critical("the process fails: %s", exc, exc_info=(kind, exc, trace))


def _log_uncaught_in_thread(found: threading.ExceptHookArgs) -> None:
    exc = found.exc_value or found.exc_type()
    logger.critical("a thread fails: %s", exc, exc_info=exc)
