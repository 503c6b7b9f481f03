"""A runner: the forked process that calls a job's function on one item after the other.

        forked ---> on its device ---> waiting <---> working
           |             |                |             |
           +-------------+--- it ends ----+-------------+

It ends at the socket's end of file, with the fork server, or by itself, as by a crash; the job's
process learns of it. It answers each item before it begins the next, so it works on the first of
its items that is unanswered.
"""

import contextlib
import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shmload._devices.destination import Destination
from shmload._ipc.frames import Inbox, send, take_channel
from shmload._jobs.messages import (
    MAX_FRAME_NBYTES,
    Answer,
    Begin,
    Fork,
    LoadFailed,
    Setup,
    Started,
    Work,
    decode_to_runner,
)
from shmload._jobs.payload import dump, dump_error, format_traceback, load
from shmload._placement.inventory import CPU
from shmload._runtimes import kinds
from shmload.errors import ArgumentError
from shmload.integrations.handles import Handle

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ROUND_ROBIN = "round-robin"


def run(channel_fd: int, fork: Fork, setup: Setup) -> None:
    """Serve a job until it is gone; then return, or raise BrokenPipeError from sending."""
    channel = take_channel(channel_fd)
    for name, value in setup.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch.set_num_threads(setup.threads)
    try:
        pipe = Handle.from_text(setup.handle).load()  # the fork server has loaded it
        move(pipe, fork.device, fork.place)
    except Exception as exc:  # the outermost loop: the job must learn of any error
        send(channel, LoadFailed(dump_error(exc), format_traceback()))
        return
    send(channel, Started())
    inbox = Inbox(channel, MAX_FRAME_NBYTES)
    call: Callable[[Work], Answer] | None = None
    while True:
        while (frame := inbox.next_frame()) is not None:
            match decode_to_runner(frame):
                case Begin() as begin:
                    call = _calling(begin, pipe)
                case Work() as work:
                    assert call, "a job sends the function before it sends items"
                    send(channel, call(work))
        if not inbox.receive():
            return


def _calling(begin: Begin, pipe: "DiffusionPipeline") -> Callable[[Work], Answer]:
    """Return a function that works on one item of a map."""
    # Not unpickled before the first item, whose answer then has the error of that.
    function = functools.cache(lambda: load(begin.function))

    def call(work: Work) -> Answer:
        try:
            item = load(work.item)
            value = call_function(function(), pipe, item, begin.seed, work.index)
            return Answer(work.index, dump(value))
        except (Exception, SystemExit) as exc:  # the outermost loop around the user's code
            return Answer(work.index, dump_error(exc), format_traceback())
        finally:
            with contextlib.suppress(OSError, ValueError):  # stdout has no reader, or was closed
                sys.stdout.flush()  # or a kill at the next item would lose what was printed

    return call


def call_function(
    function: Callable[[Any, Any], Any], pipe: "DiffusionPipeline", item: Any, seed: int, index: int
) -> Any:
    """Call a job's function on one item, without gradients and with seeded generators.

    So the result depends on the item and its place alone, not on the process or the order.
    """
    seed_generators(seed, index)
    with torch.no_grad():
        try:
            return function(pipe, item)
        except (AttributeError, TypeError) as exc:
            with contextlib.suppress(Exception):  # a failed note must not hide the error
                _note_absent_components(exc, pipe)
            raise


def _note_absent_components(error: Exception, pipe: "DiffusionPipeline") -> None:
    """Add to an error about None which components of the pipeline are None."""
    absent = sorted(name for name, value in pipe.components.items() if value is None)
    if absent and "'NoneType'" in str(error):
        error.add_note(
            f"None in this pipeline: {', '.join(absent)}; a job may have left them out by its "
            "`components`"
        )


@contextlib.contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Have torch use this many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seed_generators(seed: int, index: int) -> None:
    """Seed the global generators of torch, numpy and Python for one item.

    Args:
        seed: of the job.
        index: of the item.
    """
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "big")
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def move(pipe: "DiffusionPipeline", device: str, place: int) -> None:
    """Move the models of a pipeline to their device.

    Args:
        pipe: on the CPU.
        device: its name, or `round-robin`.
        place: of the runner; for `round-robin` it decides which GPU is its own.

    Raises:
        ArgumentError: torch finds no accelerator here, or not this one.
    """
    if device == CPU:
        return
    names = kinds.accelerator_names()
    if device not in (*names, ROUND_ROBIN) or not names:
        found = " and ".join(names) or "no accelerator"
        raise ArgumentError(f"devices names {device!r}, but torch finds {found} here")
    if device == ROUND_ROBIN:
        device = names[place % len(names)]
    from shmload._building.placing import place_pipeline

    place_pipeline(pipe, Destination(device_map=device))
    kinds.make_current(device)  # the user's code may leave out the index
