"""Finds the source that diffusers loads beside a combined pipeline's own: that of its prior.

Kandinsky, Stable Cascade and Wuerstchen keep a decoder and its prior in two repositories. The card
of the decoder's names the other one, and `from_pretrained` of a combined class loads it in its
middle. Components of it that are passed in are not loaded again.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmload._building.compat import takes_connected
from shmload._building.keywords import FINDING_KEYWORDS
from shmload._building.pipeline_maker import PipelineMaker
from shmload._checkpoints.remote import is_url
from shmload._checkpoints.resolve import Source
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload.errors import ShmloadError

PREFIXES = ("prior_",)
HANDED_ON_TOO = "Keyword arguments {'prior_"
"""The beginning of diffusers' warning: it hands these components on under this name, too."""
_CARD = "README.md"
_MAX_CARD_NBYTES = 1 << 20
_NAMES_A_PRIOR = re.compile(r"\A---[^\S\n]*\n(?:(?!---).*\n)*?prior:", re.MULTILINE)
# What `from_pretrained` hands on to the other source's.
_HANDED_ON = FINDING_KEYWORDS - {"subfolder"}


class Connected(NamedTuple):
    """A source whose components a combined pipeline takes too."""

    source: str
    """A directory or a hub id, as the card names it."""
    prefix: str
    """Before the names of its components in the combined pipeline, such as `prior_`."""
    kwargs: dict[str, Any]
    """For its `from_pretrained`, beside dtype and devices."""


def connected_to(
    source: Source, maker: PipelineMaker, kwargs: Mapping[str, Any]
) -> Connected | None:
    """Return what is connected to a pipeline's source; None if its class takes no more than that.

    It imports diffusers only if the source's card names a prior.

    Args:
        source: as it was found.
        maker: of the pipeline.
        kwargs: for `from_pretrained`.
    """
    try:
        with Descriptor(open_source(source.root / _CARD)) as file:
            content = os.pread(file.fd, _MAX_CARD_NBYTES, 0)
            names_one = _NAMES_A_PRIOR.match(content.decode(errors="replace"))
    except (OSError, ShmloadError):
        return None  # there is none, as almost everywhere; what cannot be read the library reports
    if not names_one or not takes_connected(maker.class_chosen(source, kwargs)):
        return None
    from huggingface_hub import ModelCard

    card = ModelCard.load(source.root / _CARD).data
    for prefix in PREFIXES:
        named = getattr(card, prefix.removesuffix("_"), None)
        # A URL came with somebody else's model, and would use this user's credentials.
        if named and not is_url(str(named[0])):
            handed_on = {key: value for key, value in kwargs.items() if key in _HANDED_ON}
            own = {
                key.removeprefix(prefix): value
                for key, value in kwargs.items()
                if key.startswith(prefix)
            }
            return Connected(str(named[0]), prefix, handed_on | own)
    return None
