"""The base of all errors.

Guarantee: what a file, a tensor or a process is called cannot steer a terminal, nor add a line to a
log, by way of an error's text.
"""

from typing import Any

from shmload._wording import printing


class ShmloadError(Exception):
    """The base of every error in this package."""

    def __str__(self) -> str:
        # OSError would put the errno in front, and KeyError would quote the text.
        return printing(str(self.args[0])) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # `args` is not what `__init__` takes, so the parts are restored without calling it.
        state = self.__dict__ | ({"errno": self.errno} if isinstance(self, OSError) else {})
        return _rebuild, (type(self), self.args), state


def _rebuild(kind: type[ShmloadError], args: tuple[Any, ...]) -> ShmloadError:
    """Rebuild a pickled or copied error without calling its `__init__`."""
    error = kind.__new__(kind)
    error.args = args
    return error
