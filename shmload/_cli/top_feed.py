"""Asks for what `shmload top` shows, and does what its keys order, in a thread of its own.

Guarantee: the screen never waits for the service or for a removal, and a service that ends or hangs
is shown as that, and found again once it answers.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from shmload._cli.top_view import Row, Snapshot
from shmload._segments.grouping import Model
from shmload._segments.models import Models, models
from shmload._segments.unfinished import UnfinishedModel
from shmload._segments.users import name_users
from shmload._service.client import Client
from shmload._service.protocol import DecodeStatus, GetStatus, ModelUse, Status
from shmload.errors import ShmloadError

_INTERVAL_S = 1.0
_JOIN_TIMEOUT_S = 2.0

Order = Callable[[], str]
"""Does what a key means; returns what to say about it. May raise `ShmloadError`."""


class Feed:
    """Asks once a second, and after each order; a context that ends its thread.

    Args:
        path: the service's socket.
        notify: called from the thread whenever there is news.
    """

    def __init__(self, path: Path, notify: Callable[[], None]) -> None:
        self._path = path
        self._notify = notify
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._client: Client | None = None
        self._before: Status | None = None
        self.latest = Snapshot(status=None, rows=())
        """What was found last; replaced as a whole."""
        self.message = ""
        """What the last order came to. It comes after the snapshot that shows it, so read it first:
        else a key could be taken for what the order has changed already."""
        self._thread = threading.Thread(target=self._run, name="shmload-top", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._orders.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def order(self, order: Order) -> None:
        """Have something done soon; `message` then says what it came to."""
        self._orders.put(order)

    def _run(self) -> None:
        message: str | None = None
        try:
            while True:
                self.latest = self._look()
                if message is not None:
                    self.message, message = message, None
                self._notify()
                try:
                    order = self._orders.get(timeout=_INTERVAL_S)
                except queue.Empty:
                    continue
                if order is None:
                    return
                try:
                    message = order()
                except ShmloadError as exc:
                    message = str(exc)
        finally:
            if self._client:
                self._client.close()

    def _look(self) -> Snapshot:
        try:
            if self._client is None:
                self._client = Client(self._path)
            status = self._client.ask(GetStatus(), Status)
        except ShmloadError as exc:
            if self._client:
                self._client.close()
            self._client = self._before = None
            return Snapshot(status=None, rows=make_rows(_resident(), None), trouble=str(exc))
        rate = rate_between(self._before, status)
        self._before = status
        return Snapshot(status=status, rows=make_rows(_resident(), status), bytes_per_s=rate)


def _resident() -> Models:
    with contextlib.suppress(ShmloadError):
        return models()
    return Models()


def rate_between(before: Status | None, now: Status) -> float:
    """Return how fast a service has read between two answers, in bytes per second."""
    if before is None or before.pid != now.pid or now.uptime_s <= before.uptime_s:
        return 0.0
    return (now.read_nbytes - before.read_nbytes) / (now.uptime_s - before.uptime_s)


def make_rows(found: Models, status: Status | None) -> tuple[Row, ...]:
    """Return a row for each model that is resident or being decoded; the latter first.

    Args:
        found: what is resident and what is being decoded, as /dev/shm says.
        status: what the service says of it.
    """
    counts = {(use.source, use.variant): use for use in status.models} if status else {}
    decodes = {(each.source, each.variant): each for each in status.decoding} if status else {}
    rows: dict[str, Row] = {}
    current: dict[tuple[str, str, str], str] = {}
    for model in found:
        rows[model.id] = _of_model(model, counts.get((model.source, model.variant)))
        if model.is_current:
            current[model.source, model.variant, model.dtype] = model.id
    for each in found.decoding:
        its = each.source, each.variant
        row = _of_source(each, counts.get(its))
        key = current.get((*its, each.dtype), row.id)
        rows[key] = _with_decode(rows.get(key, row), each, decodes.get(its))
    return tuple(sorted(rows.values(), key=lambda row: (row.done is None, row.name, row.dtype)))


def _of_model(model: Model, use: ModelUse | None) -> Row:
    users = name_users(model.used_by) or ("unknown" if model.is_leased else "")
    return Row(
        id=f"{model.source} {model.variant} {model.dtype}",
        name=model.name if model.is_current else f"{model.name} (changed)",
        dtype=model.dtype,
        nbytes=model.nbytes,
        hits=use.hits if use else 0,
        misses=use.misses if use else 0,
        users=users,
        idle_s=time.time() - model.used_at,
        is_pinned=model.is_pinned,
        model_id=model.id,
    )


def _of_source(found: UnfinishedModel, use: ModelUse | None) -> Row:
    return Row(
        id=f"{found.source} {found.variant} {found.dtype}",
        name=found.name,
        dtype=found.dtype,
        nbytes=0,
        hits=use.hits if use else 0,
        misses=use.misses if use else 0,
    )


def _with_decode(row: Row, found: UnfinishedModel, at_service: DecodeStatus | None) -> Row:
    """Return a model's row while some of its segments are being decoded."""
    rate = found.bytes_per_s
    if at_service and at_service.elapsed_s > 0:
        rate = at_service.done_nbytes / at_service.elapsed_s
    return msgspec.structs.replace(
        row,
        nbytes=row.nbytes + found.nbytes,
        done=found.done_nbytes / found.nbytes if found.nbytes else 0.0,
        bytes_per_s=rate,
        is_waiting=at_service is not None and at_service.is_waiting,
    )
