"""A trace says where the time of a call goes: phases that are disjoint and add up to its time."""

import itertools
import json
import os
import time

import pytest
import torch

import shmload

pytestmark = pytest.mark.libraries

# Of the clock, and of the file that is written behind the last phase.
_SLACK_S = 0.1


def _events(path):
    """Return the segments of each track by its name, and what the calls say of themselves."""
    events = json.loads(path.read_text())
    names = {each["tid"]: each["args"]["name"] for each in events if each["ph"] == "M"}
    calls = [each for each in events if "find" in each["args"]]
    tracks = {name: [] for name in names.values()}
    for each in events:
        if each["ph"] == "X" and each not in calls:
            tracks[names[each["tid"]]].append(each)
    return tracks, calls


def _times(call):
    return {name: value for name, value in call["args"].items() if name != "error"}


def _assert_adds_up(call, elapsed_s):
    assert sum(_times(call).values()) == pytest.approx(call["dur"] / 1e6, rel=0.01)
    assert call["dur"] / 1e6 == pytest.approx(elapsed_s, rel=0.01, abs=_SLACK_S)


def _load(*args, **kwargs):
    began = time.monotonic()
    made = shmload.load_pipeline(*args, **kwargs)
    return made, time.monotonic() - began


def test_first_load_and_a_recall_add_up_on_tracks_of_their_own(
    saved, evicts, configure, tmp_path, caplog
):
    configure(inline_nbytes=0, remember=True)
    trace = tmp_path / "trace.json"
    caplog.set_level("INFO", "shmload")
    _, elapsed_s = _load(saved("flux"), torch_dtype=torch.bfloat16, keep=True, trace=trace)
    tracks, (first,) = _events(trace)
    _assert_adds_up(first, elapsed_s)
    assert first["args"]["build"] > 0
    assert first["args"]["recall"] == 0
    assert {"caller", "load"} < tracks.keys()
    workers = [name for name in tracks if name.startswith("worker ")]
    pieces = [each for name in workers for each in tracks[name]]
    assert {each["name"] for each in pieces} == {"read and cast"}
    assert {os.path.basename(os.path.dirname(each["args"]["what"])) for each in pieces} == {
        *("text_encoder", "text_encoder_2", "transformer", "vae")
    }
    for segments in tracks.values():
        for one, other in itertools.pairwise(segments):
            assert one["ts"] + one["dur"] <= other["ts"] + 2  # each is rounded to microseconds
    assert "loaded: " in caplog.text
    # A recall adds to the same file.
    _, elapsed_s = _load(saved("flux"), torch_dtype=torch.bfloat16, trace=trace)
    _, (_, second) = _events(trace)
    _assert_adds_up(second, elapsed_s)
    assert second["args"]["recall"] > 0
    assert second["args"]["read and cast"] == second["args"]["build"] == 0


def test_load_that_fails_writes_its_trace(copied, tmp_path):
    folder, trace = copied("flux"), tmp_path / "trace.json"
    (shard,) = (folder / "vae").glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(shmload.CheckpointError) as caught:
        shmload.load_pipeline(folder, trace=trace)
    _, (call,) = _events(trace)
    assert call["args"]["error"] == type(caught.value).__name__
    assert sum(_times(call).values()) == pytest.approx(call["dur"] / 1e6, rel=0.01)


@pytest.mark.parametrize("content", [b"weights", b"[]"])
def test_other_files_are_refused_before_anything_is_done(saved, tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(shmload.ArgumentError, match=f"{path} is a file of another kind"):
        shmload.load_pipeline(saved("flux"), trace=path)
    assert path.read_bytes() == content
    with pytest.raises(shmload.ArgumentError, match="cannot be written: No such file"):
        shmload.load_pipeline(saved("flux"), trace=tmp_path / "none" / "trace.json")
