"""The log as JSON: one object a line, whatever a message holds."""

import json
import logging
import sys
import threading

import pytest

from shmload._cli.serve import JsonFormatter, log_steps


@pytest.fixture
def logged():
    """Return the lines that a call of a logger makes."""
    log = logging.getLogger("shmload.test")

    def write(message, *args, level=logging.INFO, exc_info=None, extra=None):
        record = log.makeRecord(log.name, level, __file__, 1, message, args, exc_info, extra=extra)
        return JsonFormatter().format(record).splitlines()

    return write


def test_line_has_time_level_logger_message_and_fields(logged):
    (line,) = logged("evicted %s", "x", extra={"segment": "x", "nbytes": 7})
    found = json.loads(line)
    assert list(found) == ["time", "level", "logger", "message", "fields"]
    assert found["time"].endswith("Z")
    assert found["time"][10] == "T"
    assert (found["level"], found["logger"]) == ("INFO", "shmload.test")
    assert found["message"] == "evicted x"
    assert found["fields"] == {"segment": "x", "nbytes": 7}


@pytest.mark.parametrize("text", ["two\nlines", 'a "quote"', "\x1b[31m", "\udcff", "\u2028", "é"])
def test_any_text_is_one_line(logged, text):
    (line,) = logged("%s", text, extra={"source": text})
    assert line.isascii()
    assert json.loads(line)["message"] == json.loads(line)["fields"]["source"] == text


def test_error_has_its_traceback(logged):
    try:
        raise ValueError("wrong")
    except ValueError:
        (line,) = logged("failed", level=logging.ERROR, exc_info=sys.exc_info())
    assert json.loads(line)["fields"]["traceback"].endswith("ValueError: wrong")


def test_errors_that_nothing_catches_are_lines_too(monkeypatch, capfd):
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(logging.getLogger("shmload"), "level", logging.INFO)
    log_steps("json")
    logging.captureWarnings(False)
    threading.Thread(target=lambda: 1 / 0).start()
    while threading.active_count() > 1:
        pass
    (line,) = capfd.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["message"] == "a thread fails: division by zero"
    assert found["fields"]["traceback"].endswith("ZeroDivisionError: division by zero")


def test_field_that_json_does_not_know_is_text(logged, tmp_path):
    (line,) = logged("m", extra={"path": tmp_path})
    assert json.loads(line)["fields"] == {"path": str(tmp_path)}


def test_attribute_that_a_library_gives_every_record_is_no_field(logged, monkeypatch):
    def record(*args, **kwargs):
        made = logging.LogRecord(*args, **kwargs)
        made._ray_timestamp_ns = 1  # as Ray does
        return made

    monkeypatch.setattr(logging, "_logRecordFactory", record)
    (line,) = logged("m", extra={"nbytes": 7})
    assert json.loads(line)["fields"] == {"nbytes": 7}
