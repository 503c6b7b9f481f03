"""`shmload serve` refuses bad arguments before it starts anything."""

import click.testing
import pytest

from shmload._cli import service
from shmload._cli.main import main


@pytest.fixture
def refusal(monkeypatch):
    """Run `shmload serve` with arguments that cannot work; return its error message."""
    monkeypatch.setattr(service, "Keeper", lambda *_: pytest.fail("it starts"))

    def run(*arguments):
        done = click.testing.CliRunner().invoke(main, ["serve", *map(str, arguments)])
        assert done.exit_code == 2, done.output
        return " ".join(done.output.split())

    return run


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9477", ("localhost", 9477)),
        ("[::1]:0", ("::1", 0)),
        (":65535", ("127.0.0.1", 65535)),
    ],
)
def test_address_is_host_and_port(text, address):
    assert service._parse_address(None, None, text) == address


@pytest.mark.parametrize("address", ["9477", "localhost:", ":x", "::1:9477", "a:b:1", "a:65536"])
def test_address_that_is_none_is_wrong_usage(refusal, address):
    assert "write it like 127.0.0.1:9477 or [::1]:9477" in refusal("--metrics", address)


def test_list_with_a_mistake_is_wrong_usage(refusal, tmp_path):
    (tmp_path / "list").write_text("# sources\n\n/m --dtype bfloat17\n/other\n")
    assert f"{tmp_path}/list, line 3: unknown dtype 'bfloat17'" in refusal(
        "--preload", tmp_path / "list"
    )
    assert "does not exist" in refusal("--preload", tmp_path / "missing")
