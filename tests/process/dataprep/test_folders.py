"""A folder of results: the same bytes after any kill, and a clear error for what cannot be."""

import errno
import json
import os
import resource
import signal
import sys
import threading
from random import Random

import cloudpickle
import numpy as np
import pytest
import torch
from children import limited, run_to_end
from watching import until

import shmload
from shmload.integrations import dataprep

# Else the processes would import this module, and with it torch.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT, SHARD, PROCS = 60, 4, 3


def squares(pipe, item):
    if item == 17:
        raise ValueError("odd")
    return {"square": np.array([item * item]), "half": np.array(item / 2)}


# Kills --------------------------------------------------------------------------------------------

PROGRAM = (
    """
import os, sys, threading
from shmload.integrations import dataprep

folder, log, kill_at, delay_s, number = sys.argv[1:]
owner = os.getpid()

def work(pipe, item):
    import random
    import numpy as np
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%8d\\n" % os.getpid())
    begun = os.fstat(fd).st_size // 9
    os.close(fd)
    if begun == int(kill_at):
        threading.Timer(float(delay_s), os.kill, (owner, int(number))).start()
    if item == 17:
        raise ValueError("odd")
    if item == 29:
        os._exit(9)
    return {"a": np.full(3, item), "random": np.array([random.random()])}

with dataprep.Job(None, procs=PROCS) as job:
    print(job.write(work, range(COUNT), folder, shard_items=SHARD, progress=False))
""".replace("PROCS", str(PROCS))
    .replace("COUNT", str(COUNT))
    .replace("SHARD", str(SHARD))
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    place = tmp_path_factory.mktemp("undisturbed")
    assert run_program(place / "results", place / "log").returncode == 0
    return place / "results"


def run_program(folder, log, kill_at=0, delay_s=0.0, number=signal.SIGKILL):
    words = map(str, (PROGRAM, folder, log, kill_at, delay_s, int(number)))
    return run_to_end([sys.executable, "-c", *words])


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 50))]
)
def test_killed_at_any_moment_it_resumes_with_equal_bytes(number, tmp_path, undisturbed, digest_of):
    random = Random(number)
    folder, log = tmp_path / "results", tmp_path / "log"
    kill_at, delay_s = random.randrange(1, COUNT), random.choice([0, random.random() / 50])
    assert run_program(folder, log, kill_at, delay_s).returncode in (-signal.SIGKILL, 0)
    until(lambda: not any(os.path.exists(f"/proc/{int(pid)}") for pid in log.read_text().split()))
    before = len(log.read_text().split())
    done = sum(len(json.loads(path.read_text())["keys"]) for path in folder.glob("shard-*.json"))
    assert run_program(folder, log).returncode == 0
    assert digest_of(folder) == digest_of(undisturbed)
    again = len(log.read_text().split()) - before
    assert again <= COUNT - done + 3 * SHARD  # twice more for the item that kills its process
    assert before - done <= PROCS * SHARD + 3 * SHARD


def test_interrupt_ends_it_and_it_resumes(tmp_path, undisturbed, digest_of):
    folder, log = tmp_path / "results", tmp_path / "log"
    ended = run_program(folder, log, kill_at=9, number=signal.SIGINT)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.count("Traceback") == 1
    assert run_program(folder, log).returncode == 0
    assert digest_of(folder) == digest_of(undisturbed)


# Resuming -----------------------------------------------------------------------------------------


def test_what_is_there_is_not_done_again(job, folder, digest_of):
    first = job().write(squares, range(20), folder, shard_items=8)
    assert first == dataprep.Report(items=20, computed=20, failed=1, shards=3)
    before = digest_of(folder)
    made = job()
    again = made.write(squares, range(20), folder, shard_items=8)
    assert again == dataprep.Report(items=20, computed=0, failed=1, shards=3)
    assert made._pool._runners == []  # no process was started
    (folder / "shard-00000.safetensors").unlink()
    (folder / "shard-00001.json").write_bytes(b'{"keys":["0')  # after a loss of power
    assert made.write(squares, range(20), folder, shard_items=8).computed == 16
    assert digest_of(folder) == before


def test_items_may_be_added_at_the_end(job, folder, tmp_path, digest_of):
    made = job()
    made.write(squares, range(10), folder, shard_items=8)
    assert made.write(squares, range(20), folder, shard_items=8).computed == 12
    made.write(squares, range(20), tmp_path / "whole", shard_items=8)
    assert digest_of(folder) == digest_of(tmp_path / "whole")


