"""The command `shmload serve`: its options, the service from start to end, and its log."""

import contextlib
import datetime
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click

from shmload._cli.source_list import ListedSource, read_list
from shmload._cli.warming import preload
from shmload._host.limits import allow_descriptors, allow_file_size
from shmload._segments.listing import segments
from shmload._segments.removal import remove_leftovers
from shmload._service.keeper import Keeper, budget_warnings, default_budget, notify_systemd
from shmload._settings import (
    parse_budget,
    relative_variables,
    settings,
    unknown_variables,
)
from shmload._wording import count_of, format_nbytes, logger_of
from shmload.errors import ArgumentError, ShmloadError

logger = logger_of(__name__)

LogFormat = Literal["text", "json"]

_MAX_PORT = 65535
_DESCRIPTORS = 1 << 12
# A preloading child is given less to end.
_JOIN_S = 10.0


class _Read(click.ParamType[Any]):
    """The value of an option, as a function reads it or refuses it with a `ValueError`."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: Any, ctx: Any) -> object:  # click's own signature
        try:
            return self._read(str(value))
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


def _parse_address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^:\[\]]*):([0-9]+)", text, re.ASCII)
    if not found or int(found[2]) > _MAX_PORT:
        raise ValueError(f"{text!r} is none; write it like 127.0.0.1:9477 or [::1]:9477")
    return found[1].strip("[]") or "127.0.0.1", int(found[2])


class _PreloadList(click.Path):
    name = "FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:  # click's own signature
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        return _Read(self.name, lambda _: read_list(path)).convert(path, param, ctx)


class _ServeCommand(click.Command):
    """Logs wrong usage as JSON if that is the form of the log."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as exc:
            pairs = {*words, *map("=".join, itertools.pairwise(words))}
            if "--log-format=json" not in pairs:
                raise
            log_steps("json")
            logger.error("%s", exc.format_message(), extra={"error": "ArgumentError"})
            ctx.exit(2)


@click.command("serve", cls=_ServeCommand)
@click.option(
    "--budget",
    type=_Read("SIZE", parse_budget),
    help="Limit for resident segments, such as 40GiB. [SHMLOAD_BUDGET, else half of the memory]",
)
@click.option(
    "--preload",
    "wanted",
    type=_PreloadList(exists=True, dir_okay=False),
    help="File of sources to warm at the start, one per line: SOURCE [DTYPE] [vae=float32 ...] "
    "[pin | keep-for=2h] [variant=fp16 component=unet ...].",
)
@click.option(
    "--metrics",
    type=_Read("HOST:PORT", _parse_address),
    help="Serve metrics for Prometheus at this address.",
)
@click.option(
    "--log-format",
    type=click.Choice(get_args(LogFormat)),
    default="text",
    show_default=True,
    help="How to log on stderr: lines for people, or one JSON object a line.",
)
def serve_command(
    budget: int | None,
    wanted: Sequence[ListedSource] | None,
    metrics: tuple[str, int] | None,
    log_format: LogFormat,
) -> None:
    """Keep decoded weights resident within a budget, for all processes of this user.

    Runs in the foreground until SIGTERM, SIGHUP or Ctrl-C. Resident segments stay.
    """
    log_steps(log_format)
    try:
        _run(budget, wanted or (), metrics)
    except ShmloadError as exc:
        if log_format == "text":
            raise  # printed as for any command
        logger.error("%s", exc, extra={"error": type(exc).__name__})
        sys.exit(2 if isinstance(exc, ArgumentError) else 1)


def _run(
    budget: int | None,
    wanted: Sequence[ListedSource],
    metrics: tuple[str, int] | None,
) -> None:
    """Run the service from its start to its end."""
    for warning in (*unknown_variables(os.environ), *relative_variables(os.environ)):
        logger.warning("%s", warning)
    remove_leftovers()
    allow_descriptors(_DESCRIPTORS)
    allow_file_size()  # before a preload, which inherits the limit
    chosen = [given for given in (budget, settings().budget) if given is not None]
    budget_nbytes = chosen[0] if chosen else default_budget()
    with (
        contextlib.closing(Keeper(budget_nbytes, len(wanted))) as keeper,
        _ending_by_signals(keeper),
    ):
        for warning in budget_warnings(budget_nbytes, segments()):
            logger.warning("%s", warning)
        if metrics:
            _serve_metrics(*metrics, keeper)
        preloading = threading.Thread(target=preload, args=(wanted, keeper), daemon=True)
        logger.info("serving, budget %s", format_nbytes(budget_nbytes))
        notify_systemd("READY=1")
        preloading.start()
        keeper.run()
        notify_systemd("STOPPING=1")
        preloading.join(_JOIN_S)
    remove_leftovers()  # parts of a preload that the end cut short
    logger.info("ended; %s", count_of(len(segments()), "segment stays", "segments stay"))


@contextlib.contextmanager
def _ending_by_signals(keeper: Keeper) -> Iterator[None]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1)
            signal.signal(number, lambda *_: keeper.stop())
    # Python calls these only between two instructions. A signal that comes just before the service
    # waits must end that wait.
    signal.set_wakeup_fd(keeper.signalled_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)


def _serve_metrics(host: str, port: int, keeper: Keeper) -> None:
    # Imported here: a service without --metrics needs no server.
    from shmload._service.gauges import serve_metrics

    port = serve_metrics(host, port, keeper)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
    logger.info("metrics at %s", url, extra={"url": url})


# Its log ------------------------------------------------------------------------------------------
#
#   {"time": "2026-11-22T10:05:00.123Z", "level": "INFO", "logger": "shmload._service.keeper",
#    "message": "evicted …", "fields": {"segment": "…", "nbytes": 1024}}
#
# In JSON each line is one object of these five keys, whatever a message or a field holds.

# What every record has. Libraries give every record attributes of their own, with names that begin
# with an underscore. All others come from a call, with `extra=`, and are fields.
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            name: value
            for name, value in vars(record).items()
            if name not in _OF_EVERY_RECORD and not name.startswith("_")
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "fields": fields,
        }
        return json.dumps(line, default=str)


def log_steps(form: LogFormat) -> None:
    """Have the root logger's handlers write what the service does, with times."""
    logging.getLogger("shmload").setLevel(logging.INFO)
    logging.captureWarnings(True)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter() if form == "json" else text)
    if form == "json":
        # A traceback would be no JSON.
        sys.excepthook = lambda _, exc, __: _log_uncaught("the process", exc)
        threading.excepthook = lambda found: _log_uncaught(
            "a thread", found.exc_value or found.exc_type()
        )


def _log_uncaught(what: str, exc: BaseException) -> None:
    logger.critical("%s fails: %s", what, exc, exc_info=exc)
