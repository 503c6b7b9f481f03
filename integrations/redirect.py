"""`redirect`: programs that were not changed load through shared memory.

Guarantee: what `from_pretrained` of diffusers and transformers, and `from_single_file`, return or
raise is what they would without it.
"""

from typing import Literal, Self

from shmload._redirecting.patches import Options, turn_off, turn_on
from shmload.errors import ArgumentError


class Redirection:
    """An open redirection; a context that closes it."""

    def __init__(self, options: Options) -> None:
        turn_on(self, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; the last one restores what was patched. A second call does nothing."""
        turn_off(self)


def redirect(
    *, keep: bool | Literal["converted"] = "converted", verbose: bool = False
) -> Redirection:
    """Lead `from_pretrained` of diffusers and transformers through shared memory.

    From now on pipelines, models of diffusers and models of transformers come from shared memory,
    also by `from_single_file`, where the result is the same, and from the library itself otherwise.
    It holds for the whole process, for libraries that are imported already and for those that will
    be. Calls nest: the options of the last one that is open count. It imports none of the
    libraries.

        shmload.redirect()                # for the rest of the process

        with shmload.redirect():          # or for a block
            pipe = DiffusionPipeline.from_pretrained(...)

    Each call is logged by `shmload.redirect` at the level INFO, with its way and the reason for it;
    at WARNING if shmload failed, so that the library had to load.

    Args:
        keep: as for `load_pipeline`. By default the segments that had to be made stay for the next
            process, until `shmload rm` or until a load needs their room.
        verbose: write these lines on standard error, too.

    Returns:
        The redirection, which is open until its `close`, or the end of a `with` block.

    Raises:
        ArgumentError: an argument has another type.
    """
    if not isinstance(keep, bool) and keep != "converted":
        raise ArgumentError(f"keep is {keep!r}; it must be True, False or 'converted'")
    if not isinstance(verbose, bool):
        raise ArgumentError(f"verbose is {verbose!r}; it must be True or False")
    return Redirection(Options(keep, verbose))
