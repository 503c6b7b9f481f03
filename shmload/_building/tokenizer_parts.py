"""Tokenizers of the package `tokenizers` as parts: restored exactly, and faster than by pickles.

Their own pickle is JSON. The package reads a float64 of JSON inexactly, so a Unigram model would
come back with other scores in the last bit. And 49,000 words and their merges take twice as long to
read of JSON as to make of lists.

Guarantee: what is restored has the same JSON as what was taken apart.
"""

import json
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram

# No word of a text has it.
_BETWEEN = "\0"


class Parts(NamedTuple):
    """A tokenizer whose model is BPE or Unigram."""

    shell: str
    """JSON of all but the model and the added tokens."""
    words: str
    """In the order of their numbers, which count from 0."""
    merges: str | None
    """BPE's pairs of pieces, in the order in which they are merged."""
    scores: list[float]
    """Unigram's score of each word."""
    settings: dict[str, Any]
    """The model's settings that are not None."""
    added: list[dict[str, Any]]
    """The tokens that are added to the words."""


def take_apart(tokenizer: Tokenizer) -> Parts | None:
    """Return the parts of a tokenizer; None if its own pickle restores it exactly.

    Raises:
        ValueError: neither its parts nor its pickle do.
    """
    text = tokenizer.to_str()
    parts = _parts_of(json.loads(text))
    try:
        if parts and put_together(*parts).to_str() == text:
            return parts
    except Exception:  # the package has errors of no class of its own
        pass
    if Tokenizer.from_str(text).to_str() != text:
        raise ValueError("a tokenizer that cannot be restored exactly")
    return None


def _parts_of(shell: dict[str, Any]) -> Parts | None:
    """Return the parts of a tokenizer's JSON, which it takes apart; None of another model."""
    model = shell["model"]
    kind = model.pop("type")
    if kind == "BPE":
        numbers: dict[str, int] = model.pop("vocab")
        words, scores = sorted(numbers, key=numbers.__getitem__), []
        merges = _BETWEEN.join(piece for pair in model.pop("merges") for piece in pair)
        empty: dict[str, Any] = {"vocab": {}, "merges": []}
    elif kind == "Unigram":
        vocabulary: list[tuple[str, float]] = model.pop("vocab")
        words, scores = [word for word, _ in vocabulary], [score for _, score in vocabulary]
        merges, empty = None, {"vocab": [], "unk_id": None}
    else:
        return None
    added = [{k: v for k, v in each.items() if k != "id"} for each in shell.pop("added_tokens")]
    shell |= {"model": {"type": kind, **empty}, "added_tokens": []}
    return Parts(
        shell=json.dumps(shell),
        words=_BETWEEN.join(words),
        merges=merges,
        scores=scores,
        settings={name: value for name, value in model.items() if value is not None},
        added=added,
    )


def put_together(
    shell: str,
    words: str,
    merges: str | None,
    scores: list[float],
    settings: dict[str, Any],
    added: list[dict[str, Any]],
) -> Tokenizer:
    """Return a tokenizer of its parts."""
    made = Tokenizer.from_str(shell)
    each = words.split(_BETWEEN) if words else []
    if merges is None:
        made.model = Unigram(list(zip(each, scores, strict=True)), **settings)
    else:
        pieces = merges.split(_BETWEEN) if merges else []
        pairs = list(zip(pieces[::2], pieces[1::2], strict=True))
        made.model = BPE({word: number for number, word in enumerate(each)}, pairs, **settings)
    made.add_tokens([AddedToken(**token) for token in added])
    return made
