"""A folder of results: the same bytes after any kill, and a clear error for what cannot be."""

import json
import os
import resource
import signal
import subprocess
import sys
from random import Random

import cloudpickle
import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import webdataset
from torch.utils.data import DataLoader
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
import os, signal, sys, threading
from shmload.integrations import dataprep

folder, log, kill_at, delay_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
owner = os.getpid()

def work(pipe, item):
    import random
    import numpy as np
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, b"%8d\\n" % os.getpid())
    begun = os.fstat(fd).st_size // 9
    os.close(fd)
    if begun == kill_at:
        threading.Timer(delay_s, os.kill, (owner, signal.SIGKILL)).start()
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
    assert run_program(place / "results", place / "log") == 0
    return place / "results"


def run_program(folder, log, kill_at=0, delay_s=0.0):
    command = [sys.executable, "-c", PROGRAM, folder, log, str(kill_at), str(delay_s)]
    return subprocess.run(command, timeout=60, stdout=subprocess.DEVNULL, check=False).returncode


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 50))]
)
def test_killed_at_any_moment_it_resumes_with_equal_bytes(number, tmp_path, undisturbed, digest_of):
    random = Random(number)
    folder, log = tmp_path / "results", tmp_path / "log"
    kill_at, delay_s = random.randrange(1, COUNT), random.choice([0, random.random() / 50])
    assert run_program(folder, log, kill_at, delay_s) in (-signal.SIGKILL, 0)
    until(lambda: not any(os.path.exists(f"/proc/{int(pid)}") for pid in log.read_text().split()))
    before = len(log.read_text().split())
    done = sum(len(json.loads(path.read_text())["keys"]) for path in folder.glob("shard-*.json"))
    assert run_program(folder, log) == 0
    assert digest_of(folder) == digest_of(undisturbed)
    again = len(log.read_text().split()) - before
    assert again <= COUNT - done + 3 * SHARD  # twice more for the item that kills its process
    assert before - done <= PROCS * SHARD + 3 * SHARD


def test_interrupt_ends_it_at_once_and_it_resumes(tmp_path, new_child, digest_of):
    code = """
        import os, sys, time
        from shmload.integrations import dataprep
        def work(pipe, item):
            import numpy as np
            if item == 9 and not os.path.exists(sys.argv[2]):
                open(sys.argv[2], "w").close()
                print("AT", os.getppid(), flush=True)
                time.sleep(3600)
            return {"a": np.array([item])}
        with dataprep.Job(None, procs=2) as job:
            job.write(work, range(20), sys.argv[1], shard_items=4, progress=False)
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    code = code.replace("sys.argv[2]", repr(str(tmp_path / "mark")))
    child = new_child(code, tmp_path / "results")
    child.expect("AT")
    os.kill(child.pid, signal.SIGINT)
    assert child.wait() == -signal.SIGINT
    assert child.errors.count("Traceback") == 1
    assert new_child(code, tmp_path / "results").wait() == 0
    assert len(dataprep.Results(tmp_path / "results")) == 20


# Resuming -----------------------------------------------------------------------------------------


def test_finished_folder_starts_no_process(job, folder, digest_of):
    first = job().write(squares, range(20), folder, shard_items=8)
    assert first == dataprep.Report(items=20, computed=20, failed=1, shards=3)
    before = digest_of(folder)
    made = job()
    again = made.write(squares, range(20), folder, shard_items=8)
    assert again == dataprep.Report(items=20, computed=0, failed=1, shards=3)
    assert made._pool._runners == []
    assert digest_of(folder) == before


def test_items_may_be_added_at_the_end(job, folder, tmp_path, digest_of):
    made = job()
    made.write(squares, range(10), folder, shard_items=8)
    assert made.write(squares, range(20), folder, shard_items=8).computed == 12
    made.write(squares, range(20), tmp_path / "whole", shard_items=8)
    assert digest_of(folder) == digest_of(tmp_path / "whole")


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


def test_shard_whose_file_is_gone_is_done_again(job, folder, digest_of):
    made = job()
    made.write(squares, range(8), folder, shard_items=4)
    before = digest_of(folder)
    (folder / "shard-00001.safetensors").unlink()
    assert made.write(squares, range(8), folder, shard_items=4).computed == 4
    assert digest_of(folder) == before


def test_items_that_cannot_be_stored_fail_alone(job, folder):
    values = [np.ones(2), [1], np.array(["a"]), np.ones(1, ">f4"), None, object()]

    def give(pipe, item):
        return {"a": values[item]} if item else np.ones(2)

    assert job().write(give, range(6), folder).failed == 6
    errors = [*dataprep.Results(folder).errors.values()]
    assert "the function returned a ndarray" in errors[0]
    assert all("'a' is a " in error for error in errors[1:])
    report = job().write(
        lambda pipe, item: {item: np.ones(1)}, ["", "a/b", "ok"], folder.with_name("b")
    )
    assert report.failed == 2


def test_item_that_cannot_be_sent_fails_alone(job, folder):
    import threading

    items = [1, threading.Lock(), 3]
    assert job().write(lambda p, i: {"a": np.array([i])}, items, folder, key=str).failed == 1
    assert len(dataprep.Results(folder)) == 2


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
        with pytest.raises(shmload.ResultsError, match="is written by another job"):
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


# Reading ------------------------------------------------------------------------------------------


def test_results_are_read_by_place_and_by_key(job, folder):
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


@pytest.mark.parametrize("workers", [0, 2])
def test_results_are_a_data_set_for_the_data_loader(job, folder, workers):
    job().write(squares, range(17), folder, shard_items=4)
    loader = DataLoader(dataprep.Results(folder), 4, num_workers=workers)
    assert [n for batch in loader for n in batch["half"].tolist()] == [n / 2 for n in range(17)]


def test_unfinished_folder_cannot_be_read(tmp_path):
    with pytest.raises(shmload.ResultsError, match="has no index of results"):
        dataprep.Results(tmp_path)


DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "float8_e4m3fn"),
]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Folders with an item of each dtype, one that failed, and another, by format."""

    def give(pipe, item):
        import torch

        if item == 1:
            raise ValueError("odd")
        arrays = {name: torch.ones(2, 3).to(getattr(torch, name)) for name in DTYPES}
        return arrays | {"scalar": torch.tensor(item), "none": torch.ones(0, 2)}

    place = tmp_path_factory.mktemp("stored")
    with dataprep.Job(None, procs=1, preload=["torch"]) as job:
        for format in ("safetensors", "parquet", "webdataset"):
            folder = place / format
            report = job.write(give, range(3), folder, key=lambda n: f"{n}.png", format=format)
            assert report.failed == 1
    return place


