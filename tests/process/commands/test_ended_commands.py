"""A command that SIGTERM or SIGHUP ends leaves nothing, as after Ctrl-C."""

import signal

import pytest

# Prints once its load fills a part, and waits for a line before it fills more.
WARM = """
import signal, sys
from shmload import __main__
from shmload._loading import progress
source, how = sys.argv[1:]
signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
stopped = []
add = progress.Progress.add
def stop(self, nbytes):
    if not stopped:
        stopped.append(True)
        print("AT", flush=True)
        sys.stdin.readline()
    add(self, nbytes)
progress.Progress.add = stop
sys.argv[1:] = ["warm", source, "--dtype", "bfloat16"]
__main__.run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_warm_leaves_nothing(checkpoint, new_child, shm_names, number):
    process = new_child(WARM, checkpoint, "")
    process.expect("AT")
    assert [name.endswith(".part") for name in shm_names()] == [True]
    process.process.send_signal(number)
    process.say()
    assert process.wait() == 130
    assert process.errors == "shmload: interrupted\n"
    assert shm_names() == []


def test_ignored_signal_stays_ignored(checkpoint, new_child, evicts):
    process = new_child(WARM, checkpoint, "nohup")
    process.expect("AT")
    process.process.send_signal(signal.SIGHUP)
    process.say()
    assert process.wait() == 0