def test_arrays_without_a_list_go_when_fewer_items_follow(job, folder, tmp_path, digest_of):
    made = job()
    made.write(squares, range(20), folder, shard_items=8)
    (folder / "shard-00001.json").unlink()
    with pytest.raises(shmload.ResultsError, match="it has more than these 8 items"):
        made.write(squares, range(8), folder, shard_items=8)
    for name in ("shard-00002.json", "index.jsonl"):  # as after kills, once the arrays were there
        (folder / name).unlink()
    made.write(squares, range(8), folder, shard_items=8)
    made.write(squares, range(8), tmp_path / "whole", shard_items=8)
    assert digest_of(folder) == digest_of(tmp_path / "whole")


def test_only_temporary_files_of_shmload_go(job, folder):
    left = ["mine.tmp", "shard-mine.safetensors", "folder.00000000.tmp", "results.json"]
    (folder / "folder.00000000.tmp").mkdir(parents=True)
    for name in ("mine.tmp", "shard-mine.safetensors", "shard-00000.json.01234abc.tmp"):
        (folder / name).touch()
    job().write(squares, range(3), folder)
    made = ["index.jsonl", "shard-00000.json", "shard-00000.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(left + made)


def test_failed_items_are_tried_again_when_asked(job, folder, first_time):
    def fail_once(pipe, item):
        if item == 3 and first_time("failure"):
            raise OSError("the disk is away")
        return {"a": np.array([item])}

    made = job()
    arguments = {"folder": folder, "shard_items": 4}
    assert made.write(fail_once, range(8), **arguments).failed == 1
    assert dataprep.Results(folder).errors == {"00000003": "OSError: the disk is away"}
    assert made.write(fail_once, range(8), **arguments).failed == 1
    report = made.write(fail_once, range(8), **arguments, retry=True)
    assert report == dataprep.Report(items=8, computed=4, failed=0, shards=2)
    assert dataprep.Results(folder).errors == {}


def test_items_that_cannot_be_stored_fail_alone(job, folder):
    results = [
        np.ones(2),
        *({"a": each} for each in ([1], np.array(["a"]), np.ones(1, ">f4"), None)),
        *({name: np.ones(1)} for name in ("", "a/b", "ok")),
    ]
    items = [*range(8), threading.Lock()]
    assert job().write(lambda pipe, item: results[item], items, folder).failed == 8
    errors = [*dataprep.Results(folder).errors.values()]
    assert "the function returned a ndarray" in errors[0]
    assert all("'a' is a " in error for error in errors[1:5])
    assert "cannot be sent" in errors[7]


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"facts": {"size": "256"}}, "its size is '512', and now '256'"),
        ({"facts": {}}, "its size is '512', and now None"),
        ({"shard_items": 4}, "its shard_items is '8', and now '4'"),
        ({"format": "parquet"}, "its format is 'safetensors'"),
        ({"items": range(1, 20)}, r"shard-00000\.json lists other items"),
        ({"items": range(12)}, r"shard-00001\.json lists other items"),
        ({"items": range(8)}, "it has more than these 8 items"),
    ],
)
def test_other_facts_or_items_change_nothing(job, folder, digest_of, change, said):
    arguments = {"items": range(20), "shard_items": 8, "facts": {"size": "512"}, "key": str}
    made = job()
    made.write(squares, folder=folder, **arguments)
    before = digest_of(folder)
    with pytest.raises(shmload.ResultsError, match=said):
        made.write(squares, folder=folder, **arguments | change)
    assert digest_of(folder) == before
    with pytest.raises(shmload.ResultsError, match="its seed is '0', and now '1'"):
        job(seed=1).write(squares, folder=folder, **arguments)


def test_wrong_arguments_are_refused(job, folder):
    made = job()
    for arguments, said in [
        ({"format": "zip"}, "format is 'zip'; it must be one of safetensors"),
        ({"shard_items": 0}, "shard_items is 0"),
        ({"facts": {"seed": "1"}}, "facts has 'seed'"),
        ({"facts": {"crop": [1, 2]}}, r"facts has \[1, 2\] as 'crop'; give text"),
        ({"key": int}, "the key of item 0 is 0; give text"),
        ({"key": lambda item: "\udcff"}, "give text that UTF-8 can encode"),
    ]:
        with pytest.raises(shmload.ArgumentError, match=said):
            made.write(squares, range(3), folder, **arguments)
    with pytest.raises(shmload.ArgumentError, match="item 1 has the key 'same'"):
        made.write(squares, range(3), folder, key=lambda item: "same")


