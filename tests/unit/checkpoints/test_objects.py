"""Objects are read as they were described in spite of troubles, or an error says why."""

import pytest
from object_server import ObjectServer

from shmload._checkpoints import objects
from shmload._checkpoints.objects import (
    describe,
    fetch,
    require_readable_url,
)
from shmload._checkpoints.remote import FetchError
from shmload.errors import ArgumentError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch, configure):
    configure(remote_timeout_s=0.15)
    with ObjectServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        objects._make_store.cache_clear()
        server.objects = {"a/model.safetensors": CONTENT, "a/config.json": b"{}"}
        yield server
    objects._make_store.cache_clear()


@pytest.fixture(params=["s3", "gs", "az", "server"])
def url(request, server):
    return f"{server.url_in(request.param)}/a"


@pytest.mark.parametrize("trouble", ["503", "429", "cut"])
def test_request_is_made_again(url, server, configure, trouble):
    configure(remote_timeout_s=20)
    server.trouble = lambda name, count: trouble if count < 4 else ""
    assert bytes(fetch(describe(f"{url}/model.safetensors"), 0, 9)) == CONTENT[:9]
    assert server.asked["a/model.safetensors"] == 4


def test_server_that_stalls_is_given_up(server, monkeypatch):
    monkeypatch.setenv("AWS_TIMEOUT", "100ms")
    server.trouble = lambda *_: "stall"
    with pytest.raises(FetchError, match="error sending request"):
        fetch(describe("s3://models/a/model.safetensors"), 0, 9)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [("403", "PermissionDenied"), ("whole", "ange")],
)
def test_what_cannot_get_better_is_asked_for_once(url, server, trouble, message):
    server.trouble = lambda *_: trouble
    with pytest.raises(FetchError, match=message) as caught:
        fetch(describe(f"{url}/model.safetensors"), 0, 9)
    assert server.asked["a/model.safetensors"] == 1
    assert "secret" not in str(caught.value)
    assert "not to be seen" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/model.safetensors?X-Amz-Signature=abc", "has a query"),
        ("https://user:word@host/model.safetensors", "a password"),
        ("http://example.org/model.safetensors", "without encryption"),
    ],
)
def test_url_that_is_not_safe(url, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        require_readable_url(url)
    assert "abc" not in str(caught.value)
    assert ":word" not in str(caught.value)
