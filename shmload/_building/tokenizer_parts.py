"""Tokenizers of the package `tokenizers` as parts, which are put together faster than a pickle.

Their own pickle is JSON. To read 49,000 words and their merges of JSON takes twice as long as to
make the tokenizer of lists, and was two thirds of an attach of Stable Diffusion 1.5.

Guarantee: what is restored has the same JSON as what was taken apart.
"""

import json
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

# No word of a text has it.
_BETWEEN = "\0"


class Parts(NamedTuple):
    """A tokenizer whose model is BPE."""

    shell: str
    """JSON of all but the words and what is added to them."""
    words: str
    """In the order of their numbers, which count from 0."""
    merges: str
    """Pairs of pieces, the first to be merged first."""
    settings: dict[str, Any]
    """The model's, but for those that are None."""
    added: list[dict[str, Any]]
    """The tokens that are added to the words."""


def take_apart(tokenizer: Tokenizer) -> Parts | None:
    """Return the parts of a tokenizer; None if `put_together` makes another one of them."""
    text = tokenizer.to_str()
    shell = json.loads(text)
    model = shell.pop("model")
    if model.pop("type") != "BPE":
        return None
    words: dict[str, int] = model.pop("vocab")
    merges = model.pop("merges")
    added = [{k: v for k, v in each.items() if k != "id"} for each in shell.pop("added_tokens")]
    shell |= {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    parts = Parts(
        shell=json.dumps(shell),
        words=_BETWEEN.join(sorted(words, key=words.__getitem__)),
        merges=_BETWEEN.join(piece for pair in merges for piece in pair),
        settings={name: value for name, value in model.items() if value is not None},
        added=added,
    )
    try:
        return parts if put_together(*parts).to_str() == text else None
    except Exception:  # the package has errors of no class of its own
        return None


def put_together(
    shell: str, words: str, merges: str, settings: dict[str, Any], added: list[dict[str, Any]]
) -> Tokenizer:
    """Return a tokenizer of its parts."""
    made = Tokenizer.from_str(shell)
    numbers = {word: number for number, word in enumerate(words.split(_BETWEEN) if words else [])}
    pieces = merges.split(_BETWEEN) if merges else []
    pairs = list(zip(pieces[::2], pieces[1::2], strict=True))
    made.model = BPE(numbers, pairs, **settings)
    made.add_tokens([AddedToken(**each) for each in added])
    return made
