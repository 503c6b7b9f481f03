"""The calls that a template hands to a branch which it then has drain: none of them is lost."""

import contextlib

import pytest

from shmload._templates import messages, wire
from shmload._templates.messages import Call, Program, Standing, State
from shmload._templates.serving import Branch


class _Serving:
    """Keeps the calls that it is to start, and closes what comes with them."""

    def __init__(self):
        self.calls = []

    def start(self, call, peer):
        self.calls.append(call)
        peer.close()


class _Pipelines:
    freshness = None


@pytest.fixture
def pair():
    """A template's end and a branch's."""
    ours, theirs = wire.pair()
    with contextlib.closing(ours), contextlib.closing(theirs):
        yield ours, theirs


def _call():
    return Call(Program("code", b"", [], [], "", 1), "", [], [], 0, Standing(0, 0, "", 0, 0), 0)


def test_call_comes_though_the_template_has_closed_its_end(pair):
    template, orders = pair
    branch = Branch(orders, _Pipelines(), None)
    branch._serving = serving = _Serving()
    messages.send(orders, State(1, 1, 0, 0, 0, ""), waits=False)  # the template never reads it
    caller, channel = wire.pair()
    with contextlib.closing(caller), contextlib.closing(channel):
        messages.send(template, _call(), (channel.fileno(),), waits=False)
        template.close()
        while branch._take_call():
            continue
    assert len(serving.calls) == 1
