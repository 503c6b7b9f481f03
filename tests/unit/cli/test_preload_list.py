"""Each line of a preload list is a source, a dtype if any, and what keeps it."""

import pytest

from shmload._cli.preload import ListedSource, read_list
from shmload.errors import ArgumentError


def read(tmp_path, text):
    path = tmp_path / "preload"
    path.write_text(text)
    return read_list(path)


def test_words_after_the_source_come_in_any_order(tmp_path):
    found = read(
        tmp_path,
        "# a comment\n/a\n'/b c' half\n/d bfloat16 pin\n/e pin\n/f keep-for=2h fp16  # so\n",
    )
    assert found == [
        ListedSource(2, "/a", None),
        ListedSource(3, "/b c", "half"),
        ListedSource(4, "/d", "bfloat16", is_pinned=True),
        ListedSource(5, "/e", None, is_pinned=True),
        ListedSource(6, "/f", "fp16", keep_for="2h"),
    ]
    assert found[2].options() == ["--dtype", "bfloat16", "--pin"]
    assert found[4].options() == ["--dtype", "fp16", "--keep-for", "2h"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/a half float32", "more than SOURCE and DTYPE"),
        ("/a nothing", "unknown dtype 'nothing'"),
        ("/a keep-for=soon", "'soon' is no time to keep something"),
        ("/a keep-for=1h keep-for=2h", "more than SOURCE and DTYPE, pin or keep-for=TIME"),
        ("/a pin keep-for=1h", "exclude each other"),
        ("/a 'half", "quotation"),
    ],
)
def test_mistake_is_named_with_its_line(tmp_path, line, said):
    with pytest.raises(ArgumentError, match="line 2: ") as caught:
        read(tmp_path, f"/fine\n{line}\n")
    assert said in str(caught.value)
