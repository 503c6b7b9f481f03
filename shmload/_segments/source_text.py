r"""The path of a shard as text in a segment's header, and the paths that such a text can mean.

A path is bytes, and a header is UTF-8. Text that is not UTF-8 has its odd bytes as `\xNN`. It does
not depend on the locale, so every process reads the same path.
"""

import json
import os
import re
from typing import TypeVar

import msgspec

_T = TypeVar("_T", bound=msgspec.Struct)
_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")


def source_text(path: str) -> str:
    """Return the text of a path; it can be printed, and written as UTF-8."""
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.replace(b"\\", rb"\x5c").decode("utf-8", "backslashreplace")


def source_paths(text: str) -> tuple[str, ...]:
    r"""Return the paths that a text can stand for, the likelier one first.

    A name may itself contain `\xNN`, so there can be two. An `Identity` tells which one it is.
    """
    raw = text.encode()
    unescaped = _ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), raw)
    return tuple(os.fsdecode(path) for path in dict.fromkeys((raw, unescaped)))


def encode_paths(record: msgspec.Struct) -> bytes:
    """Return a record that has paths as JSON, the same in every locale.

    Raises:
        UnicodeEncodeError: a text in it is no path.
    """
    return os.fsencode(json.dumps(msgspec.to_builtins(record), ensure_ascii=False))


def decode_paths(content: bytes, kind: type[_T]) -> _T:
    """Return the record that `encode_paths` has written.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.convert(json.loads(os.fsdecode(content)), kind)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
