"""Faults that tests inject into a load: files that change, workers that die or stop."""

import os


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")


def append(path):
    with path.open("ab") as file:
        file.write(b"x")


def overwrite_and_set_the_clock_back(path):
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = [overwrite, append, overwrite_and_set_the_clock_back]


# Workers ------------------------------------------------------------------------------------------


WORKER = """#!{python}
import os, signal, socket, sys
with open({starts!r}, "a") as file:
    file.write("started\\n")
def is_first():
    try:
        os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
from shmload._host.frames import *
from shmload.workers.messages import *
from shmload.workers import fill, main as program
channel_fd, parent = int(sys.argv[-2]), int(sys.argv[-1])
def harm_when_writing(harm):
    write = fill._write
    def harmful(*args):
        write(*args)
        harm()
    fill._write = harmful
def say(*messages):
    with socket.socket(fileno=os.dup(channel_fd)) as channel:
        for message in messages:
            send(channel, message)
{code}
serve_parent(program.serve)
"""
DIE = "harm_when_writing(lambda: os.kill(os.getpid(), signal.SIGKILL))"
DIE_ONCE = "harm_when_writing(lambda: is_first() and os.kill(os.getpid(), signal.SIGKILL))"
STOP = "harm_when_writing(lambda: os.kill(os.getpid(), signal.SIGSTOP))"
STOP_ONCE = "harm_when_writing(lambda: is_first() and os.kill(os.getpid(), signal.SIGSTOP))"
