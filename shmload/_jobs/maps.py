"""One map of a job: what becomes of every item, by a crew of processes or in this process."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from shmload._jobs.crew import Crew
from shmload._jobs.dispatch import Dispatch, Item
from shmload._jobs.messages import Answer, Begin, Ended, Work
from shmload._jobs.payload import Payload, describe_error, dump, load
from shmload.errors import ArgumentError, ItemFailed
from shmload.integrations.handles import Handle

Function = Callable[[Any, Any], Any]
"""Is called with the pipeline and an item."""

# Items held for each process, so that a slow item does not hold up the others.
_WINDOW = 16
# A hung process is noticed at most this late; all else wakes the wait.
_POLL_S = 1.0
# A process whose items take less than this gets its next item before it has answered.
_QUICK_S = 0.25


def map_in_crew(
    crew: Crew,
    function: Function,
    items: Iterator[Item],
    *,
    is_ordered: bool,
    seed: int,
    item_timeout_s: float | None,
    on_wait: Callable[[], object],
) -> Generator[Item, None, None]:
    """Yield what becomes of each item, calling the function in the processes of a crew.

    Args:
        crew: stays the caller's.
        function: must be picklable.
        items: numbered.
        is_ordered: outcomes in the order of the items, instead of as they come.
        seed: of the job.
        item_timeout_s: as for `Job`.
        on_wait: called now and then while nothing is new.

    Raises:
        ArgumentError: the crew is closed, or the function cannot be pickled.
        Exception: as `Crew.wait`, or an error of the items themselves.
    """
    limit_s = math.inf if item_timeout_s is None else item_timeout_s
    crew.check()
    dispatch = Dispatch(items, window=_WINDOW * len(crew.devices), is_ordered=is_ordered)
    dispatch.look()
    try:
        if not dispatch.is_over:
            crew.begin_map(Begin(_dump_function(function), seed))
        while True:
            _feed(crew, dispatch)
            if found := dispatch.come_out():
                yield from found
                continue  # there is room for items again
            if dispatch.is_over:
                break
            for runner, message in crew.wait(_POLL_S):
                match message:
                    case Answer():
                        item = dispatch.given(runner.place)[0]
                        dispatch.answer(runner.place, _value(item, message))
                    case Ended():
                        dispatch.end(runner.place, runner.how)
            for runner in crew.runners.values():
                if dispatch.given(runner.place) and runner.idle_s() > limit_s:
                    runner.kill(f"no result within {limit_s:g} s")
            on_wait()
    finally:
        # The next map must not wait for them.
        crew.end_map([each for each in crew.runners.values() if dispatch.given(each.place)])
    if dispatch.error:
        raise dispatch.error


def map_here(
    handle: Handle, function: Function, items: Iterator[Item], *, seed: int, threads: int
) -> Generator[Item, None, None]:
    """Yield what becomes of each item, calling the function in this process.

    Args:
        handle: of the pipeline.
        function: as for `map_in_crew`.
        items: numbered.
        seed: of the job.
        threads: for torch while the function runs.

    Raises:
        ShmloadError: the pipeline cannot be loaded.
    """
    from shmload._jobs.runner import call_function, limited_threads

    pipe = None
    for item in items:
        if pipe is None:  # not earlier: there may be no item
            pipe = handle.load()
        value: Any
        try:
            with limited_threads(threads):
                value = call_function(function, pipe, item.value, seed, item.number)
            value = load(dump(value))  # as if it came from another process
        except (Exception, SystemExit) as exc:  # as in another process
            value = _failed(item, exc)
        yield Item(item.number, value)


def _feed(crew: Crew, dispatch: Dispatch) -> None:
    """Give each process what it can take."""
    ready = [runner for runner in crew.runners.values() if runner.is_started]
    # Give every process one item before any gets two. A second item saves a quick process a wait;
    # behind a slow item it would only be delayed.
    quick = [runner for runner in ready if runner.item_s < _QUICK_S]
    for depth, runner in [*((1, each) for each in ready), *((2, each) for each in quick)]:
        while item := dispatch.give(runner.place, depth):
            try:
                payload = dump(item.value)
            except Exception as exc:  # the item's class can raise anything
                dispatch.take_back(runner.place, _failed(item, exc))
                continue
            if len(dispatch.given(runner.place)) == 1:
                runner.since = time.monotonic()
            crew.post(runner, Work(item.number, payload))


def _value(item: Item, answer: Answer) -> Any:
    """Return what the function returned, or an `ItemFailed`."""
    assert answer.index == item.number, "a runner answers in the order in which it was asked"
    try:
        value = load(answer.value)
    except Exception as exc:  # the class of the value or the error can raise anything
        return _failed(item, exc, answer.traceback)
    return value if answer.traceback is None else _failed(item, value, answer.traceback)


def _failed(item: Item, cause: BaseException, traceback: str | None = None) -> ItemFailed:
    error = ItemFailed(item.number, item.value, describe_error(cause))
    error.__cause__ = cause
    if traceback:
        error.add_note(f"in a process of the job:\n{traceback}")
    return error


def _dump_function(function: Function) -> Payload:
    try:
        return dump(function)
    except Exception as exc:  # what the function refers to can raise anything
        raise ArgumentError(
            f"the function cannot be sent to the processes of the job: {exc}; have it refer to "
            "what can be pickled, and make the rest itself"
        ) from exc
