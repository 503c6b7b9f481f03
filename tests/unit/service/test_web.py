"""The pages over HTTP: metrics in the format, health, readiness, and 404 for all else."""

import contextlib
import socket
import threading
import urllib.request
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import drip

from shmload._segments.roots import Root
from shmload._service import web
from shmload._service.metrics import MAX_MODELS
from shmload._service.web import make_app


@pytest.fixture
def ask(state):
    """Ask for a path; returns the status code and the text."""
    app = validator(make_app(state))

    def get(path, method="GET"):
        environ = {
            "PATH_INFO": path,
            "REQUEST_METHOD": method,
            "QUERY_STRING": "",
            "SCRIPT_NAME": "",
        }
        setup_testing_defaults(environ)
        said = []
        answer = app(environ, lambda status, headers, *rest: said.append(status))
        body = b"".join(answer)
        answer.close()
        return int(said[0].split()[0]), body.decode()

    return get


def samples(ask):
    """Return the value of each sample, by its name and labels, as Prometheus would read it."""
    code, text = ask("/metrics")
    assert code == 200
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_has_its_help_and_type(ask, state):
    state.usage.note(Root(path="m"), hits=1, misses=0)
    _, text = ask("/metrics")
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP ")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert names == typed
    assert all(name.startswith("shmload_") for name in names)
    assert len(names) > 15


@pytest.mark.parametrize("model", ["org/a", 'a "b" \\c', "two\nlines", "{}=,#", "名前"])
def test_counters_of_a_model_arrive_whatever_its_name(ask, state, model):
    state.usage.note(Root(path=f"/{model}", hub_id=model), hits=3, misses=1)
    found = samples(ask)
    assert found["shmload_model_hits_total", ("model", model), ("source", f"/{model}")] == 3
    assert found["shmload_model_misses_total", ("model", model), ("source", f"/{model}")] == 1
    assert found["shmload_hits_total",] == 3


def test_number_of_series_is_bounded(ask, state):
    for number in range(3 * MAX_MODELS):
        state.usage.note(Root(path=f"model {number}"), hits=1, misses=0)
    found = samples(ask)
    models = {dict(labels).get("source") for _, *labels in found} - {None}
    assert len(models) == MAX_MODELS


def test_health_ends_with_the_service(ask, state):
    assert ask("/healthz") == (200, "ok\n")
    state.stop()
    assert ask("/healthz") == (503, "the service ends\n")
    assert ask("/readyz") == (503, "the service ends\n")


def test_service_is_ready_once_the_preload_list_is_done(ask, state):
    assert ask("/readyz") == (200, "ok\n")
    state.preloading.total = 2
    assert ask("/readyz") == (503, "preloading, 0 of 2 done\n")
    state.preloading.begin("org/a")
    assert ask("/readyz") == (503, "preloading, 0 of 2 done: org/a\n")
    state.preloading.end(is_resident=True)
    state.preloading.begin("org/b")
    state.preloading.end(is_resident=False)
    assert ask("/readyz") == (200, "ok\n")
    assert state.preloading.failed == ["org/b"]
    assert samples(ask)["shmload_failed_preloads",] == 1


@pytest.mark.parametrize("path", ["/", "", "/metrics/", "/health", "/favicon.ico", "/metrics/x"])
def test_other_paths_are_not_found(ask, path):
    assert ask(path) == (404, "there is /metrics, /healthz, /readyz\n")


def test_page_that_fails_is_an_error_in_the_log(ask, state, monkeypatch, caplog):
    monkeypatch.setattr(state, "status", lambda: 1 / 0)
    assert ask("/metrics") == (500, "the log says why\n")
    assert "a request for /metrics failed" in caplog.text


def test_only_questions_are_answered(ask):
    assert ask("/healthz", "HEAD") == (200, "")
    assert ask("/metrics", "HEAD") == (200, "")
    assert ask("/healthz", "POST")[0] == 405


@pytest.fixture
def listening(state):
    """A server that runs in a thread; returns its address."""
    server = web._Server("127.0.0.1", 0)
    server.daemon_threads = False  # closing it waits for them
    server.set_app(make_app(state))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address
    server.shutdown()
    server.server_close()
    thread.join()


def is_healthy(address):
    with urllib.request.urlopen("http://{}:{}/healthz".format(*address), timeout=60) as answer:
        return answer.read() == b"ok\n"


def test_request_that_comes_byte_by_byte_has_a_deadline(listening, monkeypatch):
    monkeypatch.setattr(web, "_TIMEOUT_S", 0.3)
    with socket.create_connection(listening) as client:
        drip(client, b"GET /")
    assert is_healthy(listening)


def test_answer_that_is_not_read_has_a_deadline(listening, state, monkeypatch):
    monkeypatch.setattr(web, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(state, "reasons_unhealthy", lambda: ["x" * (1 << 24)])
    before = threading.active_count()
    with socket.create_connection(listening) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        while client.recv(1 << 16, socket.MSG_PEEK) and threading.active_count() > before:
            pass


def test_many_silent_clients_take_few_threads_and_keep_no_other_away(listening):
    before = threading.active_count()
    with contextlib.ExitStack() as closing:
        for _ in range(5 * web._MAX_CLIENTS):
            client = closing.enter_context(socket.create_connection(listening))
            client.sendall(b"GET /")
        assert is_healthy(listening)
        assert threading.active_count() <= before + web._MAX_CLIENTS