def assert_stored(found, number):
    assert found.pop("scalar") == number
    assert found.pop("none").shape == (0, 2)
    assert [*found] == sorted(DTYPES)
    for name, tensor in found.items():
        wanted = torch.ones(2, 3).to(getattr(torch, name))
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))


def test_every_dtype_is_stored_exactly(stored):
    for number in (0, 2):
        assert_stored(dataprep.Results(stored / "safetensors")[f"{number}.png"], number)


def test_parquet_is_read_by_pyarrow_as_the_page_shows(stored):
    def tensor(array):
        dtype = getattr(torch, array["dtype"])
        content = bytearray(array["data"])
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(array["shape"])

    rows = pyarrow.parquet.read_table(stored / "parquet" / "shard-00000.parquet").to_pylist()
    assert [row.pop("key") for row in rows] == ["0.png", "2.png"]
    for number, row in zip((0, 2), rows, strict=True):
        assert_stored({name: tensor(array) for name, array in row.items()}, number)
    with pytest.raises(shmload.ResultsError, match="has the format parquet"):
        dataprep.Results(stored / "parquet")[0]


# Its reader leaves the files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_is_read_by_its_library_as_the_page_shows(stored):
    decode = webdataset.handle_extension("safetensors", safetensors.torch.load)
    shards = [str(path) for path in sorted((stored / "webdataset").glob("*.tar"))]
    samples = [*webdataset.WebDataset(shards, shardshuffle=False).decode(decode)]
    assert [sample["json"]["key"] for sample in samples] == ["0.png", "2.png"]
    for number, sample in zip((0, 2), samples, strict=True):
        found = sample["safetensors"]
        assert_stored({name: found[name] for name in sorted(found)}, number)


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_other_formats_resume_with_equal_bytes(job, folder, tmp_path, digest_of, format):
    made = job()
    arguments = {"format": format, "shard_items": 4}
    made.write(squares, range(20), tmp_path / "whole", **arguments)
    made.write(squares, range(6), folder, **arguments)
    made.write(squares, range(20), folder, **arguments)
    assert digest_of(folder) == digest_of(tmp_path / "whole")


def test_arrays_that_only_some_items_have_are_null_in_parquet(job, folder):
    job().write(lambda p, i: {f"a{i % 2}": np.ones(1)}, range(2), folder, format="parquet")
    rows = pyarrow.parquet.read_table(folder / "shard-00000.parquet").to_pylist()
    assert [(row["a0"] is None, row["a1"] is None) for row in rows] == [
        (False, True),
        (True, False),
    ]
    with pytest.raises(shmload.JobError, match="no array may be called 'key'"):
        job().write(lambda p, i: {"key": np.ones(1)}, [1], folder.with_name("b"), format="parquet")
