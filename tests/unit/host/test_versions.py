"""A change of a message comes with another version: both ends of a wire may be of two releases."""

import hashlib
import json
import typing

import msgspec

from shmload.workers import messages

# The version and a digest of what it says. A changed message changes the digest: then increase
# VERSION, and write both here.
_KNOWN = 9, "4dca896e859f4fc0"


def test_changed_message_has_another_version():
    assert (messages.VERSION, digest_of(messages.Fill | messages.FromWorker)) == _KNOWN


def digest_of(union):
    """Return a digest of the messages of a union: their tags, fields and types."""
    _, components = msgspec.json.schema_components(typing.get_args(union))
    return hashlib.blake2b(
        json.dumps(without_words(components), sort_keys=True).encode(), digest_size=8
    ).hexdigest()


def without_words(schema):
    """Return a schema without its docstrings."""
    match schema:
        case dict():
            return {k: without_words(v) for k, v in schema.items() if k != "description"}
        case list():
            return [*map(without_words, schema)]
        case _:
            return schema
