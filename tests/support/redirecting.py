"""Loads by a library, plainly and redirected, to be compared."""

import logging
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from comparing import assert_component_equal, assert_equal
from traces import Messages, mentions_of_view

import shmload


class Outcome(NamedTuple):
    """How a call ended."""

    made: Any
    error: Exception | None
    texts: list[Any]
    state: torch.Tensor


class Ways(logging.Handler):
    """Notes which way each redirected call went."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.levels.append(record.levelno)

    @property
    def taken(self) -> list[str]:
        """`shmload` or `library`, for each call."""
        return ["shmload" if ": through shmload" in line else "library" for line in self.lines]


@pytest.fixture
def ways() -> Iterator[Ways]:
    """The ways that calls took in this test."""
    found = Ways()
    logger = logging.getLogger("shmload.redirect")
    before = logger.level
    logger.addHandler(found)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(found)
    logger.setLevel(before)


def _is_of_one_way(text: str) -> bool:
    """Tell whether a message is said in one of the ways only, as docs/unchanged.md says."""
    return "shmload.redirect" in text or "`torch_dtype` is deprecated" in text


def outcome_of(load) -> Outcome:
    """Call a function that loads; the warnings of both ways are to be the same."""
    torch.manual_seed(0)
    with Messages() as said:
        try:
            made, error = load(), None
        except Exception as exc:
            made, error = None, exc
    texts = [text for text in said.texts if not _is_of_one_way(str(text))]
    return Outcome(made, error, texts, torch.get_rng_state())


def assert_same(load, ways, *, are_texts_same: bool = True) -> Any:
    """Load plainly and redirected; the results are the same. Return the redirected one."""
    wanted = outcome_of(load)
    with shmload.redirect():
        got = outcome_of(load)
    assert type(got.error) is type(wanted.error), (got.error, wanted.error, ways.lines)
    if wanted.error is not None:
        assert str(got.error) == str(wanted.error)
        assert got.error.__cause__ is None or wanted.error.__cause__ is not None
        assert (
            got.error.__notes__ == wanted.error.__notes__
            if hasattr(wanted.error, "__notes__")
            else not hasattr(got.error, "__notes__")
        )
    assert_results_equal(got.made, wanted.made)
    assert not are_texts_same or without_paths(got.texts) == without_paths(wanted.texts)
    assert torch.equal(got.state, wanted.state)
    assert not mentions_of_view(got.made)
    return got.made


def without_paths(texts: list[Any]) -> set[str]:
    """Return messages without paths: those of a view stand for the source's."""
    return {re.sub(r"/[\w./-]+", "", str(text)) for text in texts}


def assert_results_equal(got: Any, wanted: Any) -> None:
    """Compare two pipelines, two models, or two models with what was said of their loading."""
    assert type(got) is type(wanted)
    if isinstance(wanted, tuple):
        assert_component_equal(got[0], wanted[0], "model")
        assert got[1] == wanted[1]
    elif isinstance(wanted, torch.nn.Module):
        assert_component_equal(got, wanted, "model")
    elif wanted is not None:
        assert_equal(got, wanted)
