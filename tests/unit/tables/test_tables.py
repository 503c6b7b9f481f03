"""One writer makes all tables, as text and as HTML."""

import types

from shmload._tables import Listing, Page, Table


def table(*rows):
    return Table(titles=("MODEL", "SIZE", "COMPONENTS"), rows=rows, right=(1,))


def test_columns_stand_below_each_other():
    lines = list(table(("a", "1 KiB", "unet, vae"), ("longer", "12 KiB", "-")).lines())
    assert lines == [
        "MODEL     SIZE  COMPONENTS",
        "a        1 KiB  unet, vae",
        "longer  12 KiB  -",
    ]


def test_names_cannot_change_the_table():
    shown = table(("a\n\x1b[31mb", "<b>", 'x"&'))
    assert len(list(shown.lines())) == 2
    assert "\\n\\x1b[31mb" in "\n".join(shown.lines())
    assert "&lt;b&gt;" in shown.html()
    assert "x&quot;&amp;" in shown.html()
    assert "<b>" not in shown.html()


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