def test_folder_of_another_job_is_refused_until_it_ends(job, folder):
    one, other = job(), job()

    def items():
        yield from range(8)
        with pytest.raises(shmload.ResultsError, match=r"is written by .* another folder$"):
            other.write(squares, range(20), folder)

    one.write(squares, items(), folder, shard_items=4)
    assert other.write(squares, range(12), folder, shard_items=4).computed == 4


def test_full_disk_is_an_error_that_names_the_file_and_loses_nothing(job, folder):
    def large(pipe, item):
        if item == 5 and limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        return {"a": np.ones(1000)}

    limit = 4096
    with pytest.raises(shmload.ResultsError, match=r"shard-00001\.safetensors cannot be"):
        job(procs=1).write(large, range(8), folder, shard_items=4)
    limit = 0
    report = job(procs=1).write(large, range(8), folder, shard_items=4)
    assert report == dataprep.Report(items=8, computed=4, failed=0, shards=2)


def test_folder_that_cannot_be_written_is_an_error(job, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "/proc/results"):
        with pytest.raises(shmload.ResultsError, match="cannot be written"):
            job().write(squares, range(3), folder)


def test_what_cannot_be_read_or_locked_is_an_error(job, folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    made = job()
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", refuse)
        with pytest.raises(shmload.ResultsError, match="No locks available"):
            made.write(squares, range(3), folder)
    made.write(squares, range(3), folder)
    facts, listed = folder / "results.json", folder / "shard-00000.json"
    whole = listed.read_bytes()
    listed.unlink()
    listed.mkdir()
    with pytest.raises(shmload.ResultsError, match=r"shard-00000\.json cannot be .*directory"):
        made.write(squares, range(3), folder)
    listed.rmdir()
    listed.write_bytes(whole)
    (folder / "index.jsonl").write_text("cut")
    with pytest.raises(shmload.ResultsError, match="run the job again"):
        dataprep.Results(folder)
    assert made.write(squares, range(3), folder).computed == 0
    assert len(dataprep.Results(folder)) == 3
    for content in (b"cut", b"\xff", b"[1]"):
        facts.write_bytes(content)
        with pytest.raises(
            shmload.ResultsError, match=r"results\.json is damaged.* another folder$"
        ):
            made.write(squares, range(3), folder)
        with pytest.raises(shmload.ResultsError, match=str(folder)):
            dataprep.Results(folder)


def test_disk_that_is_full_from_the_start_is_an_error(job, folder):
    said = "cannot be written"
    with limited(resource.RLIMIT_FSIZE, 16), pytest.raises(shmload.ResultsError, match=said):
        job().write(squares, range(3), folder)
    assert job().write(squares, range(3), folder).computed == 3


# Reading ------------------------------------------------------------------------------------------


def test_results_are_read_by_place_and_by_key(job, folder):
    with pytest.raises(shmload.ResultsError, match="has no index of results"):
        dataprep.Results(folder)
    items = [3, 17, 5]
    job().write(squares, items, folder, key=lambda item: f"a/{item}.png")
    results = dataprep.Results(folder)
    assert (len(results), results.keys) == (2, ["a/3.png", "a/5.png"])
    assert results[0] == {"half": torch.tensor(1.5), "square": torch.tensor([9])}
    assert results["a/5.png"]["square"] == results[-1]["square"] == results[:2][1]["square"] == 25
    assert [found["square"].item() for found in results] == [9, 25]
    with pytest.raises(KeyError, match=r"'a/17\.png' failed: ValueError: odd"):
        results["a/17.png"]
    with pytest.raises(KeyError):
        results["a/4.png"]
    with pytest.raises(IndexError):
        results[2]
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"cut")
    with pytest.raises(shmload.ResultsError, match=r"shard-00000\.safetensors"):
        dataprep.Results(folder)[0]


def test_every_dtype_is_stored_exactly(job, folder):
    names = [
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
        *("float64", "complex64", "float8_e4m3fn"),
    ]

    def give(pipe, item):
        arrays = {name: torch.ones(2, 3).to(getattr(torch, name)) for name in names}
        return arrays | {"scalar": torch.tensor(item), "none": torch.ones(0, 2)}

    job(preload=["torch"]).write(give, [7], folder)
    (found,) = dataprep.Results(folder)
    wanted = give(None, 7)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name])


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_other_formats_resume_with_equal_bytes(job, folder, tmp_path, digest_of, format):
    made = job()
    arguments = {"format": format, "shard_items": 4}
    made.write(squares, range(20), tmp_path / "whole", **arguments)
    made.write(squares, range(6), folder, **arguments)
    made.write(squares, range(20), folder, **arguments)
    assert digest_of(folder) == digest_of(tmp_path / "whole")
