"""Probes of sources on a web server: `python bucket_probes.py NAME ARGUMENTS`."""

import json
import os
import resource
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

Numbers = dict[str, float]

_RANGE_NBYTES = 8 << 20
_REQUESTS = 4


def bare(url: str, processes: int) -> Numbers:
    """Read an object's ranges by obstore in some processes, and drop them.

    Returns:
        `bytes_per_s`, from the first request to the end of the last process.
    """
    return _read(url, processes, None)


def stored(url: str, processes: int) -> Numbers:
    """Read as `bare` does, and write the ranges to a file in shared memory.

    Returns:
        `bytes_per_s`, as `bare`.
    """
    with tempfile.TemporaryFile(dir="/dev/shm") as target:
        return _read(url, processes, target.fileno())


def _read(url: str, processes: int, target: int | None) -> Numbers:
    folder, _, name = url.rpartition("/")
    # Not by obstore: its threads would not be in the forked processes.
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
        nbytes = int(answer.headers["Content-Length"])
    ranges = [(at, min(at + _RANGE_NBYTES, nbytes)) for at in range(0, nbytes, _RANGE_NBYTES)]
    began = time.perf_counter()
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            import obstore
            from obstore.store import from_url

            store = from_url(folder, client_options={"allow_http": True})

            def read(each: tuple[int, int], store: object = store) -> None:
                content = obstore.get_range(store, name, start=each[0], end=each[1])
                if target is not None:
                    os.pwrite(target, content, each[0])

            with ThreadPoolExecutor(_REQUESTS) as pool:
                list(pool.map(read, ranges[number::processes]))
            os._exit(0)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            raise SystemExit("a process failed")
    return {"bytes_per_s": nbytes / (time.perf_counter() - began)}


def warm(url: str, workers: int) -> Numbers:
    """Make an object resident in its own dtype by some workers, and remove it.

    Returns:
        `bytes_per_s` of reading; `cache_nbytes`, what the mirror takes on the disk;
        `worker_nbytes`, the largest resident memory of a worker.
    """
    import shmload
    from shmload._checkpoints.remote import mirror_home

    report = shmload.warm(url, workers=workers)
    shmload.evict(*report.segments)
    blobs = mirror_home(url).rglob("*")
    return {
        "bytes_per_s": report.read_nbytes / report.reading_s,
        "cache_nbytes": sum(512 * path.lstat().st_blocks for path in blobs if path.is_file()),
        "worker_nbytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


if __name__ == "__main__":
    probe, arguments = sys.argv[1:]
    called = {"bare": bare, "stored": stored, "warm": warm}[probe]
    print(json.dumps(called(*json.loads(arguments))))
