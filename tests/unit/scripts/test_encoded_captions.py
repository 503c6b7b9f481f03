"""How scripts/encode_dataset.py reads captions: text files and tables; without processes."""

import json

import click
import pyarrow
import pyarrow.parquet
import pytest
from caption_table import captions_for, read_captions
from encode_dataset import Picture, caption_of


def captions(tmp_path, *rows, raw=None):
    """Return the captions in a table of JSON lines."""
    table = tmp_path / "table.jsonl"
    lines = [json.dumps(dict(zip(("file_name", "text"), row, strict=True))) for row in rows]
    table.write_bytes(raw if raw is not None else "\n".join(lines).encode())
    return read_captions(table, "file_name", "text")


def refused(tmp_path, *rows, raw=None):
    """Return what is said of such a table."""
    with pytest.raises(click.UsageError) as caught:
        captions(tmp_path, *rows, raw=raw)
    assert str(tmp_path / "table.jsonl") in str(caught.value)
    return str(caught.value)


def test_byte_order_mark_is_no_part_of_a_caption(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa cat\r\n")
    assert caption_of(Picture(str(tmp_path / "a.png"), 8, None)) == "a cat"
    raw = b'\xef\xbb\xbf{"file_name": "a.png", "text": "a cat"}\n'
    assert captions(tmp_path, raw=raw) == {"a.png": "a cat"}


def test_text_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("ein Bär".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8: .*0xe4.* position 5"):
        caption_of(Picture(str(tmp_path / "a.png"), 8, None))


def test_picture_without_a_text_file_has_an_empty_caption(tmp_path):
    assert caption_of(Picture(str(tmp_path / "a.png"), 8, None)) == ""


@pytest.mark.parametrize("nothing", [None, float("nan"), "", "  "])
def test_missing_caption_is_empty(tmp_path, nothing):
    assert captions(tmp_path, ("a.png", nothing)) == {"a.png": ""}


@pytest.mark.parametrize("other", [["a", "b"], 7, {"en": "a"}, True])
def test_caption_that_is_not_text_is_an_error(tmp_path, other):
    said = refused(tmp_path, ("a.png", "one"), ("b.png", other))
    assert f"row 2: 'text' is {other!r}, a {type(other).__name__}; give text" in said


def test_name_that_is_not_text_is_an_error(tmp_path):
    assert "row 1: 'file_name' is 7, a int" in refused(tmp_path, (7, "one"))


def test_picture_listed_twice_with_two_captions_is_an_error(tmp_path):
    assert captions(tmp_path, ("a.png", "one"), ("a.png", "one")) == {"a.png": "one"}
    said = refused(tmp_path, ("a.png", "one"), ("b.png", "x"), ("a.png", "two"))
    assert "row 3: 'a.png' has the caption 'two', and 'one' in an earlier row" in said


def test_broken_line_is_named_by_its_number(tmp_path):
    good = '{"file_name": "a.png", "text": "b"}\n'
    said = refused(tmp_path, raw=f"{good}\n{good}{{\n".encode())
    assert "line 4" in said
    assert "line 2" not in said
    assert "line 2: it is no object" in refused(tmp_path, raw=f"{good}[1]\n".encode())


def test_row_that_lacks_a_column_is_named(tmp_path):
    good, lacking = '{"file_name": "a.png", "text": "b"}', '{"file_name": "b.png", "title": "c"}'
    said = refused(tmp_path, raw=f"{good}\n{lacking}\n".encode())
    assert "row 2 has no 'text'; it has file_name, title" in said
    said = refused(tmp_path, raw=f"{lacking}\n".encode())
    assert "there is no column 'text'; it has file_name, title" in said


def test_short_line_of_a_csv_file_has_an_empty_caption(tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("file_name,text\na.png\nb.png,two\n")
    assert read_captions(table, "file_name", "text") == {"a.png": "", "b.png": "two"}


def test_damaged_parquet_file_is_an_error(tmp_path):
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"file_name": ["a"], "text": [["x"]]}), table)
    with pytest.raises(click.UsageError, match="a list; give text"):
        read_captions(table, "file_name", "text")
    table.write_bytes(b"PAR1" + b"\xff" * 60 + b"PAR1")
    with pytest.raises(click.UsageError, match=r"a\.parquet cannot be read: "):
        read_captions(table, "file_name", "text")


def test_pictures_without_captions_are_said_with_examples(tmp_path, capsys):
    table = tmp_path / "a.csv"
    texts = captions_for(["a", "b", "c"], {"a": "x", "b": "", "d": "y"}, table)
    assert texts == {"a": "x", "b": "", "c": ""}
    assert f"{table} has no caption for b; without one: 2 of 3" in capsys.readouterr().err
    with pytest.raises(
        click.UsageError, match=r"for a, nor .*; it has './a', for instance; see --f"
    ):
        captions_for(["a", "b"], {"./a": "x", "./b": "x"}, table)


def test_table_may_have_long_captions_and_paths_that_begin_here(tmp_path):
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f"file_name,text\n./b//a.png,{long}\n")
    assert read_captions(tmp_path / "a.csv", "file_name", "text") == {"b/a.png": long}


def test_cells_beyond_the_columns_have_no_name_in_the_error(tmp_path):
    (tmp_path / "a.csv").write_text("file_name;text\na.png;a cat, red\n")
    with pytest.raises(click.UsageError, match=r"it has file_name;text$"):
        read_captions(tmp_path / "a.csv", "file_name", "text")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("a.png,a cat, red\n", "'a.png' has more cells than there are columns, such as 'red'"),
        ('a.png,"a cat\nb.png,a dog\n', "unexpected end of data"),
        ('a.png,"a" cat\n', "expected after"),
    ],
)
def test_text_that_csv_would_lose_is_an_error(tmp_path, rows, says):
    table = tmp_path / "table.csv"
    table.write_text("file_name,text\n" + rows)
    with pytest.raises(click.UsageError, match=says):
        read_captions(table, "file_name", "text")


def test_empty_cells_beyond_the_columns_and_quotes_within_are_no_error(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text('file_name,text\na.png,"a ""cat"", red",\nb.png,5 dogs, ,\n')
    assert read_captions(table, "file_name", "text") == {
        "a.png": 'a "cat", red',
        "b.png": "5 dogs",
    }
