"""The code that a built object depends on: the files of its classes, and their constructors.

What is restored runs no constructor. So an object is restored only where its classes, with their
bases, come from the files that they came from, and have the constructors of these files.
"""

import functools
import hashlib
import logging
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from typing import Any

from shmload._building.parts import CannotKeep, CannotKeepHere
from shmload._host.files import files_below, fingerprint

# These are libraries also where they are installed editable; all their files count then.
_LIBRARIES = {
    "accelerate", "diffusers", "huggingface_hub", "peft", "shmload", "tokenizers", "torch",
    "transformers",
}  # fmt: skip
_OWN = "shmload"  # of which an object names only what restores it
_OF_PYTHON = ("stdlib", "platstdlib", "purelib", "platlib")
_GENERATED = "<string>"  # the file of the constructors that dataclasses get
# What makes an object: none of it runs where the object is restored.
_MAKERS = (
    "__init__", "__new__", "_from_config", "from_config", "from_pretrained", "from_single_file",
    "register_modules",
)  # fmt: skip
# What programs set on a class to have other dtypes.
_CHOOSE_DTYPES = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


Stamp = tuple[int, int, int]
"""Size in bytes, inode, and the time of the last change in ns."""


def code_of(things: Iterable[Any]) -> dict[str, Stamp]:
    """Return the stamps of the files that classes and functions come from, by module.

    Of a library that is installed editable it is one stamp of all its files, by its name.

    Raises:
        CannotKeep: code lies outside of the libraries or is not that of its file, or a file has
            changed since this process began, which may have read it before.
    """
    installed, editable = _installed(), _editable()
    found: dict[str, Stamp] = {}
    # Bases first: a program's own class in a library's place shows by what it is derived from.
    for thing in dict.fromkeys(base for each in things for base in reversed(_bases(each))):
        name = str(thing.__module__)
        package = name.partition(".")[0]
        if isinstance(thing, type):
            _require_own(thing, package, (*installed, *editable.values()))
            chosen = {k: vars(thing)[k] for k in _CHOOSE_DTYPES if k in vars(thing)}
            if chosen:
                # Sets have another order in each process.
                text = repr(
                    [(k, sorted(v) if isinstance(v, set) else v) for k, v in chosen.items()]
                )
                found[f"{name}.{thing.__qualname__}"] = (0, _number_of(text), 0)
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None or name in found:  # of the interpreter, or seen
            continue
        if path.startswith(installed):
            found[name] = _stamp_of(path)
        elif package not in editable:
            raise CannotKeep(f"{thing.__qualname__} is of {path}, which is no library")
        elif package == _OWN:
            found[name] = _stamp_of(path)
        elif package not in found:
            found[package] = _stamp_of_all(editable[package])
    if max((mtime for *_, mtime in found.values()), default=0) > _logging_began_ns():
        raise CannotKeepHere("a file of a library has changed since this process began")
    return found


def require_same(things: Iterable[Any], code: dict[str, Stamp]) -> None:
    """Check that classes and functions have the code that they had.

    Args:
        things: what an object is restored of.
        code: what `code_of` has returned of the same.

    Raises:
        CannotKeep: their code is another one.
    """
    now = code_of(things)
    if now != code:
        changed = min(name for name in now.keys() | code.keys() if now.get(name) != code.get(name))
        raise CannotKeep(f"the code of {changed} has changed")


def _bases(thing: Any) -> tuple[Any, ...]:
    return thing.__mro__ if isinstance(thing, type) else (thing,)


def _require_own(kind: type, package: str, folders: tuple[str, ...]) -> None:
    """Check that a library's code makes a class, which its package and module have by its name."""
    for home in (package, kind.__module__):
        named = vars(sys.modules.get(home, object)).get(kind.__qualname__)
        if isinstance(named, type) and named is not kind:
            from_package = named.__module__.partition(".")[0] == package
            if not from_package or named.__name__ != kind.__name__:
                raise CannotKeepHere(f"{home}.{kind.__name__} was replaced")
    for name in _MAKERS:
        made_by = vars(kind).get(name)
        function = getattr(made_by, "__func__", made_by)  # of a class or static method
        if isinstance(function, types.FunctionType):
            path = function.__code__.co_filename
            is_generated = path == _GENERATED and "__dataclass_fields__" in vars(kind)
            if not (is_generated or path.startswith(folders)):
                raise CannotKeepHere(f"{kind.__qualname__}.{name} was replaced")


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    paths = {sysconfig.get_path(name) for name in _OF_PYTHON}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(
        os.path.join(each, "") for path in paths for each in (path, os.path.realpath(path))
    )


def _editable() -> dict[str, str]:
    """Return the folders of the libraries that lie elsewhere, by package."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES}
    return {
        name: os.path.join(os.path.dirname(path), "")
        for name, path in files.items()
        if path and not path.startswith(_installed())
    }


def _stamp_of(path: str) -> Stamp:
    """Return size, inode and time of a file.

    As Python itself, which compares size and time with those of compiled code. A further hard link,
    as uv makes for each environment, is no change.
    """
    found = fingerprint(path)
    return (found.nbytes, found.inode, found.mtime_ns) if found else (0, 0, 0)


def _stamp_of_all(folder: str) -> Stamp:
    """Return one stamp of all code below a folder: size, a number of all of it, the last time."""
    names = [name for name in files_below(folder) if name.endswith((".py", ".so"))]
    stamps = list(map(_stamp_of, names))
    number = _number_of(repr([names, stamps]))
    return sum(each[0] for each in stamps), number, max(each[2] for each in stamps)


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def _logging_began_ns() -> float:
    """Return when `logging` was imported, in nanoseconds since the epoch.

    The libraries import it before their models. A forked child may have their code from its parent,
    and is younger than that.
    """
    record = logging.makeLogRecord({})
    return record.created * 1e9 - record.relativeCreated * 1e6
