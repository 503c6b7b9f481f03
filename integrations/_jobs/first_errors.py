"""The errors of a run's first items: if many are the same, the job is at fault, not the items.

A pipeline that lacks a component fails at every item. One error says that better than thousands.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from shmload.errors import ItemError, JobFailed
from shmload.integrations._jobs.dispatch import Outcome

MAX_SAME_ERRORS = 8
"""So many items may fail with the same error before any item has a result."""
_MAX_HELD = 4 * MAX_SAME_ERRORS  # with several errors, as of files that are each broken


def end_if_all_fail(
    outcomes: Iterator[Outcome], has_results: Callable[[], bool]
) -> Iterator[Outcome]:
    """Yield the outcomes; hold errors back until an item has a result.

    Args:
        outcomes: of a run.
        has_results: tells whether earlier runs have stored a result; then the items are at fault.

    Raises:
        JobFailed: no item has a result, and `MAX_SAME_ERRORS` have failed with the same error; or
            the items end, and most of them have failed with the same error, but two at least. None
            of them has come out.
    """
    held: list[ItemError] = []
    count: Counter[str] = Counter()
    for outcome in outcomes:
        error = outcome.value
        if not isinstance(error, ItemError) or has_results() or len(held) == _MAX_HELD:
            yield from _outcomes(held)
            yield outcome
            break
        held.append(error)
        count[error.reason] += 1
        if count[error.reason] == MAX_SAME_ERRORS:
            raise _failed(error.reason, held, MAX_SAME_ERRORS)
    else:
        for reason, number in count.most_common(1):
            if number > max(1, len(held) // 2):
                raise _failed(reason, held, number)
        yield from _outcomes(held)
    yield from outcomes


def _outcomes(held: list[ItemError]) -> Iterator[Outcome]:
    return (Outcome(error.index, error) for error in held)


def _failed(reason: str, held: list[ItemError], number: int) -> JobFailed:
    many = f"the first {number}" if number == len(held) else f"{number} of the first {len(held)}"
    error = JobFailed(
        f"{many} items failed with the same error and none has a result: {reason}. Nothing was "
        "stored. Mend what these items have in common, the function or the pipeline's components, "
        "or leave them out"
    )
    error.__cause__ = next(each for each in held if each.reason == reason)
    return error
