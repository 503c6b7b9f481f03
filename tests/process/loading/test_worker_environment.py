"""A worker inherits the environment without systemd's variables for the service."""

import contextlib
from pathlib import Path

from watching import until

from shmload._decoding.coordinator import Coordinator


def test_what_systemd_tells_its_service_stays_there(monkeypatch, worker_pids):
    told = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "NOTIFY_SOCKET": "@x"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTHER", "stays")
    with contextlib.closing(Coordinator(1)):
        pids = until(worker_pids)  # just forked: no command line or environment yet
        environment = until(Path(f"/proc/{pids[0]}/environ").read_text)
    names = {entry.partition("=")[0] for entry in environment.split("\0")}
    assert "OTHER" in names
    assert not names & told.keys()
