"""What the service makes of the report that a preloading process prints."""

import logging

from shmload._cli import preload
from shmload._cli.preload_list import ListedSource

_SOURCE = ListedSource(3, "model.safetensors", None)
_REPORT = b'{\n  "reports": [{"segments": ["a"], "resident_nbytes": 7}]\n}\n'


def test_lines_of_libraries_before_the_report_are_left_out():
    report = preload._read_report(b"Using a {new} cache\n" + _REPORT, _SOURCE)
    assert report == preload._Report(("a",), 7)


def test_output_without_a_report_is_an_error_in_the_log(caplog):
    with caplog.at_level(logging.ERROR, "shmload"):
        assert preload._read_report(b"", _SOURCE) is None
    assert "line 3: its process printed no report" in caplog.text


def test_only_what_was_evicted_is_blamed_on_the_budget(caplog, monkeypatch):
    other = ListedSource(1, "other.safetensors", None)
    removed = ListedSource(2, "removed.safetensors", None)
    monkeypatch.setattr(preload, "segments", list)
    made = {"o1": other, "o2": other, "r": removed}
    preload._report_evicted(made, _SOURCE, {"o2"})
    budget, meanwhile = caplog.records
    assert budget.message.endswith("line 1, other.safetensors, was evicted for line 3")
    assert (budget.levelname, meanwhile.levelname) == ("ERROR", "WARNING")
    assert meanwhile.message.startswith("line 2, removed.safetensors, was removed meanwhile")
    assert made == {}


def test_lines_of_the_child_are_logged_without_its_loggers_name():
    sub = preload._LOGGER_NAME.sub
    assert sub("", "shmload._loading.load: flux: 3 shards to decode") == "flux: 3 shards to decode"
    assert sub("", "a library: shmload.x: y") == "a library: shmload.x: y"
