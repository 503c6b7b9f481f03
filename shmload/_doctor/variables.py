"""The variables of an environment that are settings, and those that only look like one."""

import os
from collections.abc import Iterable, Mapping

import msgspec

from shmload._settings import PREFIX, Settings
from shmload._wording import nearest

# Of another page than the settings: `shmload run --redirect` sets it for its program.
_OTHERS = (PREFIX + "REDIRECT",)
_KNOWN = tuple(PREFIX + field.name.upper() for field in msgspec.structs.fields(Settings))


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that begins like a setting's and is none.

    Args:
        environment: names of variables.
    """
    return [
        f"{variable} is no setting{nearest(variable, _KNOWN)}"
        for variable in sorted(environment)
        if variable.startswith(PREFIX) and variable not in _KNOWN + _OTHERS
    ]


def relative_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting that is a relative path."""
    paths = [field.name for field in msgspec.structs.fields(Settings) if "Path" in str(field.type)]
    return [
        f"{name} is a relative path, so it is another one in each directory"
        for name in (PREFIX + path.upper() for path in paths)
        if environment.get(name) and not os.path.isabs(os.path.expanduser(environment[name]))
    ]


def given_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the settings that have a value, as `NAME=VALUE`."""
    return [f"{name}={environment[name]}" for name in _KNOWN if environment.get(name)]
