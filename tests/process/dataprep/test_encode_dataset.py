"""scripts/encode_dataset.py encodes every picture and caption, despite kills and bad pictures."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import encode_dataset
import numpy as np
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from light_jobs import wait_until_ended
from PIL import Image
from storing import content_of
from watching import until

import shmload
from shmload.integrations.results import ResultFolder, Results

COUNT = 30
_SCRIPT = Path(encode_dataset.__file__)
_WAITING = f"""
import sys
sys.path.insert(0, {str(_SCRIPT.parent)!r})
import encode_dataset

original = encode_dataset.encode

def encode(pipe, picture):
    import stat, os
    if stat.S_ISFIFO(os.stat(picture.path).st_mode):
        open(picture.path).close()
    return original(pipe, picture)

encode_dataset.encode = encode
encode_dataset.main()
"""
"""The script, but it waits at a picture that is a FIFO."""


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

    def run_here(self, out, *more):
        """Run without processes, which is faster; return exit code and stdout."""
        arguments = [*self.arguments, str(out), "--procs", "0", *more]
        done = CliRunner().invoke(encode_dataset.main, arguments)
        return done.exit_code, done.output

    def run_until_killed(self, out, waiting, *more):
        """Kill the script while its processes block on a FIFO without a writer."""
        fifos = [replace_by_fifo(path) for path in waiting]
        before = journals(out)
        with self.python.starting(_WAITING, *self.arguments, out, *more) as (process, *_):
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
    until(lambda: any(size > before.get(name, 0) for name, size in journals(out).items()))


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_killed_and_resumed_it_gives_the_bytes_of_a_serial_run(
    saved, pictures, tmp_path, warm_python
):
    options = ["--size", "32", "--shard-items", "8"]
    encoding = Encoding(warm_python, *options, saved("stable-diffusion"), pictures)
    code, words = encoding.run_here(tmp_path / "serial")
    assert code == 0, words
    assert "no text file beside" in words
    assert f"without a caption: 1 of {COUNT}" in words
    assert f"{COUNT} pictures, {COUNT} of them in this run, 0 failed" in words

    out = tmp_path / "out"
    found = sorted(path for path in pictures.rglob("*") if path.suffix in (".png", ".jpg", ".webp"))
    assert len(found) == COUNT
    broken = found[-2]  # a run that is killed does not come so far
    content = broken.read_bytes()
    broken.write_bytes(content[:50])
    # test_dataprep_resumed.py has a job that is killed a second time.
    encoding.run_until_killed(out, found[20:22], "--procs", "2")

    code, words, errors = encoding.run(out, "--procs", "2")
    assert code == 3
    assert "1 failed" in words
    key = str(broken.relative_to(pictures))
    assert list(Results(out).errors) == [key]
    assert "Error: " in Results(out).errors[key]
    assert key in errors

    broken.write_bytes(content)
    code, words = encoding.run_here(out, "--retry-failed")
    assert code == 0, words
    assert f"{COUNT} pictures, 1 of them in this run, 0 failed" in words
    assert content_of(out) == content_of(tmp_path / "serial")
    results = Results(out)
    assert list(results) == [str(path.relative_to(pictures)) for path in found]
    assert {name: tensor.shape for name, tensor in results[0].items()} == {
        "latents": (4, 16, 16),
        "text.0": (77, 32),
    }


class Pipe:
    """Stands in for a pipeline: a picture's latents are its first pixel, a caption its length."""

    components: ClassVar = {}
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self):
        self.image_processor = self.vae = self.text_encoder = self

    def preprocess(self, image):
        pixel = torch.tensor(image.getpixel((0, 0)), dtype=torch.float32)
        return pixel[None, :, None, None].expand(1, 3, *image.size)

    def encode(self, pixels):
        return SimpleNamespace(latent_dist=SimpleNamespace(sample=lambda: pixels[..., 0, 0]))

    def encode_prompt(self, prompt, device):
        return torch.tensor([[len(prompt)]]), None, torch.ones(1, 2)


