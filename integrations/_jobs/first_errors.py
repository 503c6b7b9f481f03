"""The errors of a run's first items: if they are all the same, the job is at fault, not the items.

A pipeline that lacks a component fails at every item. One error says that better than thousands.
"""

from collections.abc import Callable, Iterator

from shmload.errors import ItemError, JobFailed
from shmload.integrations._jobs.dispatch import Outcome

MAX_SAME_ERRORS = 8
"""So many items may fail with the same error before any other outcome."""


def end_if_all_fail(
    outcomes: Iterator[Outcome], has_results: Callable[[], bool]
) -> Iterator[Outcome]:
    """Yield the outcomes; hold back the first ones while all are the same error.

    Args:
        outcomes: of a run.
        has_results: tells whether earlier runs have stored a result; then the items are at fault.

    Raises:
        JobFailed: the first `MAX_SAME_ERRORS` items failed with the same error, or all items if
            they are fewer, but two at least. None of them has come out.
    """
    held: list[Outcome] = []
    for outcome in outcomes:
        if has_results() or not _is_same(held, outcome):
            yield from held
            yield outcome
            break
        held.append(outcome)
        if len(held) == MAX_SAME_ERRORS:
            raise _failed(held)
    else:
        if len(held) > 1:
            raise _failed(held)
        yield from held
    yield from outcomes


def _is_same(held: list[Outcome], outcome: Outcome) -> bool:
    error = outcome.value
    return isinstance(error, ItemError) and (not held or held[0].value.reason == error.reason)


def _failed(held: list[Outcome]) -> JobFailed:
    first: ItemError = held[0].value
    error = JobFailed(
        f"the first {len(held)} items all failed with the same error: {first.reason}; nothing of "
        "them was stored. Mend what they have in common, the function or the pipeline's "
        "components, or leave these items out"
    )
    error.__cause__ = first
    return error
