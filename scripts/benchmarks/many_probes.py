"""Programs that start many processes with one pipeline: `python many_probes.py NAME ARGUMENTS`.

Each prints one line of JSON. Times count from the program's start, which the environment variable
STARTED_AT gives on the monotonic clock that all processes of a machine share.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODELS = ("vae", "text_encoder", "unet")
_ITEM_S = 0.05
_ITEMS = 120

Numbers = dict[str, float]

_PLAIN = """
import sys
import torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(
    sys.argv[1], torch_dtype=torch.bfloat16, safety_checker=None, requires_safety_checker=False
)
print("READY", flush=True)
for line in sys.stdin:
    for model in (pipe.vae, pipe.text_encoder, pipe.unet):
        for tensor in model.state_dict().values():
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    print("READ", flush=True)
"""


def plain(source: str, count: int) -> Numbers:
    """Load a pipeline in `count` processes with diffusers alone.

    Returns:
        `ready_s`, when all processes have the pipeline; `pss_nbytes` of all together, after each
        has read all weights.
    """
    return _run_plain(source, count, _PLAIN)


def view(source: str, count: int) -> Numbers:
    """Load a view directory in `count` processes that know nothing of shmload.

    Returns:
        What `plain` does; `ready_s` is without the time to make the directory.
    """
    import shmload

    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHMLOAD_STATE_DIR"] = os.path.join(folder, "state")
        made = shmload.view_directory(
            source, os.path.join(folder, "view"), components=MODELS, dtype="bfloat16"
        )
        os.environ["STARTED_AT"] = str(time.monotonic())
        try:
            return _run_plain(
                made.directory, count, "import sys; sys.modules['shmload'] = None\n" + _PLAIN
            )
        finally:
            shmload.remove_view_directory(made.directory)
            shmload.evict(source)


def _run_plain(source: str, count: int, code: str) -> Numbers:
    command = [sys.executable, "-W", "ignore", "-c", code, source]
    with contextlib.ExitStack() as ending:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ending.enter_context(process)
            ending.callback(process.kill)
            processes.append(process)
        for process in processes:
            _expect(process, "READY")
        ready_s = _since_start()
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            _expect(process, "READ")
        return {"ready_s": ready_s, "pss_nbytes": _pss_nbytes(p.pid for p in processes)}


def job(source: str, count: int) -> Numbers:
    """Load it in the processes of a job; return the same numbers."""
    from shmload.integrations import dataprep

    with (
        dataprep.Job(source, components=MODELS, dtype="bfloat16", procs=count) as made,
        tempfile.TemporaryDirectory() as folder,
    ):
        met = list(made.map(_meet, [(folder, count)] * count))
        ready_s = _since_start()
        pids = {pid for pids in met for pid in pids}
        with tempfile.TemporaryDirectory() as again:
            list(made.map(_read_all, [(again, count)] * count))
        # The fork server and this process count too.
        return {"ready_s": ready_s, "pss_nbytes": _pss_nbytes([*pids, os.getpid()])}


def one_more(source: str, count: int) -> Numbers:
    """Kill one process of a running job.

    Returns:
        `start_s`, from the kill to the first item of the replacement process; `lost_s`, how much
        longer the whole job took, without the repeated item.
    """
    from shmload.integrations import dataprep

    with (
        dataprep.Job(source, components=MODELS, dtype="bfloat16", procs=count) as made,
        tempfile.TemporaryDirectory() as folder,
    ):
        known = {pid for pids in made.map(_meet, [(folder, count)] * count) for pid in pids}
        undisturbed_s = _timed(made, [("", number) for number in range(_ITEMS)])[0]
        mark = os.path.join(folder, "killed")
        took_s, found = _timed(made, [(mark, number) for number in range(_ITEMS)])
        killed_at = float(Path(mark).read_text())
    newcomer = min(at for pid, at in found if pid not in known)
    return {
        "start_s": newcomer - killed_at,
        "lost_s": max(0.0, took_s - undisturbed_s - _ITEM_S),
    }


def _timed(job: Any, items: list[tuple[str, int]]) -> tuple[float, list[tuple[int, float]]]:
    began = time.monotonic()
    found = list(job.map(_wait, items))
    return time.monotonic() - began, found


def _wait(pipe: Any, item: tuple[str, int]) -> tuple[int, float]:
    """Sleep for an item; at one item, the first time, kill the process half-way."""
    mark, number = item
    if mark and number == _ITEMS // 2 and not os.path.exists(mark):
        time.sleep(_ITEM_S / 2)
        Path(mark).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    arrived_at = time.monotonic()
    time.sleep(_ITEM_S)
    return os.getpid(), arrived_at


def _meet(pipe: Any, item: tuple[str, int]) -> tuple[int, int]:
    """Wait until `count` processes are here; return this process's pid and its parent's."""
    folder, count = item
    Path(folder, str(os.getpid())).touch()
    while len([name for name in os.listdir(folder) if name.isdigit()]) < count:
        time.sleep(0.001)
    return os.getpid(), os.getppid()


def _read_all(pipe: Any, item: tuple[str, int]) -> None:
    """Read a byte of each page of each weight, in each process."""
    import torch

    _meet(pipe, item)
    for name in MODELS:
        for tensor in getattr(pipe, name).state_dict().values():
            tensor.reshape(-1).view(torch.uint8)[::4096].sum()


def _expect(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout
    line = process.stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"{line!r} instead of {word}")


def _since_start() -> float:
    return time.monotonic() - float(os.environ["STARTED_AT"])


def _pss_nbytes(pids: Iterator[int] | list[int]) -> int:
    """Return the memory of some processes together; shared pages count once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