@pytest.fixture
def encode_here(tmp_path, pipeline, monkeypatch):
    """Run the script here on five pictures with a pipeline that stands in for a real one.

    Returns exit code and output, with the messages; the results are in `tmp_path / "out"`.
    """
    monkeypatch.setattr(shmload.Handle, "load", lambda handle: Pipe())
    monkeypatch.setattr(encode_dataset, "choose_components", lambda pipeline, given, size: None)
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    for number in range(5):
        path = folder / ("b" if number > 2 else "") / f"{number}.png"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
        path.with_suffix(".txt").write_text("x" * number)

    def run(*options):
        arguments = [str(pipeline), str(folder), str(tmp_path / "out"), "--procs", "0", *options]
        done = CliRunner().invoke(encode_dataset.main, arguments)
        return done.exit_code, done.output

    return run


def test_picture_that_stays_broken_is_said_and_does_not_fail_later_runs(
    encode_here, tmp_path, monkeypatch
):
    (tmp_path / "in" / "1.png").write_bytes(b"no picture")
    code, words = encode_here()
    assert code == 3
    assert "4 of them in this run, 1 failed" in words
    with monkeypatch.context() as patch:
        patch.setattr(shmload.Handle, "load", lambda handle: pytest.fail("it loads"))
        code, words = encode_here()
    assert code == 0
    assert "0 of them in this run, 1 failed" in words
    assert "failed, in this run or earlier:\n  1.png: UnidentifiedImageError" in words
    assert "--retry-failed" in words
    assert encode_here("--retry-failed")[0] == 3
    (tmp_path / "in" / "1.png").write_bytes((tmp_path / "in" / "2.png").read_bytes())
    assert encode_here("--retry-failed")[0] == 0
    assert len(Results(tmp_path / "out")) == 5


def test_pipeline_that_fails_at_every_picture_ends_the_job_with_one_error(
    encode_here, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Pipe, "encode_prompt", lambda pipe, prompt: pipe.tokenizer_2)
        code, words = encode_here()
    assert code == 1
    (line,) = words.splitlines()
    assert line.startswith("encode_dataset: the first 5 items failed with the same error")
    assert "'Pipe' object has no attribute 'tokenizer_2'" in line
    assert encode_here("--size", "64")[0] == 0  # nothing was stored that would bind this run
    assert len(Results(tmp_path / "out")) == 5


def test_only_the_first_pictures_are_encoded_with_a_limit(encode_here, tmp_path):
    assert encode_here("--limit", "3")[0] == 0
    assert list(Results(tmp_path / "out")) == ["0.png", "1.png", "2.png"]
    assert "2 of them in this run" in encode_here()[1]
    assert "5 pictures, 0 of them in this run" in encode_here("--limit", "2")[1]


def test_pictures_may_come_and_go(encode_here, tmp_path):
    assert encode_here()[0] == 0
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "00.png")
    (tmp_path / "in" / "1.png").unlink()
    code, words = encode_here()
    assert code == 0, words
    assert "any more: 1.png; results stay" in words
    assert "6 pictures, 1 of them in this run, 0 failed" in words
    before = ["0.png", "1.png", "2.png", "b/3.png", "b/4.png"]
    assert list(Results(tmp_path / "out")) == [*before, "00.png"]


def test_picture_at_which_a_run_died_may_be_removed(encode_here, tmp_path, monkeypatch):
    interrupt = KeyboardInterrupt
    folder = tmp_path / "in"
    add = ResultFolder.add

    def add_last_first(results, index, key, arrays):
        """Store the last item alone, as if a process were still at each of the others."""
        if index == 4:
            add(results, index, key, arrays)
            raise interrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultFolder, "add", add_last_first)
        assert encode_here()[0] == 130
    (folder / "1.png").unlink()
    code, words = encode_here()
    assert code == 3, words
    assert "5 pictures, 3 of them in this run, 1 failed" in words
    (error,) = Results(tmp_path / "out").errors.values()
    assert error.endswith("1.png was removed before it was encoded")
    assert encode_here()[0] == 0


