"""One writer makes all tables, as text and as HTML."""

import types

from shmload._tables import Cell, Listing, Page, Table


def table(*rows, **given):
    return Table(titles=("MODEL", "SIZE", "COMPONENTS"), rows=rows, right=(1,), **given)


def test_columns_stand_below_each_other():
    lines = list(table(("a", "1 KiB", "unet, vae"), ("longer", "12 KiB", "-")).lines())
    assert lines == [
        "MODEL     SIZE  COMPONENTS",
        "a        1 KiB  unet, vae",
        "longer  12 KiB  -",
    ]


def test_narrow_terminal_gets_short_forms_and_then_the_ends_of_names():
    row = ("some-organisation/some-model", "1 KiB", Cell("transformer, vae, unet", short="3"))
    wide = table(row, cut=0)
    assert "transformer, vae" in "\n".join(wide.lines())
    assert list(wide.lines(48))[1] == "some-organisation/some-model  1 KiB  3"
    narrow = list(wide.lines(42))
    assert narrow[1] == "…/some-model  1 KiB  3"


def test_narrow_terminal_loses_a_column_before_names_become_unreadable():
    row = ("an-organisation/some-model-of-many-words", "1 KiB", "3")
    lines = list(table(row, cut=0, drop=(2,)).lines(40))
    assert lines[0].split() == ["MODEL", "SIZE"]
    assert lines[1] == "…/some-model-of-many-words  1 KiB"


def test_a_long_last_folder_loses_its_beginning():
    lines = list(Table(titles=("MODEL",), rows=[("x" * 40 + "end",)], cut=0).lines(20))
    assert lines[1] == "…" + "x" * 16 + "end"


def test_names_cannot_change_the_table():
    shown = table(("a\n\x1b[31mb", "<b>", 'x"&'))
    assert len(list(shown.lines())) == 2
    assert "\\n\\x1b[31mb" in "\n".join(shown.lines())
    assert "&lt;b&gt;" in shown.html()
    assert "x&quot;&amp;" in shown.html()
    assert "<b>" not in shown.html()


def test_styles_are_shown_only_where_asked_for():
    shown = table((Cell("a", "green"), "1", "b"))
    assert "\x1b" not in "\n".join(shown.lines())
    assert "\x1b[32ma    \x1b[0m  " in "\n".join(shown.lines(color=True))
    plain = [
        line.replace("\x1b[32m", "").replace("\x1b[0m", "") for line in shown.lines(color=True)
    ]
    assert plain[1:] == list(shown.lines())[1:]


def test_page_is_text_and_html():
    page = Page((table(("a", "1", "b")), "", "in all: 1 < 2"))
    assert page.text().endswith("b\n\nin all: 1 < 2")
    assert page.html().endswith("</table><pre>in all: 1 &lt; 2</pre>")


def test_listing_is_a_list():
    class Names(Listing[str]):
        def page(self):
            return Page((f"{len(self)} names",))

    names = Names(["a", "b"])
    assert (names, str(names)) == (["a", "b"], "2 names")
    assert names._repr_html_() == "<pre>2 names</pre>"
    assert repr(names) == "['a', 'b']"
    shown = []
    names._repr_pretty_(types.SimpleNamespace(text=shown.append), cycle=False)  # a plain IPython
    assert shown == ["2 names"]
    # IPython takes the first class with a way of its own, and has one for `list`.
    bases = Names.__mro__
    first = next(each for each in bases if "_repr_pretty_" in vars(each))
    assert bases.index(first) < bases.index(list)
