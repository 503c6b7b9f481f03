"""What an import has written in a template is written again in the program that imports."""

import io

import pytest

from shmload._templates.recorder import Event, do_again

_SAID = Event("module", "said", (2, b"hello\n"))


def test_it_goes_to_the_stream_that_the_program_has_put_there(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    stream.write("before ")
    do_again(_SAID)
    assert stream.getvalue() == "before hello\n"


def test_it_goes_to_the_descriptor_behind_what_the_stream_still_holds(capfd, monkeypatch):
    with open(2, "w", closefd=False) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        stream.write("before ")
        do_again(_SAID)
        assert capfd.readouterr().err == "before hello\n"


def test_it_goes_nowhere_without_a_stream(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    do_again(_SAID)


@pytest.mark.parametrize("fd", [1, 2])
def test_bytes_that_are_no_text_are_marked(monkeypatch, fd):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout" if fd == 1 else "sys.stderr", stream)
    do_again(Event("module", "said", (fd, b"\xff")))
    assert stream.getvalue() == "\ufffd"
