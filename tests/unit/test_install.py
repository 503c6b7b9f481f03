"""`scripts/install.py` passes pip's settings on to uv, or lets pip install."""

import pytest
from install import options_for_uv, parse_settings

BEST = ["--index-strategy", "unsafe-best-match"]


@pytest.fixture(autouse=True)
def _writes_bytecode(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)


def test_uv_compiles_where_python_would_not_remember_what_it_compiles(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert options_for_uv({}) == [*BEST, "--compile-bytecode"]


def test_the_environment_wins_over_files_and_the_command_over_all_commands():
    listed = """:env:.index-url='https://env/simple'
global.cert='/etc/certs.crt'
global.index-url='https://global/simple'
global.timeout='60'
install.timeout='90'
download.timeout='5'
"""
    assert parse_settings(listed) == {
        "index-url": "https://env/simple",
        "cert": "/etc/certs.crt",
        "timeout": "90",
    }


def test_uv_is_told_each_index():
    settings = {
        "extra-index-url": "https://a/simple\nfile:///b",
        "find-links": "/wheels",
        "constraint": "/caps.txt",
    }
    assert options_for_uv(settings) == [
        *BEST,
        *("--extra-index-url", "https://a/simple", "--extra-index-url", "file:///b"),
        *("--find-links", "/wheels", "--constraint", "/caps.txt"),
    ]


@pytest.mark.parametrize(("value", "options"), [("1", [*BEST, "--no-index"]), ("false", BEST)])
def test_no_index_is_a_switch(value, options):
    assert options_for_uv({"no-index": value}) == options


def test_what_concerns_pip_alone_changes_nothing():
    assert options_for_uv({"timeout": "60", "disable-pip-version-check": "1"}) == BEST


@pytest.mark.parametrize("setting", ["proxy", "trusted-host", "client-cert"])
def test_pip_installs_if_uv_cannot_be_told(setting):
    assert options_for_uv({setting: "x", "timeout": "60"}) is None
