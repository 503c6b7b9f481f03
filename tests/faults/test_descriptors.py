"""A load in a process short of descriptors fails with a clear error, and nothing is left."""

import json
import subprocess
import sys
from itertools import product

import pytest

# Raises the limit one by one, from no free descriptor, until a load succeeds.
SQUEEZE = """
import errno, json, os, resource, sys
import shmload
from shmload._loading import holdings
source, how, is_resident = sys.argv[1], sys.argv[2], sys.argv[3] == "resident"
def view(source, **kwargs):
    with shmload.view(source, **kwargs):
        pass
def state_dict(source, torch_dtype):
    shmload.load_state_dict(source, torch_dtype)
door = {"warm": shmload.warm, "view": view, "state_dict": state_dict}[how]
def descriptors():
    return sorted(os.listdir("/proc/self/fd"), key=int)[:-1]  # without the list's own
def names():
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith("shmload-"))
def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read()
door(source, torch_dtype="bfloat16")  # imports what it imports
for info in shmload.segments():
    shmload.evict(info.name)
if is_resident:
    shmload.warm(source, torch_dtype="bfloat16")
# Else a load would raise the limit.
holdings.allow_descriptors = lambda count: None
hard, refusals = resource.getrlimit(resource.RLIMIT_NOFILE)[1], []
for limit in range(int(descriptors()[-1]) + 1, 256):
    before = descriptors(), names(), children()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        door(source, torch_dtype="bfloat16")
        error = None
    except (shmload.ShmloadError, OSError) as exc:
        assert isinstance(exc, shmload.ShmloadError) or exc.errno == errno.EMFILE
        error = exc
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if error is None:
        break
    refusals.append(str(error))
    assert (descriptors(), names(), children()) == before
print("REFUSALS", json.dumps(refusals), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("door", "where", "inline_nbytes"),
    [
        *product(["warm", "view", "state_dict"], ["absent", "resident"], [1 << 30]),
        ("view", "absent", 0),  # with workers, which are the same for each door
    ],
)
def test_too_few_descriptors(checkpoint, child, configure, evicts, door, where, inline_nbytes):
    # The timeout would show a load that waits for its own lost lock.
    configure(inline_nbytes=inline_nbytes, workers=2, wait_timeout_s=1, service="off")
    process = child(SQUEEZE, checkpoint, door, where)
    refusals = json.loads(process.expect("REFUSALS"))
    assert refusals
    for refusal in refusals:
        assert "too many open files" in refusal.lower()


WITHOUT_STREAMS = """
import json, os, sys
import shmload
source, out, progress = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
seen = []
def look(done, total):
    seen.append([os.readlink(f"/proc/self/fd/{number}") for number in range(3)])
shmload.warm(source, dtype="bfloat16", progress=progress)
shmload.warm(source, dtype="float16", progress=look)
open(out, "w").write(json.dumps([sys.stderr is None, seen[0]]))
"""


@pytest.mark.parametrize("progress", ["null", "true"])
def test_process_without_standard_streams(checkpoint, tmp_path, evicts, progress):
    out = tmp_path / "out"
    program = [sys.executable, "-c", WITHOUT_STREAMS, str(checkpoint), str(out), progress]
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program], timeout=60, check=True)
    # No part has one of their numbers: what a library prints must not go into weights.
    assert json.loads(out.read_text()) == [True, ["/dev/null"] * 3]
