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
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from shmload.errors import ArgumentError, JobError
from shmload.integrations.dataprep.crossing import Memory, Parcel, dump, dump_error
from shmload.integrations.dataprep.processes import Setup, inherited, prepared, set_threads
from shmload.integrations.dataprep.shards import Row, Task, write_shard

Function = Callable[[Any, Any], Any]
"""Called with the pipeline and an item."""

_BATCH_S = 0.2
_BATCH_NBYTES = 1 << 20


class Entry(NamedTuple):
    """What the standard library's fork server calls in a new process of a job."""

    setup: Setup
    place: int
    """The number of the process in its job, from 0."""

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Work for the job until it is gone."""
        connection, memory = inherited()
        pipe, error = prepared(self.setup)
        try:
            if error:
                raise error
            set_threads(self.setup.threads)
            if pipe is not None and self.setup.device != "cpu":
                move(pipe, self.setup.device, self.place)
        except Exception as exc:  # the outermost loop: the job must learn of any error
            _tell(connection, "broken", [dump_error(exc)])
            return 0
        _tell(connection, "ready")
        pickled, call = b"", None
        while True:
            try:
                function, task = connection.recv()
            except (EOFError, OSError):
                return 0
            if function is not None:
                pickled, call = function, None
            memory.clear()
            parcels: list[Parcel] = []
            try:
                call = call or _caller(pipe, pickle.loads(pickled), self.setup, memory)
                if task.path:
                    parcels.append(dump(write_shard(task, call), memory))
                else:
                    _compute(task, call, memory, parcels)
            except (Exception, SystemExit) as exc:  # the outermost loop around the user's code
                parcels.append(dump_error(exc))
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                sys.stdout.flush()  # or a kill at the next item would lose what was printed
            _tell(connection, "done", parcels)


def _tell(connection: Connection, kind: str, parcels: Sequence[Parcel] = ()) -> None:
    try:
        connection.send((kind, parcels))
    except OSError:  # the job is gone, and its folder may be another's
        os._exit(1)


def _caller(pipe: Any, function: Function, setup: Setup, memory: Memory) -> Callable[[Row], Any]:
    """Return what calls a job's function, without gradients and with seeded generators.

    So a result depends on the item and its number alone, not on the process or the order.
    """
    is_on_cpu = setup.device == "cpu"
    this = os.getpid()

    def call(row: Row) -> Any:
        memory.begin(row.number)
        if row.refusal:
            raise JobError(row.refusal)
        digest = blake2b(f"{setup.seed}/{row.number}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed & 0xFFFFFFFF)
        item = pickle.loads(row.item)
        if torch := sys.modules.get("torch"):
            torch.set_grad_enabled(False)
            # `torch.manual_seed` takes 0.2 ms, for devices that are not in use.
            (torch.default_generator if is_on_cpu else torch).manual_seed(seed)
        try:
            return function(pipe, item)
        finally:
            if os.getpid() != this:  # forked by the function, which has returned there too
                os._exit(0)

    return call


def _compute(task: Task, call: Callable[[Row], Any], memory: Memory, parcels: list[Parcel]) -> None:
    """Compute some of the first items, at least one.

    The others are handed back after `_BATCH_S`, or when the memory has `_BATCH_NBYTES`.

    Args:
        task: the items.
        call: computes one.
        memory: of this process.
        parcels: gets their results.
    """
    began = time.monotonic()
    for row in task.rows:
        try:
            parcels.append(dump(call(row), memory))
        except (Exception, SystemExit) as exc:
            parcels.append(dump_error(exc))
        if time.monotonic() - began > _BATCH_S or memory.used > _BATCH_NBYTES:
            return


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
