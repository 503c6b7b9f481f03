"""What the service makes of the report that a preloading process prints."""

import base64
import logging
import os
import types

import pytest

from shmload._cli import warming
from shmload._cli.source_list import ListedSource
from shmload._ipc import procs

_SOURCE = ListedSource(3, "model.safetensors")
_REPORT = '{\n  "reports": [{"segments": ["a"]}], "texts": ["model: resident"]\n}\n'


@pytest.fixture
def printing(monkeypatch, tmp_path):
    """Have the child that warms a source print something else, and end well."""

    def print_instead(text):
        encoded = tmp_path / "encoded"
        encoded.write_bytes(base64.b64encode(text.encode()))

        start = procs.start

        def start_base64(module, *arguments, **options):
            return start("base64", "-d", str(encoded), **options)

        monkeypatch.setattr(procs, "start", start_base64)

    return print_instead


def test_lines_of_libraries_before_the_report_are_left_out(printing):
    printing("Using a {new} cache\n" + _REPORT)
    begun = warming.Warming(_SOURCE)
    begun.child.how_it_ended()
    begun.child.close()
    assert begun.answer() == ({"segments": ["a"]}, "model: resident")


def test_output_without_a_report_is_an_error_in_the_log(printing, caplog):
    printing("Using a {new} cache\n")
    wake_fd, sender = os.pipe()
    state = types.SimpleNamespace(is_stopping=False, wake_fd=wake_fd)
    try:
        with caplog.at_level(logging.ERROR, "shmload"):
            assert warming._preload_one(_SOURCE, state) is None
    finally:
        os.close(wake_fd)
        os.close(sender)
    assert "line 3 cannot be preloaded: its process printed no report" in caplog.text


def test_only_what_was_evicted_is_blamed_on_the_budget(caplog, monkeypatch):
    other = ListedSource(1, "other.safetensors")
    removed = ListedSource(2, "removed.safetensors")
    monkeypatch.setattr(warming, "segments", list)
    made = {"o1": other, "o2": other, "r": removed}
    warming._report_evicted(made, _SOURCE, {"o2"})
    budget, meanwhile = caplog.records
    assert budget.message.endswith("line 1, other.safetensors, was evicted for line 3")
    assert (budget.levelname, meanwhile.levelname) == ("ERROR", "WARNING")
    assert meanwhile.message.startswith("line 2, removed.safetensors, was removed meanwhile")
    assert made == {}


def test_lines_of_the_child_are_logged_without_its_loggers_name():
    sub = warming._LOGGER_NAME.sub
    assert sub("", "shmload._loading.load: flux: 3 shards to decode") == "flux: 3 shards to decode"
    assert sub("", "a library: shmload.x: y") == "a library: shmload.x: y"
