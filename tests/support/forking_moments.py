"""A program that loads in a thread, and forks in its main thread at many moments of these loads.

    python forking_moments.py SOURCE COUNT WAY

The moments lie evenly over the calls and returns of the loading thread's Python code, which stops
at each until the fork is made; but for those at which forks wait. Each child compares the state of
the process with that of the parent at rest, loads by itself, compares its tensors with the
library's, and the state again. So does the parent after each load.

Prints `LOADS`, their number and that of events in one; for each load `FORKED` and the number of
moments so far; for each difference `WRONG`, its moment, and what it is; and `END`.
"""

import contextlib
import faulthandler
import gc
import hashlib
import logging
import os
import select
import sys
import threading
import traceback
import warnings

import diffusers
import torch
import tqdm
import transformers
from diffusers import DiffusionPipeline, ModelMixin

import shmload
from shmload._host import changes

# A child's load takes a second; on a busy machine, with others beside it, some.
_DEADLINE_S = 45
_FORKS_OF_A_LOAD = 5


def owners():
    """Return what the libraries patch while they build models, and have patched before."""
    found = [torch, torch.nn.Module, torch.nn.init, torch.nn.functional, torch.Tensor]
    found += [ModelMixin, transformers.PreTrainedModel, transformers.modeling_utils]
    found += [each for each in vars(torch.nn.modules).values() if type(each) is type(torch)]
    return found


def state():
    """Return the state of this process, by the names of its parts."""
    return {
        "is collected": gc.isenabled(),
        "is frozen": gc.get_freeze_count() > 0,
        "shown warnings": warnings.showwarning,
        "filters": tuple(warnings.filters),
        "variables": dict(os.environ),
        "finders": tuple(sys.meta_path),
        "streams": (sys.stdout, sys.stderr, sys.excepthook, threading.excepthook),
        "records": (logging.getLogRecordFactory(), logging.root.manager.disable),
        "modes": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        "bars": len(tqdm.tqdm._instances),
        "place": (os.getcwd(), sys.getrecursionlimit(), tuple(sys.path)),
        "patched": {
            f"{owner.__name__}.{name}": id(value)
            for owner in owners()
            for name, value in vars(owner).items()
            if callable(value) or isinstance(value, (bool, classmethod, staticmethod))
        },
        **{f"row: {row.name}": row.read() for row in changes.table.values()},
    }


def difference(before, now):
    """Yield in words what differs in two states."""
    for name, value in before.items():
        if now[name] != value:
            if isinstance(value, dict):
                keys = [key for key in value if now[name].get(key) != value[key]]
                yield f"{name}: {keys}"
            else:
                yield f"{name}: {value} became {now[name]}"


def digest(pipe):
    """Return a digest of all tensors of a pipeline's models, with their names and dtypes."""
    found = hashlib.sha256()
    for name, model in sorted(pipe.components.items()):
        if isinstance(model, torch.nn.Module):
            for key, tensor in sorted(model.state_dict().items()):
                found.update(f"{name}.{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Moments:
    """Stops the thread that loads at some of its calls and returns; a context of that thread.

    Args:
        chosen: which, by their number in the load.
    """

    def __init__(self, chosen):
        self._chosen = iter(chosen)
        self._next = next(self._chosen, None)
        self.count = 0
        self._reached, self._going_on = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False

    def __enter__(self):
        sys.setprofile(self._note)

    def __exit__(self, *exc_info):
        sys.setprofile(None)
        self._is_over = True
        self._reached.release()

    def each(self):
        """Yield each moment, to the main thread; the other goes on after each."""
        while True:
            self._reached.acquire()
            if self._is_over:
                return
            yield self.count
            self._going_on.release()

    def _note(self, frame, event, arg):
        self.count += 1
        if self._next and self.count >= self._next and not changes._forking._is_owned():
            self._next = next(self._chosen, None)
            self._reached.release()
            self._going_on.acquire()


def load(source, redirected):
    if redirected:
        return DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    return shmload.load_pipeline(source, torch_dtype=torch.bfloat16)


class Forks:
    """The children; each has written what is wrong into its pipe when it ends."""

    def __init__(self):
        self._running = {}
        self.wrong = []
        self.count = 0

    def fork(self, moment, check):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.enable()
            faulthandler.dump_traceback_later(_DEADLINE_S, exit=True, file=2)
            try:
                lines = list(check())
            except BaseException:
                lines = traceback.format_exc().splitlines()
            os.write(writer, "\n".join(lines).encode()[:60_000])
            os._exit(0)
        os.close(writer)
        self._running[reader] = (pid, moment)
        self.count += 1

    def join(self):
        """Wait for all children.

        Not while the thread is stopped: it may have tqdm's lock, which processes share.
        """
        while self._running:
            for reader in select.select(list(self._running), [], [])[0]:
                pid, moment = self._running.pop(reader)
                with open(reader) as pipe:
                    self.wrong += [(moment, line) for line in pipe.read().splitlines()]
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                if code:
                    self.wrong.append((moment, f"the child hung or crashed: {code}"))


def main(source, count, redirected):
    opened = shmload.redirect() if redirected else contextlib.nullcontext()
    wanted = digest(DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16))
    with opened:
        run(source, count, redirected, wanted)


def run(source, count, redirected, wanted):
    load(source, redirected)  # what only a first load imports
    load(source, redirected)
    counting = Moments(())
    with counting:
        load(source, redirected)
    chosen = [int((n + 0.5) * counting.count / count) for n in range(count)]
    gc.collect()
    before, forks = state(), Forks()

    def check():
        yield from difference(before, state())
        if digest(load(source, redirected)) != wanted:
            yield "other tensors"
        for line in difference(before, state()):
            yield f"after the load: {line}"

    loads = -(-count // _FORKS_OF_A_LOAD)
    print("LOADS", loads, counting.count, flush=True)
    for number in range(loads):
        moments, made = Moments(chosen[number::loads]), []

        def in_thread(moments=moments, made=made):
            with moments:
                pipe = load(source, redirected)
            made.append(digest(pipe))

        thread = threading.Thread(target=in_thread)
        thread.start()
        for moment in moments.each():
            forks.fork(moment, check)
        thread.join()
        forks.join()
        found = list(difference(before, state()))
        if made != [wanted]:
            found.append("other tensors")
        forks.wrong += [(-1, f"the parent: {line}") for line in found]
        print("FORKED", forks.count, flush=True)
    for moment, line in sorted(forks.wrong):
        print("WRONG", moment, line, flush=True)
    print("END", flush=True)


if __name__ == "__main__":
    diffusers.utils.logging.enable_progress_bar()
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "redirected")
