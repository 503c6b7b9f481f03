"""`shmload warm` with several sources, on the command line and in a list."""

import functools
import json

import pytest
from safetensors.torch import save_file
from warming import TENSORS

import shmload


@pytest.fixture
def files(tmp_path, evicts):
    """Three files of weights; the name of the last has a space."""
    paths = [tmp_path / name for name in ("a.safetensors", "b.safetensors", "c d.safetensors")]
    for path in paths:
        save_file(TENSORS, path)
    return paths


@pytest.fixture
def warm(command):
    """Run `shmload warm`; return its exit code, its output and its errors."""
    return functools.partial(command, "warm")


def resident():
    """Return the resident segments: source, conversion and whether each is pinned."""
    return {(info.source, info.conversion, info.is_pinned) for info in shmload.segments()}


def test_lines_of_a_list_have_their_own_options(files, warm, tmp_path):
    listed = tmp_path / "list"
    listed.write_text(f"{files[1]} --dtype float16\n# a comment\n\n'{files[2]}' --pin  # so\n")
    code, out, _ = warm(files[0], "--dtype", "bfloat16", "--list", listed, "--json")
    assert code == 0
    assert [each["source"] for each in json.loads(out)["reports"]] == list(map(str, files))
    assert resident() == {
        (str(files[0]), "BF16", False),
        (str(files[1]), "F16", False),
        (str(files[2]), "raw", True),
    }


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"/m --dtype bfloat17", "unknown dtype 'bfloat17'"),
        (b"/m --dtype vae=half --dtype vae=float32", "the dtype of 'vae' is given twice"),
        (b"/m --keep-for 1h --pin", "exclude each other"),
        (b"/m --list other", "No such option '--list'"),
        (b"'/m", "No closing quotation"),
        (b"/m\xff", "utf-8"),
    ],
)
def test_list_with_a_mistake_is_refused_as_a_whole(files, warm, tmp_path, line, said):
    listed = tmp_path / "list"
    listed.write_bytes(bytes(files[0]) + b"\n" + line + b"\n")
    code, out, err = warm("--list", listed)
    assert (code, out) == (2, "")
    assert said in err
    assert "line" in err
    assert resident() == set()


def test_failure_of_one_leaves_the_others(files, warm):
    files[1].write_bytes(b"nothing")
    code, out, err = warm(*files, "--json")
    assert code == 1
    reports = json.loads(out)["reports"]
    assert ["error" in each for each in reports] == [False, True, False]
    assert str(files[1]) in reports[1]["error"]
    assert reports[1]["error"] in err
    assert {source for source, *_ in resident()} == {str(files[0]), str(files[2])}
