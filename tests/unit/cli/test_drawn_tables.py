"""On a terminal rich draws tables: they fit it, nothing is cut off, and no name is a command."""

import re

import pytest

from shmload._cli import output
from shmload._tables import Cell, Page, Table

NAME = "an-organisation/a-model-of-many-words"


@pytest.fixture
def drawn(monkeypatch, capsys):
    """Print a page on a terminal of some columns; return the lines."""

    def print_drawn(page, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setattr(output.sys.stdout, "isatty", lambda: True)
        output.print_page(page)
        return capsys.readouterr().out.splitlines()

    return print_drawn


def table(*rows):
    return Page((Table(titles=("MODEL", "SIZE", "COMPONENTS"), rows=rows, right=(1,)),))


def plain(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


def test_wide_terminal_has_a_line_for_each_row(drawn):
    page = table((NAME, "1 KiB", "unet, vae"), ("longer", "12 KiB", "-"))
    assert plain(drawn(page, 100)) == page.text().splitlines()


@pytest.mark.parametrize("columns", [40, 50, 60])
def test_narrow_terminal_folds_names_and_loses_none_of_their_letters(drawn, columns):
    lines = plain(drawn(table((NAME, "1.00 KiB", "transformer, vae, text_encoder")), columns))
    assert max(map(len, lines)) <= columns
    assert "1.00 KiB" in lines[1]
    names = "".join(re.split(r"  ", line)[0] for line in lines[1:])
    assert NAME in names


def test_name_is_neither_markup_nor_a_command_of_the_terminal(drawn):
    lines = drawn(table(("[red]a[/red]\x1b[31m", "1", ":smile:")), 80)
    assert "[red]a[/red]\\x1b[31m" in lines[1]
    assert ":smile:" in lines[1]


def test_text_beside_tables_is_whole(drawn):
    text = "device_map = {" + '"transformer": "cuda:0", ' * 9 + "}"
    assert drawn(Page((text, "")), 40) == [text, ""]


def test_styles_are_those_of_the_cells(drawn):
    lines = drawn(table((Cell("a", "green"), "1", "b")), 80)
    assert "\x1b[32ma" in lines[1]