def test_other_formats_have_the_same_names(encode_here, tmp_path):
    assert encode_here("--format", "parquet")[0] == 0
    assert Results(tmp_path / "out")["1.png"].keys() == {"latents", "text.0", "text.1"}


def test_results_are_stored_in_the_dtype_asked_for(encode_here, tmp_path):
    assert encode_here("--save-dtype", "bf16")[0] == 0
    found = Results(tmp_path / "out")[4]
    assert (found["latents"].dtype, found["text.1"].dtype) == (torch.bfloat16,) * 2
    assert found["text.0"].dtype == torch.int64
    assert "save_dtype" in encode_here()[1]
    assert "no_dtype" in encode_here("--save-dtype", "no_dtype")[1]


TABLES = {
    "a.csv": 'file_name,text\n0.png,one\nb/4.png," four,"\n',
    "a.tsv": "file_name\ttext\n0.png\tone\nb/4.png\t four,\n",
    "a.jsonl": '{"file_name": "0.png", "text": "one"}\n{"file_name":"b/4.png","text":"four,"}\n',
}


@pytest.mark.parametrize("name", [*TABLES, "a.parquet"])
def test_captions_come_from_a_table(encode_here, tmp_path, name):
    table = tmp_path / name
    if name == "a.parquet":
        names, texts = ["0.png", "b/4.png"], ["one", "four,"]
        pyarrow.parquet.write_table(pyarrow.table({"file_name": names, "text": texts}), table)
    else:
        table.write_text(TABLES[name])
    code, words = encode_here("--captions", str(table))
    assert code == 0
    assert f"{table} has no caption for 1.png; without one: 3 of 5" in words
    lengths = [int(tensors["text.0"]) for _, tensors in Results(tmp_path / "out").items()]
    assert lengths == [3, 0, 0, 0, 5]
    assert "'captions'" in encode_here()[1]


def test_wrong_use_is_a_sentence_with_exit_code_2(encode_here, tmp_path):
    table = tmp_path / "a.csv"
    for content, option, says in [
        (TABLES["a.csv"], "--caption-column=x", "there is no column 'x'; it has file_name, text"),
        (
            "file_name,text\n7.png,one\n",
            "--limit=1",
            "nor for any other picture; it has '7.png', for instance; see --file",
        ),
    ]:
        table.write_text(content)
        code, words = encode_here("--captions", str(table), option)
        assert (code, says in " ".join(words.split())) == (2, True)
    table.with_suffix(".jsonl").write_text("{")
    assert encode_here("--captions", str(table.with_suffix(".jsonl")))[0] == 2
    shutil.rmtree(tmp_path / "in")
    (tmp_path / "in").mkdir()
    code, words = encode_here()
    assert code == 2
    assert "there is no picture in" in words


def test_interrupt_is_a_sentence_that_says_how_to_go_on(encode_here, monkeypatch):
    def interrupted(pipe, prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr(Pipe, "encode_prompt", interrupted)
    code, words = encode_here()
    assert code == 130
    assert "interrupted; run it again, it goes on where it was" in words
    assert "Aborted" not in words


def test_what_cannot_be_done_is_one_sentence(tmp_path, pipeline, warm_python):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "a.png")
    code, words, errors = Encoding(warm_python, tmp_path / "none", tmp_path / "in").run(
        tmp_path / "out"
    )
    assert (code, words) == (1, "")
    assert errors.startswith("encode_dataset: ")
    assert errors.count("\n") == 1
    assert Encoding(warm_python, pipeline, tmp_path / "nowhere").run(tmp_path / "out")[0] == 2
