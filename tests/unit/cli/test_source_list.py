"""Each line of a preload list is a source, a dtype if any, and what keeps it."""

from pathlib import Path

import pytest

from shmload._cli.source_list import ListedSource, read_list
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
        ListedSource(2, "/a"),
        ListedSource(3, "/b c", ("--dtype=half",)),
        ListedSource(4, "/d", ("--dtype=bfloat16", "--pin")),
        ListedSource(5, "/e", ("--pin",)),
        ListedSource(6, "/f", ("--dtype=fp16", "--keep-for=2h")),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/a half float32", "half and float32 are two dtypes"),
        ("/a half pinn", "unknown dtype 'pinn'"),
        ("/a half pinn", "nor is 'pinn' pin, keep-for=TIME"),
        ("/my model half", "put quotes around a path with spaces"),
        ("/a half vae=float23", "vae=: unknown dtype 'float23'"),
        ("/a half component = unet", "'component'"),
        ("/a half varient=fp16", "varient= is none of the options; did you mean variant=?"),
        ("/a vae=half vae=float32", "the dtype of 'vae' is given twice"),
        ("/a nothing", "unknown dtype 'nothing'"),
        ("/a keep-for=soon", "'soon' is no time to keep something"),
        ("/a keep-for=1h keep-for=2h", "keep-for= stands there 2 times"),
        ("/a pin keep-for=1h", "exclude each other"),
        ("/a 'half", "quotation"),
        ("/a\0b", "no name has a NUL"),
    ],
)
def test_mistake_is_named_with_its_line(tmp_path, line, said):
    with pytest.raises(ArgumentError, match="line 2: ") as caught:
        read(tmp_path, f"/fine\n{line}\n")
    assert said in str(caught.value)


def test_file_without_an_end_is_no_list():
    with pytest.raises(ArgumentError, match="/dev/zero has more than 16777216 bytes"):
        read_list(Path("/dev/zero"))


def test_components_have_dtypes_of_their_own(tmp_path):
    (found,) = read(tmp_path, "/a bfloat16 vae=float32 unet=auto pin\n")
    dtypes = ("--dtype=bfloat16", "--dtype=vae=float32", "--dtype=unet=auto")
    assert found.options == (*dtypes, "--pin")
    assert read(tmp_path, "/a vae=float32\n")[0].options == ("--dtype=vae=float32",)


def test_dtype_may_be_named_as_the_other_options_are(tmp_path):
    assert read(tmp_path, "/a dtype=half\n")[0].options == ("--dtype=half",)
    assert read(tmp_path, "/a dtype=vae=half\n")[0].options == ("--dtype=vae=half",)
