"""`shmload serve` refuses bad arguments before it starts anything."""

from pathlib import Path

import click.testing
import pytest

from shmload._cli import serve
from shmload._cli.main import main
from shmload._cli.serve import _parse_address
from shmload._cli.source_list import ListedSource, read_list
from shmload._service.notice import service_status


@pytest.fixture
def refusal():
    """Run `shmload serve` with arguments that cannot work; return its error message."""

    def run(*arguments):
        done = click.testing.CliRunner().invoke(main, ["serve", *map(str, arguments)])
        assert done.exit_code == 2, done.output
        assert service_status() is None
        return done.output

    return run


@pytest.mark.parametrize("budget", ["40", "1", "1048575"])
def test_budget_without_its_unit_is_wrong_usage(refusal, budget):
    assert "is a unit missing" in refusal("--budget", budget)


@pytest.mark.parametrize("budget", ["much", "40 GX", "", "1.2.3", "9e999"])
def test_budget_that_is_no_size_is_wrong_usage(refusal, budget):
    assert "is not a size" in refusal("--budget", budget)


@pytest.mark.parametrize("address", ["9477", "localhost:", ":x", "::1:9477", "a:b:1", "a:65536"])
def test_address_that_is_none_is_wrong_usage(refusal, address):
    assert "write it like 127.0.0.1:9477 or [::1]:9477" in refusal("--metrics", address)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9477", ("localhost", 9477)),
        ("[::1]:0", ("::1", 0)),
        (":65535", ("127.0.0.1", 65535)),
    ],
)
def test_address_is_host_and_port(text, address):
    assert _parse_address(text) == address


# The list to preload ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        (b"/m bfloat17", "unknown dtype 'bfloat17'"),
        (b"/my model bfloat16", "put quotes around a path with spaces"),
        (b"'/m", "No closing quotation"),
        (b"/m\xff", "not UTF-8"),
    ],
)
def test_list_with_a_mistake_is_wrong_usage_that_names_the_line(refusal, tmp_path, line, mistake):
    path = tmp_path / "list"
    path.write_bytes(b"# sources\n\n" + line + b"\n/other")
    said = " ".join(refusal("--preload", path).split())
    assert "line 3: " in said
    assert mistake in said


@pytest.mark.parametrize("words", [["--log-format", "json"], ["--log-format=json"]])
def test_wrong_usage_is_json_in_a_log_of_json(refusal, tmp_path, monkeypatch, words):
    monkeypatch.setattr(serve, "log_steps", lambda form: forms.append(form))
    monkeypatch.setattr(serve.logger, "error", lambda *said, extra: lines.append((*said, extra)))
    forms, lines = [], []
    path = tmp_path / "list"
    path.write_text("/m bfloat17")
    assert refusal("--preload", path, *words) == ""
    ((_, said, extra),) = lines
    assert (forms, extra) == (["json"], {"error": "ArgumentError"})
    assert "line 1: unknown dtype 'bfloat17'" in said


def test_list_that_is_not_there_is_wrong_usage(refusal, tmp_path):
    assert "does not exist" in refusal("--preload", tmp_path / "missing")


def test_list_is_read_as_a_shell_would(tmp_path):
    path = tmp_path / "list"
    path.write_text("# all\n~/m bfloat16  # small\n\n'/my model'\norg/name half\r\n")
    assert read_list(path) == [
        ListedSource(2, str(Path.home() / "m"), ("--dtype=bfloat16",)),
        ListedSource(4, "/my model"),
        ListedSource(5, "org/name", ("--dtype=half",)),
    ]


def test_list_has_the_options_of_warm(tmp_path):
    path = tmp_path / "list"
    path.write_text("/m half variant=fp16 pin component=unet component=vae\n/l weight-name='a b'\n")
    first, second = read_list(path)
    options = ("--variant=fp16", "--component=unet", "--component=vae")
    assert first == ListedSource(1, "/m", ("--dtype=half", "--pin", *options))
    assert second.options == ("--weight-name=a b",)
