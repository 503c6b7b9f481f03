"""A branch: a copy of a template that has loaded pipelines ahead, and is copied for programs.

    template ──fork──▶ loads, gives the segments up ──▶ serves ──▶ drains ──▶ ends
                                  └── cannot: says why, and ends

Its calls come from the template, over a socket. Each of its copies has the pipelines at once, so
the next one is ready some milliseconds after a call. It drains when the template closes the socket,
or is gone.
"""

import _socket
import contextlib
import gc
import os
import select
from collections.abc import Callable
from typing import Any, NoReturn

from shmload._host.procfs import rollup_nbytes
from shmload._templates import messages, wire
from shmload._templates.connections import refuse
from shmload._templates.copies import Unfit, in_copy
from shmload._templates.messages import Call, State
from shmload._templates.pipelines import Pipelines
from shmload._templates.rights import Peer
from shmload._templates.serving import Serving

# A third of what a program gets: at 10 a branch takes 35 s to load on cores that are always busy.
_NICENESS = 5


# Some errors of the libraries name each key of a checkpoint.
_MAX_REASON = 500


class Branch:
    """Loads pipelines, and serves the programs that want them.

    Args:
        orders: to and from the template.
        pipelines: loads them.
        become: see `Serving`.
    """

    def __init__(
        self,
        orders: wire.Socket,
        pipelines: Pipelines,
        become: Callable[[wire.Socket], Callable[[], Any]],
    ) -> None:
        self._orders = orders
        self._pipelines = pipelines
        self._become = become

    def run(self, requests: tuple[str, ...], modules: list[list[str]]) -> NoReturn:
        """Load pipelines and serve; end this process, or raise `Born` in a copy.

        Args:
            requests: the pipelines.
            modules: what the load of each has imported in a program, as far as that is known.
        """
        with _low_priority():
            try:
                self._pipelines.load(requests, modules)
            except Exception as exc:  # whatever it is, programs load by themselves
                reason = str(exc) if isinstance(exc, Unfit) else f"{type(exc).__name__}: {exc}"
                self._say(State(0, 0, 0, 0, 0, reason[:_MAX_REASON]))
                os._exit(0)
            gc.collect()
            gc.freeze()
        nbytes = rollup_nbytes(os.getpid(), "Private_")  # its copies share it
        self._serving = serving = Serving(self._become_program)
        serving.fork()
        poll = serving.poll
        poll.register(self._orders.fileno(), select.POLLIN)
        is_draining = False
        while serving.programs or not is_draining:
            loaded = self._pipelines.loaded
            self._say(
                State(1, loaded, nbytes, serving.programs, serving.spare, self._pipelines.why_not)
            )
            wait_s = serving.wait_s()
            for fd, _ in poll.poll(None if wait_s is None else 1000 * wait_s):
                if fd == serving.waking:
                    serving.reap()
                elif fd != self._orders.fileno():
                    serving.end_if_lost(fd)
                elif not self._take_call():
                    poll.unregister(fd)
                    is_draining = True
                    serving.end_spare()
            if not is_draining:
                serving.tend()
        os._exit(0)

    def _take_call(self) -> bool:
        """Hand a call to the spare; return False if no more will come."""
        try:
            found = messages.receive(self._orders, Call)
        except (OSError, ValueError):
            return False
        if found is None:
            return False
        call, (fd,) = found
        try:
            peer = Peer(wire.take(fd))
        except OSError:  # the caller has ended
            return True
        if self._pipelines.freshness and self._pipelines.freshness.is_lost():
            refuse(peer, "stale: a package has changed")
            # The template makes another branch then. What it has sent before still comes.
            self._orders.shutdown(_socket.SHUT_RDWR)
            return True
        try:
            self._serving.start(call, peer)
        except OSError:  # the caller sees the end of the socket, and runs the program itself
            peer.close()
        return True

    def _become_program(self, orders: wire.Socket) -> Callable[[], Any]:
        self._orders.close()
        self._serving.close_all()
        return self._become(orders)

    def _say(self, state: State) -> None:
        with contextlib.suppress(OSError):  # the template is gone, or reads no more for now
            messages.send(self._orders, state, waits=False)


@contextlib.contextmanager
def _low_priority() -> Any:
    """Leave the processor to others in a block, where a process can take it back afterwards."""

    def down_and_up() -> str:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, _NICENESS))
        os.setpriority(os.PRIO_PROCESS, 0, own)
        return ""

    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        in_copy(down_and_up)
        os.setpriority(os.PRIO_PROCESS, 0, max(own, _NICENESS))
    except (Unfit, OSError):  # only with a right to do so, see setpriority(2)
        pass
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, own)
