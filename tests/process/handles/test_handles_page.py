"""The examples of handles run as docs/share.md prints them."""

import re

import pytest
from forking_python import FINALIZES
from pages import blocks

_SOURCE = "path/to/stable-diffusion"
# Output of each example, in their order.
_PRINTS = {
    "share": r"torch.bfloat16 \d+ bytes as text\n",
    "DataLoader": r"(torch.Size\(\[4, 4, 32, 32\]\)\n){2}",
    "multiprocessing": r"8\n",
    "subprocess": r"torch.bfloat16\n",
}


def examples():
    return [each for each in blocks("share.md") if "shmload.share(" in each]


def test_each_example_is_run_below():
    assert len(examples()) == len(_PRINTS)
    assert all(_SOURCE in example for example in examples())


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(_PRINTS)), ids=_PRINTS)
def test_example_runs(saved, tmp_path, monkeypatch, warm_python, shm_names, place):
    monkeypatch.setenv(FINALIZES, "1")
    path = tmp_path / "example.py"
    path.write_text(examples()[place].replace(_SOURCE, str(saved("stable-diffusion"))))
    ended = warm_python.run(path)
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(list(_PRINTS.values())[place], ended.stdout)
    assert shm_names() == []
