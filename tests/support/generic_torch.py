"""A stand-in for torch's streams and events of any device: the host copies, and calls are noted."""

import torch


class Calls(list):
    """Notes calls as text, such as `stream 1 waits for stream 0`."""


def put_in(monkeypatch):
    """Give torch streams and events for the host; returns the calls, in order."""
    calls = Calls()
    monkeypatch.setattr(torch, "Stream", lambda device: _Stream(calls))
    monkeypatch.setattr(torch.Stream, "__enter__", None, raising=False)
    monkeypatch.setattr(torch, "Event", lambda device: _Event(calls))
    consumer = _Stream(calls, "the consumer")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: consumer)
    for name, value in {  # CUDA's own are older
        "Stream": lambda device: _Stream(calls),
        "stream": lambda stream: stream,
        "Event": lambda blocking: _Event(calls),
        "current_stream": lambda device: consumer,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return calls


class _Stream:
    def __init__(self, calls, name=None):
        self._calls = calls
        made = sum(call.startswith("make") for call in calls)
        self.name = name or f"stream {made}"
        if name is None:
            calls.append(f"make {self.name}")

    def __enter__(self):
        self._calls.append(f"copy on {self.name}")

    def __exit__(self, *exc_info):
        pass

    def wait_stream(self, other):
        self._calls.append(f"{self.name} waits for {other.name}")


class _Event:
    def __init__(self, calls):
        self._calls = calls

    def record(self, stream):
        self._calls.append(f"record on {stream.name}")

    def synchronize(self):
        self._calls.append("synchronize")
