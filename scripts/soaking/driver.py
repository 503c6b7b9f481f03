"""The loop: keeps clients busy, continues faults when they are due, and judges every answer."""

import heapq
import itertools
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from soaking.faults import Pauses
from soaking.operations import Asked, Judge
from soaking.processes import Client, Surroundings
from soaking.report import Report

_LINE_INTERVAL_S = 10.0
# Longest time for an operation: it waits for its turn at the service behind every other client,
# each of which may lose two stalled workers, and then does the same again without the service,
# shard by shard. `TIMEOUTS_S` has the limits of a single step.
_DEADLINE_S = 60.0
_POLL_S = 0.2

Choose = Callable[[Client], Asked]


class Driver:
    """Drives the clients, in one thread, so that it needs no locks."""

    def __init__(
        self,
        clients: Sequence[Client],
        surroundings: Surroundings,
        report: Report,
        announce: Callable[[str], None],
    ) -> None:
        self._clients = clients
        self._surroundings = surroundings
        self._report = report
        self._announce = announce
        self._line_at = time.monotonic() + _LINE_INTERVAL_S
        self._asked: dict[str, Asked] = {}
        self._judge = Judge()
        self._due: list[tuple[float, int, Pauses]] = []
        self._numbers = itertools.count()

    def drive(self, choose: Choose, end_s: float = 0.0) -> None:
        """Give clients chosen operations until `end_s`; then finish all operations and faults."""
        with selectors.DefaultSelector() as selector:
            for client in self._clients:
                selector.register(client.answers, selectors.EVENT_READ, client)
            while (
                time.monotonic() < end_s
                or self._due
                or any(client.asked for client in self._clients)
            ):
                for client in self._clients:
                    if not client.asked and time.monotonic() < end_s:
                        self._ask(client, choose(client))
                for key, _ in selector.select(self._wait_s()):
                    self._hear(key.data, selector)
                while self._due and self._due[0][0] <= time.monotonic():
                    self.resume(heapq.heappop(self._due)[2])
                self._check_deadlines()
                self._say()

    def drive_once(self, choose: Choose) -> None:
        """Give each client one operation."""
        for client in self._clients:
            self._ask(client, choose(client))
        self.drive(choose)

    def resume(self, fault: Pauses) -> None:
        """Let a fault go on until its next pause."""
        for pause_s in fault:
            heapq.heappush(self._due, (time.monotonic() + pause_s, next(self._numbers), fault))
            return

    def _wait_s(self) -> float:
        due_s = self._due[0][0] - time.monotonic() if self._due else _POLL_S
        return min(_POLL_S, max(0.0, due_s))

    def _say(self) -> None:
        if time.monotonic() > self._line_at:
            self._announce(self._report.line())
            self._line_at += _LINE_INTERVAL_S

    def _check_deadlines(self) -> None:
        for client in self._clients:
            if client.asked and not client.is_killed and client.busy_s > _DEADLINE_S:
                client.process.send_signal(signal.SIGUSR1)  # it writes its stack to its log
                time.sleep(1)
                self._find(f"not done after {_DEADLINE_S:.0f} s", client)
                client.kill()

    def _ask(self, client: Client, asked: Asked) -> None:
        client.ask(asked.operation)
        asked.begin_s = client.asked_at
        self._asked[client.name] = asked
        self._report.note(f"{client.name} {asked.operation}")

    def _hear(self, client: Client, selector: selectors.BaseSelector) -> None:
        try:
            answer = client.hear()
        except EOFError:
            self._restart(client, selector)
            return
        if answer is None:
            return
        took_s = client.busy_s
        asked = self._asked.pop(client.name, None)
        if asked:  # None: the answer says that it has started
            asked.end_s = time.monotonic()
            outcome, wrong = self._judge.outcome(client.name, asked, answer)
            detail = f"{client.name} {client.asked}"
            self._report.count_operation(asked.operation["do"], outcome, took_s, detail)
            if "message" in answer:
                self._report.messages.setdefault(outcome, answer["message"])
            if wrong:
                self._find(wrong, client, answer.get("traceback", ""))
        client.asked = None

    def _restart(self, client: Client, selector: selectors.BaseSelector) -> None:
        """Restart a client that was killed; an exit of its own is a finding."""
        selector.unregister(client.answers)
        code = client.end()
        if not client.is_killed:
            self._find(f"a client ended with {code}", client)
        elif client.asked:
            self._report.operations[f"{client.asked['do']}: killed"] += 1
        self._asked.pop(client.name, None)
        self._judge.held.pop(client.name, None)
        client.start()
        selector.register(client.answers, selectors.EVENT_READ, client)

    def _find(self, what: str, client: Client, trace: str = "") -> None:
        log = self._surroundings.tail(client.name)
        self._report.find(what, f"{client.name} {client.asked}\n{trace}\nits log:\n{log}")
