"""A copy of the template that waits for a program, and becomes it.

    template ──fork──▶ spare ──Call──▶ ready ──Go──▶ the program

It does ahead what it can. When a call comes, it takes over the caller's standing, streams and
variables, says that it is ready, and runs the program when the caller says so. What cannot be taken
over, it refuses.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from shmload._templates import leaving, messages, wire
from shmload._templates.caller import Doubt, command_of, run_plainly
from shmload._templates.interpreter import RUN_MODULE, Renewal, prepare, show
from shmload._templates.kind import has_ended, renew_session_keyring
from shmload._templates.messages import Call, Fds, Go, Ready, Refused, SendFds, Sets
from shmload._templates.stash import Stash
from shmload._templates.taking import (
    renew_streams,
    take_descriptors,
    take_dispositions,
    take_mask,
    take_standing,
)
from shmload._templates.variables import variables_in, with_redirect, with_settings


class Spare:
    """Waits for a call, and becomes its program.

    Args:
        stash: of the template's imports, which are hidden.
        renewal: of what they keep.
        coerced: variables that Python itself has set when it started.
        keep: descriptors of the template that libraries have opened.
    """

    def __init__(
        self,
        stash: Stash,
        renewal: Renewal,
        coerced: dict[str, str],
        keep: set[int],
    ) -> None:
        self._stash = stash
        self._renewal = renewal
        self._coerced = coerced
        self._keep = keep
        self._group = os.getpgrp()
        self._traces = leaving.Traces()
        self._caller: wire.Socket

    def wait(self, orders: wire.Socket) -> Callable[[], Any]:
        """Wait for a call, become its program, and return what runs it.

        Args:
            orders: brings the call, the caller's socket, and a descriptor of its process.
        """
        self._traces.watch()
        self._renewal.renew_seeds()
        try:
            found = messages.receive(orders, Call)
        except (OSError, ValueError):
            os._exit(0)
        if found is None:
            os._exit(0)
        orders.detach()  # `take_descriptors` closes it; the number may be the program's then
        call, (caller, process) = found
        self._caller = wire.take(caller)
        try:
            messages.send(self._caller, SendFds())
            sent = messages.receive(self._caller, Fds)
            if sent is None:
                os._exit(0)  # the caller has waited too long, and runs the program itself
            return self._become(call, *sent, process)
        except Exception as exc:  # whatever it is, the caller can run the program itself
            refused = Refused(f"{type(exc).__name__}: {exc}", 0)
            if isinstance(exc, Doubt):
                refused = Refused(str(exc), int(exc.is_replaceable))
            with contextlib.suppress(OSError):
                messages.send(self._caller, refused)
            os._exit(0)

    def _become(self, call: Call, sent: Fds, fds: list[int], process: int) -> Callable[[], Any]:
        take_standing(wire.peer_of(self._caller)[0], call.standing)
        renew_session_keyring()
        if has_ended(process):  # what was taken over may be another's
            os._exit(0)
        self._caller = take_descriptors(call.fds, fds, self._caller, self._keep)
        environment = variables_in(sent.environ)
        name = self._stash.variables.difference_to(
            with_settings(self._coerced | environment, call.settings)
        )
        if name:
            raise Doubt(f"{name} is not what the template has read on import")
        redirect = call.program.redirect
        os.environ.clear()
        os.environ.update(with_redirect(redirect, environment) | self._coerced)
        os.setpgid(0, call.group)
        take_dispositions(call.standing.ignored)
        self._traces.note()

        def start_over(reason: str, settings: list[list[str]] | None) -> None:
            can_start_over = self._traces.is_none()
            if settings is not None:
                with contextlib.suppress(OSError):
                    messages.send(self._caller, Sets(settings), waits=False)
            if can_start_over:
                if call.is_verbose:
                    print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
                for number in (signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                run_plainly(call.program, environment)
            print(f"shmload run: {reason}, but after it had written or read; the libraries do not "
                  "see that; run it with python", file=sys.stderr)  # fmt: skip

        renew_streams()
        self._renewal.renew_places()
        run = prepare(call.program, self._stash)
        show(command_of(call.program), sent.environ)
        self._announce()
        self._stash.begin(call.settings, start_over)
        if redirect:
            _redirect(redirect, self._stash.hidden)
        if run.func is RUN_MODULE:
            __import__("runpy")  # Python too has it then, and what it needs
        threads: Any = self._stash.hidden.get("threading") or sys.modules.get("threading")
        if threads:  # of a fork, Python renews all but this
            threads.main_thread()._set_native_id()
        leaving.die_with(self._caller, with_group=not call.group)
        leaving.begin(self._caller, self._traces)
        gc.enable()
        self._traces.has_trace = False  # all this was not the program's
        take_mask(call.standing.blocked)
        return run

    def _announce(self) -> None:
        """Tell the caller that the program can run; return when it shall."""
        with contextlib.suppress(OSError, ValueError):
            messages.send(self._caller, Ready(os.getpid(), self._group, os.getppid()))
            if messages.receive(self._caller, Go):
                return
        os._exit(0)  # the caller has waited too long, and runs the program itself


def _redirect(way: str, modules: Mapping[str, ModuleType]) -> None:
    """Turn `redirect` on in this process, as an ordinary Python does when it starts.

    Args:
        way: as for `with_redirect`.
        modules: imported ones that are not in `sys.modules`.
    """
    try:
        from shmload.integrations.redirect import begin as turn_on

        turn_on(modules, verbose=way == "verbose")
    except Exception as exc:  # the caller counts on the program by now
        print(f"shmload run: --redirect is off: {exc}", file=sys.stderr)
