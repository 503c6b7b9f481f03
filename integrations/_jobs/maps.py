"""One map of a job: what becomes of every item, by a crew of processes or in this process."""

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from shmload.errors import ArgumentError, ItemFailed
from shmload.integrations._jobs.crew import Crew
from shmload.integrations._jobs.dispatch import Dispatch, Item, Outcome
from shmload.integrations._jobs.messages import Begin, Ended, ItemAnswer, Raised, Returned, Work
from shmload.integrations._jobs.payload import Payload, describe_error, dump, load
from shmload.integrations._jobs.runner_process import RunnerProcess
from shmload.integrations.handles import Handle

Function = Callable[[Any, Any], Any]
"""Is called with the pipeline and an item."""

# Items held for each process, so that a slow item does not hold up the others.
_WINDOW = 16
# A hung process is noticed at most this late; all else wakes the wait.
_POLL_S = 1.0
# A process whose items take less than this gets its next item before it has answered.
_QUICK_S = 0.25


class CrewMap:
    """One map by a crew.

    Args:
        crew: stays the caller's.
        function: must be picklable.
        items: numbered.
        is_ordered: outcomes in the order of the items, instead of as they come.
        seed: of the job.
        item_timeout_s: as for `Job`.
    """

    def __init__(
        self,
        crew: Crew,
        function: Function,
        items: Iterator[Item],
        *,
        is_ordered: bool,
        seed: int,
        item_timeout_s: float | None,
        on_wait: Callable[[bool], object],
    ) -> None:
        self._crew = crew
        self._on_wait = on_wait
        self._function = function
        self._dispatch = Dispatch(items, window=_WINDOW * len(crew.devices), is_ordered=is_ordered)
        self._seed = seed
        self._item_timeout_s = item_timeout_s

    def outcomes(self) -> Generator[Outcome, None, None]:
        """Yield what becomes of each item.

        Raises:
            ArgumentError: the crew is closed, or the function cannot be pickled.
            Exception: as `Crew.wait`, or an error of the items themselves.
        """
        crew, dispatch = self._crew, self._dispatch
        crew.check()
        dispatch.look()
        if not dispatch.is_over:
            crew.begin(Begin(_dump_function(self._function), self._seed))
        try:
            while True:
                self._feed()
                has_news = False
                for outcome in dispatch.come_out():
                    has_news = True
                    yield outcome
                if has_news:
                    continue  # there is room for items again
                if dispatch.is_over:
                    break
                for runner, message in crew.wait(_POLL_S):
                    match message:
                        case Returned() | Raised():
                            dispatch.answer(runner.place, self._value(runner, message))
                        case Ended():
                            dispatch.end(runner.place, runner.how)
                self._kill_hung()
                self._on_wait(any(each.is_started for each in crew.runners.values()))
        finally:
            # The next map must not wait for them.
            crew.replace([each for each in crew.runners.values() if dispatch.given(each.place)])
        if dispatch.error:
            raise dispatch.error

    def _feed(self) -> None:
        """Give each process what it can take."""
        ready = [runner for runner in self._crew.runners.values() if runner.is_started]
        # Give every process one item before any gets two. A second item saves a quick process a
        # wait; behind a slow item it would only be delayed.
        quick = [runner for runner in ready if runner.item_s < _QUICK_S]
        for depth, runner in [*((1, each) for each in ready), *((2, each) for each in quick)]:
            while item := self._dispatch.give(runner.place, depth):
                try:
                    payload = dump(item.value)
                except Exception as exc:  # the item's class can raise anything
                    self._dispatch.take_back(runner.place, _failed(item, exc))
                    continue
                if len(self._dispatch.given(runner.place)) == 1:
                    runner.since = time.monotonic()
                self._crew.post(runner, Work(item.index, payload))

    def _kill_hung(self) -> None:
        limit = self._item_timeout_s
        if limit is None:
            return
        for runner in self._crew.runners.values():
            if self._dispatch.given(runner.place) and runner.idle_s() > limit:
                runner.kill(f"no result within {limit:g} s")

    def _value(self, runner: RunnerProcess, answer: ItemAnswer) -> Any:
        """Return what the function returned, or an `ItemFailed`."""
        item = self._dispatch.given(runner.place)[0]
        assert answer.index == item.index, "a runner answers in the order in which it was asked"
        traceback = answer.traceback if isinstance(answer, Raised) else ""
        try:
            if isinstance(answer, Returned):
                return load(answer.value)
            cause = load(answer.error)
        except Exception as exc:  # the class of the value or the error can raise anything
            cause = exc
        return _failed(item, cause, traceback)


def map_here(
    handle: Handle, function: Function, items: Iterator[Item], *, seed: int, threads: int
) -> Generator[Outcome, None, None]:
    """Yield what becomes of each item, calling the function in this process.

    Args:
        handle: of the pipeline.
        function: as for `CrewMap`.
        items: numbered.
        seed: of the job.
        threads: for torch while the function runs.

    Raises:
        ShmloadError: the pipeline cannot be loaded.
    """
    from shmload.integrations._jobs.runner import call_function, limited_threads

    pipe = None
    for item in items:
        if pipe is None:  # not earlier: there may be no item
            pipe = handle.load()
        value: Any
        try:
            with limited_threads(threads):
                value = call_function(function, pipe, item.value, seed, item.index)
            value = load(dump(value))  # as if it came from another process
        except (Exception, SystemExit) as exc:  # as in another process
            value = _failed(item, exc)
        yield Outcome(item.index, value)


def _dump_function(function: Function) -> Payload:
    try:
        return dump(function)
    except Exception as exc:  # what the function refers to can raise anything
        raise ArgumentError(
            f"the function cannot be sent to the processes of the job: {exc}; have it refer to "
            "what can be pickled, and make the rest itself"
        ) from exc


def _failed(item: Item, cause: BaseException, traceback: str = "") -> ItemFailed:
    error = ItemFailed(item.index, item.value, describe_error(cause))
    error.__cause__ = cause
    if traceback:
        error.add_note(f"in a process of the job:\n{traceback}")
    return error
