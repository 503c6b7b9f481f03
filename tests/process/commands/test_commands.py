"""A command says what the API says, or fails with one sentence and its exit code."""

import json

import diffusers
import pytest

import shmload


def test_listing_as_json_is_what_the_api_says(command, checkpoint):
    assert "read" in command("warm", checkpoint)[1]
    assert "already resident" in command("warm", checkpoint)[1]
    _, printed, _ = command("ls", "--json")
    (mine,) = json.loads(printed)["models"]
    assert (mine["source"], mine["name"]) == (str(checkpoint), checkpoint.name)
    names = [entry["name"] for entry in mine["segments"]]
    assert names == list(shmload.warm(checkpoint).segments)
    assert str(checkpoint) in command("ls", "--long")[1]


def test_plan_names_what_would_be_done(command, checkpoint):
    _, printed, _ = command("plan", checkpoint, "--dtype", "fp16", "--json")
    (shard,) = json.loads(printed)["plan"]["shards"]
    assert (shard["action"], shard["conversion"], shard["tensors"]) == ("decode", "F16", 3)
    _, printed, _ = command("plan", checkpoint, "--dtype", "fp16")
    assert printed == f"{shmload.plan(checkpoint, dtype='fp16')}\n"


def test_verify_gc_and_rm(command, checkpoint):
    command("warm", checkpoint)
    assert "sound: 1 segment, " in command("verify", checkpoint)[1]
    assert "pinned 1 segment" in command("pin", checkpoint)[1]
    assert "unpinned 1 segment" in command("unpin", checkpoint)[1]
    checkpoint.write_bytes(checkpoint.read_bytes())  # same bytes, new mtime: counts as changed
    assert "removed 1 " in command("gc")[1]
    command("warm", checkpoint)
    assert "removed 1 segment," in command("rm", checkpoint)[1]
    assert shmload.segments() == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("warm", "/no/such/model"), "/no/such/model: no such file or directory"),
        (("plan", "/no/such/model"), "/no/such/model: no such file or directory"),
        (("rm", "/no/such/model"), "no resident model or segment matches '/no/such/model'"),
        (("verify", "nothing"), "no resident model or segment matches 'nothing'"),
    ],
)
def test_failure_is_one_line_and_exit_code_one(command, arguments, sentence):
    code, printed, said = command(*arguments)
    assert (code, printed, said.count("\n")) == (1, "", 1)
    assert said.startswith("shmload: ")
    assert sentence in said


@pytest.mark.usefixtures("evicts")
def test_place_that_the_kernel_refuses_is_named_in_one_line(command):
    published = shmload.publish(diffusers.AutoencoderKL(), "small")
    said = "shmload: /proc/none: No such file or directory\n"
    assert command("save", published.source, "/proc/none") == (1, "", said)


@pytest.mark.parametrize("verb", ["rm", "warm"])
def test_wrong_usage_is_exit_code_two(command, verb):
    code, _, said = command(verb)
    assert code == 2
    assert "Usage" in said
