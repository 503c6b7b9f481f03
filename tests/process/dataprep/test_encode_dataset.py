"""scripts/encode_dataset.py encodes every picture and caption, despite kills and bad pictures."""

import os
import time
from pathlib import Path

import encode_dataset
import numpy as np
import pytest
from click.testing import CliRunner
from light_jobs import wait_until_ended
from PIL import Image
from storing import content_of

from shmload.integrations.results import Results

COUNT = 30
_SCRIPT = Path(encode_dataset.__file__)


@pytest.fixture
def pictures(tmp_path):
    """A folder of pictures of several formats, shapes and modes; one has no caption."""
    folder = tmp_path / "pictures"
    random = np.random.default_rng(0)
    for number in range(COUNT):
        path = folder / f"{number % 3}" / f"{number:02}.{('png', 'jpg', 'webp')[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (20 + number, 40, 4) if number == 6 else (20 + number, 40, 3)
        Image.fromarray(random.integers(0, 255, shape, np.uint8)).save(path)
        if number != 9:
            path.with_suffix(".txt").write_text(f"a cat, the red dog number {number}\n")
    (folder / "readme.md").write_text("no picture")
    return folder


class Encoding:
    """Runs of the script."""

    def __init__(self, python, *arguments):
        self.python = python
        self.arguments = [str(argument) for argument in arguments]

    def run(self, out, *more):
        """Run the script; return exit code, stdout and stderr."""
        done = self.python.run(_SCRIPT, *self.arguments, out, *more)
        return done.returncode, done.stdout, done.stderr

    def run_here(self, out):
        """Run without processes, which is faster; return exit code and stdout."""
        done = CliRunner().invoke(encode_dataset.main, [*self.arguments, str(out), "--procs", "0"])
        return done.exit_code, done.output

    def run_until_killed(self, out, waiting, *more):
        """Kill the script while its processes block on a FIFO without a writer."""
        fifos = [replace_by_fifo(path) for path in waiting]
        before = journals(out)
        with self.python.starting(_SCRIPT, *self.arguments, out, *more) as (process, *_):
            wait_for_growth(out, before)
            (server,) = children_of(process.pid)
            runners = children_of(server)
            assert len(runners) == len(waiting)
        wait_until_ended(server, *runners)
        for path, aside in fifos:
            aside.rename(path)


def replace_by_fifo(path):
    """Replace a picture by a FIFO, so that opening it blocks."""
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    os.mkfifo(path)
    return path, aside


def journals(out):
    """Return the size of each journal, by name."""
    return {path.name: path.stat().st_size for path in out.glob("*.journal")}


def wait_for_growth(out, before):
    """Wait until the journals have grown."""
    deadline = time.monotonic() + 60
    while all(size <= before.get(name, 0) for name, size in journals(out).items()):
        assert time.monotonic() < deadline, "no results"


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_and_resumed_it_gives_the_bytes_of_a_serial_run(
    saved, pictures, tmp_path, warm_python
):
    options = ["--size", "32", "--shard-items", "8"]
    encoding = Encoding(warm_python, *options, saved("stable-diffusion"), pictures)
    code, words = encoding.run_here(tmp_path / "serial")
    assert code == 0, words
    assert f"{COUNT} pictures, {COUNT} of them in this run, 0 failed" in words

    out = tmp_path / "out"
    found = sorted(path for path in pictures.rglob("*") if path.suffix in (".png", ".jpg", ".webp"))
    assert len(found) == COUNT
    broken, content = found[4], found[4].read_bytes()
    broken.write_bytes(content[:50])
    encoding.run_until_killed(out, found[10:12], "--procs", "2")
    encoding.run_until_killed(out, found[20:22], "--procs", "2")

    code, words, errors = encoding.run(out, "--procs", "2")
    assert code == 1
    assert "1 failed" in words
    key = str(broken.relative_to(pictures))
    assert list(Results(out).errors) == [key]
    assert "image" in Results(out).errors[key]
    assert key in errors

    broken.write_bytes(content)
    code, words = encoding.run_here(out)
    assert code == 0, words
    assert f"{COUNT} pictures, 1 of them in this run, 0 failed" in words
    assert content_of(out) == content_of(tmp_path / "serial")
    results = Results(out)
    assert list(results) == [str(path.relative_to(pictures)) for path in found]
    assert {name: tensor.shape for name, tensor in results[0].items()} == {
        "latents": (4, 16, 16),
        "text.0": (77, 32),
    }


def test_what_cannot_be_done_is_one_sentence(tmp_path, pipeline, warm_python):
    (tmp_path / "in").mkdir()
    code, words, errors = Encoding(warm_python, tmp_path / "none", tmp_path / "in").run(
        tmp_path / "out"
    )
    assert (code, words) == (1, "")
    assert errors.startswith("encode_dataset: ")
    assert errors.count("\n") == 1
    assert Encoding(warm_python, pipeline, tmp_path / "nowhere").run(tmp_path / "out")[0] == 2
