"""A process of a job: calls the job's function on one task after the other.

        started ---> ready ---> working ---> ready
           |           |           |
           +-----------+-----------+--- it ends, and the job's process learns of it

Guarantee: it writes nothing for a job that is gone. Its first message that is not taken ends it.
"""

import contextlib
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from shmload.errors import ArgumentError
from shmload.integrations.dataprep.crossing import Channel, Part, dump, dump_error, load
from shmload.integrations.dataprep.prepared import Setup, pipeline_of
from shmload.integrations.dataprep.shards import perform

Function = Callable[[Any, Any], Any]
"""Called with the pipeline and an item."""


class Caller:
    """Calls a job's function, without gradients and with seeded generators.

    So a result depends on the item and its number alone, not on the process or the order.

    Args:
        pipe: the pipeline, or None.
        function: of the job.
        setup: of the job.
    """

    def __init__(self, pipe: Any, function: Function, setup: Setup) -> None:
        self._pipe = pipe
        self._function = function
        self._seed = setup.seed
        self._is_on_cpu = setup.device == "cpu"

    def __call__(self, number: int, item: Any) -> Any:
        """Return what the function returns for one item."""
        digest = blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "big")
        random.seed(value)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(value & 0xFFFFFFFF)
        torch = sys.modules.get("torch")
        if torch is None:
            return self._function(self._pipe, item)
        # `torch.manual_seed` takes 0.2 ms, for devices that are not in use.
        seed = torch.default_generator.manual_seed if self._is_on_cpu else torch.manual_seed
        seed(value)
        with torch.no_grad():
            return self._function(self._pipe, item)


def serve(end: socket.socket, setup: Setup, place: int) -> None:
    """Work for a job until it is gone.

    Args:
        end: of the job's socket.
        setup: of the job.
        place: of this process among those of the job, from 0.
    """
    channel, this = Channel(end), os.getpid()

    def tell(kind: str, *parts: Part) -> None:
        if os.getpid() != this:  # forked by the function, which has returned there too
            os._exit(0)
        try:
            channel.send(kind, *parts)
        except OSError:  # the job is gone, and its folder may be another's
            os._exit(1)

    try:
        pipe = pipeline_of(setup)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(setup.threads)
        if pipe is not None and setup.device != "cpu":
            move(pipe, setup.device, place)
    except Exception as exc:  # the outermost loop: the job must learn of any error
        tell("broken", *dump_error(exc))
        return
    tell("ready")
    function: Part = b""
    call: Caller | None = None
    locks: list[int] = []
    while True:
        try:
            kind, parts = channel.receive()
        except (EOFError, OSError):
            return
        if kind == "begin":
            function, call = parts[0], None
            while locks:
                os.close(locks.pop())
            if parts[1]:  # the lock of a folder, which lasts as long as a process works for it
                locks += socket.recv_fds(channel.socket, 1, 1)[1]
            continue
        try:
            call = call or Caller(pipe, load([function]), setup)
            shard, rows, killed = pickle.loads(parts[0])
            value = perform(shard, rows, killed, call, lambda number: tell("at", b"%d" % number))
            kind, parts = "done", dump(value)
        except (Exception, SystemExit) as exc:  # the outermost loop around the user's code
            kind, parts = "failed", dump_error(exc)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            sys.stdout.flush()  # or a kill at the next item would lose what was printed
        tell(kind, *parts)


def move(pipe: Any, device: str, place: int) -> None:
    """Move the models of a pipeline to their device.

    Args:
        pipe: on the CPU.
        device: its name, such as `cuda:1`; `cuda` for the next of all GPUs.
        place: of this process among those of the job.

    Raises:
        ArgumentError: torch finds no such device here.
    """
    import torch

    kind, _, number = device.partition(":")
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if hasattr(module, "device_count") else 0
    chosen = int(number) if number else place % max(count, 1)
    if chosen >= count:
        raise ArgumentError(f"device is {device!r}, but torch finds {count} of {kind!r} here")
    module.set_device(chosen)  # the function may leave out the number
    pipe.to(f"{kind}:{chosen}")
