"""What was evicted for a load, as a person thinks of it: by model."""

from collections.abc import Iterable, Sequence

import msgspec

from shmload._segments.listing import SegmentInfo
from shmload._segments.models import find_models
from shmload._segments.roots import model_names
from shmload._wording import format_nbytes


class Evicted(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or the part of one, that was evicted to make room."""

    model: str
    """Its name, as `shmload ls` shows it."""
    dtype: str
    """torch's name of the dtype of the weights that went."""
    components: tuple[str, ...]
    """The components that went, the largest first; empty for a model without components."""
    nbytes: int
    """How much went, in bytes."""
    segments: tuple[str, ...]
    """Names of the segments that went."""

    def __str__(self) -> str:
        what = f"{self.model} ({self.dtype})" if self.dtype else self.model
        parts = f": {', '.join(self.components)}" if self.components else ""
        return f"evicted {what}{parts}, {format_nbytes(self.nbytes)}, for room"


def group_evicted(
    gone: Sequence[SegmentInfo], resident: Iterable[SegmentInfo] = ()
) -> tuple[Evicted, ...]:
    """Group the segments that went by the models that they were part of.

    Args:
        gone: the segments that went.
        resident: those that stay, whose models have names too.
    """
    names = model_names(info.source for info in (*gone, *resident) if info.source)
    return tuple(
        Evicted(
            model=names.get(model.segments[0].source, model.name),
            dtype=model.dtype,
            components=model.components,
            nbytes=model.nbytes,
            segments=tuple(info.name for info in model.segments),
        )
        for model in find_models(gone)
    )
