"""Tables are whole in a pipe, fit a terminal, and no name is a command or markup."""

import re
import types

import pytest
from rich.console import Console

from shmload._tables import Cell, Listing, Page, Table

NAME = "an-organisation/a-model-of-many-words"


def table(*rows):
    return Page((Table(titles=("MODEL", "SIZE", "COMPONENTS"), rows=rows, right=(1,)),))


def drawn(page, columns, **options):
    """Return the lines of a page on a terminal of some columns, without colours."""
    text = page.text(Console(width=columns, color_system="standard", **options))
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.split("\n")]


def test_columns_stand_below_each_other():
    page = table(("a", "1 KiB", "unet, vae"), ("longer", "12 KiB", "-"))
    assert page.text().split("\n") == [
        "MODEL     SIZE  COMPONENTS",
        "a        1 KiB  unet, vae",
        "longer  12 KiB  -",
    ]
    assert drawn(page, 100) == page.text().split("\n")


def test_row_in_a_pipe_is_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    page = table((Cell("word " * 100 + "end", "green"), "1", "b"))
    assert [line.rpartition("end")[2] for line in page.text().split("\n")[1:]] == ["  " + "   1  b"]


@pytest.mark.parametrize("columns", [40, 50, 60])
def test_narrow_terminal_folds_names_and_loses_none_of_their_letters(columns):
    lines = drawn(table((NAME, "1.00 KiB", "transformer, vae, text_encoder")), columns)
    assert max(map(len, lines)) <= columns
    assert "1.00 KiB" in lines[1]
    assert NAME in "".join(re.split(r"  ", line)[0] for line in lines[1:])


def test_name_is_neither_markup_nor_a_command_of_the_terminal():
    page = table(("[red]a[/red]\n\x1b[31m", "1", ":smile:"))
    for lines in (drawn(page, 80), page.text().split("\n")):
        assert len(lines) == 2
        assert r"[red]a[/red]\n\x1b[31m" in lines[1]
        assert ":smile:" in lines[1]


def test_text_beside_tables_is_whole():
    text = "device_map = {" + '"transformer": "cuda:0", ' * 9 + "}"
    assert drawn(Page((text, "")), 40) == [text, ""]
    assert Page((text, "")).text() == f"{text}\n"


def test_styles_are_those_of_the_cells():
    console = Console(width=80, color_system="standard", force_terminal=True)
    assert "\x1b[32ma" in table((Cell("a", "green"), "1", "b")).text(console)


def test_listing_is_a_list():
    class Names(Listing[str]):
        def page(self):
            return Page((f"{len(self)} names",))

    names = Names(["a", "b"])
    assert (names, str(names)) == (["a", "b"], "2 names")
    assert repr(names) == "['a', 'b']"
    shown = []
    names._repr_pretty_(types.SimpleNamespace(text=shown.append), cycle=False)  # IPython
    assert shown == ["2 names"]
    # IPython takes the first class with a way of its own, and has one for `list`.
    bases = Names.__mro__
    first = next(each for each in bases if "_repr_pretty_" in vars(each))
    assert bases.index(first) < bases.index(list)
