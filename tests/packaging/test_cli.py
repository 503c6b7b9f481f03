"""The command line works as a user runs them."""

import json
import sys

import pytest
import torch
from children import run_to_end
from safetensors.torch import save_file

import shmload


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(1000.0), "b": torch.ones(3, 5)}, path)
    yield path
    mine = [info.name for info in shmload.segments() if info.source == str(path)]
    if mine:
        shmload.evict(*mine)


def _run(*arguments, expected=0):
    done = run_to_end([sys.executable, *map(str, arguments)])
    assert done.returncode == expected, done.stderr
    return done


def _shmload(*arguments, expected=0):
    return _run("-m", "shmload", *arguments, expected=expected)


def test_warm_twice_says_already_resident(checkpoint):
    assert "read" in _shmload("warm", checkpoint, "--dtype", "bf16").stdout
    assert "already resident" in _shmload("warm", checkpoint, "--dtype", "bf16").stdout


def test_listing_as_json_is_what_the_api_says(checkpoint):
    _shmload("warm", checkpoint)
    listed = json.loads(_shmload("ls", "--json").stdout)
    (mine,) = (entry for entry in listed["models"] if entry["source"] == str(checkpoint))
    assert mine["name"] == "model.safetensors"
    names = [entry["name"] for entry in mine["segments"]]
    assert names == list(shmload.warm(checkpoint).segments)
    assert "model.safetensors" in _shmload("ls").stdout
    assert str(checkpoint) in _shmload("ls", "--long").stdout


def test_plan_names_what_would_be_done(checkpoint):
    planned = json.loads(_shmload("plan", checkpoint, "--dtype", "fp16", "--json").stdout)
    (shard,) = planned["plan"]["shards"]
    assert (shard["action"], shard["conversion"], shard["tensors"]) == ("decode", "F16", 2)
    shown = _shmload("plan", checkpoint, "--dtype", "fp16").stdout
    assert "decode" in shown
    assert f"{shmload.plan(checkpoint, dtype='fp16')}\n" == shown


def test_remove_by_source(checkpoint):
    _shmload("warm", checkpoint)
    assert "removed 1 segment," in _shmload("rm", checkpoint).stdout
    assert all(info.source != str(checkpoint) for info in shmload.segments())


def test_verify_and_gc(checkpoint):
    _shmload("warm", checkpoint)
    assert "sound: 1 segment, " in _shmload("verify", checkpoint).stdout
    checkpoint.write_bytes(checkpoint.read_bytes())  # same bytes, new mtime: counts as changed
    assert "removed 1 " in _shmload("gc").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("warm", "/no/such/model"), "/no/such/model: no such file or directory"),
        (("plan", "/no/such/model"), "/no/such/model: no such file or directory"),
        (("rm", "/no/such/model"), "no resident model or segment matches '/no/such/model'"),
        (("verify", "nothing"), "no resident model or segment matches 'nothing'"),
    ],
)
def test_failure_is_one_line_and_exit_code_one(arguments, sentence):
    done = _shmload(*arguments, expected=1)
    assert done.stderr.startswith("shmload: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_wrong_dtype_names_the_known_ones(checkpoint):
    done = _shmload("warm", checkpoint, "--dtype", "bfloat17", expected=2)
    assert "unknown dtype 'bfloat17'" in done.stderr
    assert "bfloat16" in done.stderr


def test_wrong_usage_is_exit_code_two():
    assert "Usage" in _shmload("rm", expected=2).stderr
    assert "Usage" in _shmload("warm", expected=2).stderr


def test_warm_goes_on_after_a_source_that_fails(checkpoint):
    done = _shmload("warm", "/no/such/model", checkpoint, "--dtype", "bf16", expected=1)
    assert "/no/such/model: no such file" in done.stderr
    assert "resident in 1 segment" in done.stdout
