"""A worker inherits the environment without systemd's variables for the service."""

import contextlib
from pathlib import Path

from shmload._decoding.coordinator import Coordinator


def test_what_systemd_tells_its_service_stays_there(monkeypatch, worker_pids):
    told = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "NOTIFY_SOCKET": "@x"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER", "stays")
    with contextlib.closing(Coordinator(1)):
        while not (pids := worker_pids()):  # just forked: no command line or environment yet
            pass
        while not (environment := Path(f"/proc/{pids[0]}/environ").read_text()):
            pass
    names = {entry.partition("=")[0] for entry in environment.split("\0")}
    assert "OTHER" in names
    assert not names & told.keys()
