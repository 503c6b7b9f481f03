"""What measured processes run: fresh Python processes that measure themselves.

`Bench.ask` starts one for a function of a suite. Such a function imports what it measures itself,
before its clock starts, so that only the standard library and the harness are there at its begin.
"""

import importlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from shmload._host.procfs import rollup_nbytes

Numbers = dict[str, float]

_PAGE_NBYTES = 4096


def main() -> None:
    """Call the function of a module with JSON arguments, and print its result as the last line."""
    module, name, arguments = sys.argv[1:]
    found = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print("\n" + json.dumps(found), flush=True)


def command_of(function: Callable[..., Any], *arguments: object) -> list[str]:
    """Return the command of a process that calls a function of a module; paths become text."""
    texts = [str(each) if isinstance(each, Path) else each for each in arguments]
    code = "from benchmarks.probes import main; main()"
    where = function.__module__, function.__name__
    return [sys.executable, "-P", "-c", code, *where, json.dumps(texts)]


class Clients:
    """Processes that work in step: each answers when it has started, and whenever it is asked.

    They run `tell` to answer, and wait for a line on stdin before they go on.
    """

    def __init__(self, command: list[str], count: int) -> None:
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
        ]
        self.pids = [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def ask(self) -> list[str]:
        """Have all go on; return their answers."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        return self.hear()

    def hear(self) -> list[str]:
        """Return an answer of each; the libraries may print other lines."""
        return [self._hear(process) for process in self._processes]

    def _hear(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("ANSWER "):
                return line.removeprefix("ANSWER ").strip()
        raise RuntimeError(f"process {process.pid} ended early, with {process.wait()}")


def tell(answer: object = "") -> None:
    """Answer, in one of `Clients`."""
    print(f"ANSWER {answer}", flush=True)


def time_call(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds; drop its result after the clock stops."""
    began = time.perf_counter()
    result = call()
    elapsed_s = time.perf_counter() - began
    del result
    return elapsed_s


def touch(models: Iterable[Any]) -> int:
    """Read one byte of every page of every weight; return the weights' size in bytes."""
    import torch

    from shmload._building.mapped import plain_tensors

    nbytes = 0
    with torch._C.DisableTorchFunctionSubclass():  # diffusers' quantised parameters refuse a sum
        for model in models:
            for tensor in itertools.chain(*map(plain_tensors, model.state_dict().values())):
                flat = tensor.data.reshape(-1).view(torch.uint8)
                flat[::_PAGE_NBYTES].sum()
                nbytes += flat.numel()
    return nbytes


def used_cpu_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def private_nbytes() -> int:
    """Return this process's private memory in bytes: anonymous pages and page tables.

    Private_Dirty would be wrong: it counts a page of a shared segment as private while only this
    process maps it.
    """
    return rollup_nbytes(os.getpid(), "Anonymous:") + status_nbytes("VmPTE")


def pss_nbytes(pids: Iterable[int]) -> int:
    """Return the memory of some processes together; shared pages count once."""
    return sum(rollup_nbytes(pid, "Pss:") for pid in pids)


def status_nbytes(kind: str) -> int:
    """Return an amount in this process's status, such as `VmHWM`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def warm(source: str, workers: int | None = None) -> Numbers:
    """Make a source resident in bfloat16 and leave it resident.

    Returns:
        `call_s` and read `bytes_per_s` of the whole call; `decode_bytes_per_s` of the coordinator's
        part, from when all workers are ready; 0 if nothing was decoded.
    """
    import shmload
    from shmload._decoding.coordinator import Coordinator

    run = Coordinator.run
    decode_s: list[float] = []

    def timed(self: Coordinator, *args: Any, **kwargs: Any) -> Any:
        # A worker's first message says that it is ready.
        waiting = {worker.channel for worker in self._workers}
        while waiting:
            waiting -= set(select.select(list(waiting), (), ())[0])
        began = time.perf_counter()
        try:
            return run(self, *args, **kwargs)
        finally:
            decode_s.append(time.perf_counter() - began)

    Coordinator.run = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    report = shmload.warm(source, dtype="bfloat16", workers=workers, progress=False)
    call_s = time.perf_counter() - began
    return {
        "call_s": call_s,
        "bytes_per_s": report.read_nbytes / call_s,
        "decode_bytes_per_s": report.read_nbytes / sum(decode_s) if decode_s else 0,
    }
