"""Items for folders of results, and runs that store them and may be killed at any step."""

import hashlib
import os

import pytest

from shmload.integrations.results import Array, ResultFolder

FACTS = {"weights": "sha256=0", "dtype": "bfloat16"}
SHARD_ITEMS = 4
COUNT = 10


def key_of(index):
    """Return a unique key like users' keys: slashes, dots, quotes, any alphabet."""
    letter = ("é", "猫", "😀")[index % 3]
    return f'a/{index}.b\\"{letter}/' if index % 2 else f"img{index}.png"


def arrays_of(index):
    """Return an item's arrays; each fourth item has none."""
    if index % 4 == 3:
        return {}
    latent = hashlib.shake_128(b"latent %d" % index).digest(64 * (1 + index % 3))
    odd = hashlib.shake_128(b"odd %d" % index).digest(index % 5)
    return {
        "odd": Array("U8", (len(odd),), odd),
        "latent": Array("BF16", (len(latent) // 8, 4), memoryview(latent).cast("H")),
    }


def run(
    folder, order, *, failing=(), stored=None, facts=FACTS, retry_failed=True, format="safetensors"
):
    """Compute and store items that are not settled yet, as a job does, in the order given.

    Args:
        folder: of the results.
        order: the items' numbers, in order of arrival.
        failing: the items that fail.
        stored: items that an earlier run reported as stored; computing one again is an error.
        facts: of the run.
        retry_failed: do items again that failed in an earlier run.
        format: of the results files.
    """
    stored = set() if stored is None else stored
    with ResultFolder(
        folder, shard_items=SHARD_ITEMS, facts=facts, retry_failed=retry_failed, format=format
    ) as results:
        for index in order:
            key = key_of(index)
            if results.is_settled(index, key):
                continue
            assert index not in stored
            if index in failing:
                results.fail(index, key, f"ValueError: {index}")
            else:
                results.add(index, key, arrays_of(index))
                stored.add(index)
        return results.finish(len(order))


def content_of(folder):
    """Return the bytes of every file in a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The folder's content after an undisturbed serial run."""
    folder = tmp_path_factory.mktemp("serial")
    run(folder, range(COUNT))
    return content_of(folder)


def unfinished(folder):
    """Leave a journal with three items, and return its path."""
    with ResultFolder(folder, shard_items=SHARD_ITEMS, facts=FACTS) as results:
        for index in range(3):
            results.add(index, key_of(index), arrays_of(index))
    return folder / "shard-00000.journal"


def done_in(folder):
    with ResultFolder(folder, shard_items=SHARD_ITEMS, facts=FACTS) as results:
        return [index for index in range(COUNT) if results.is_done(index, key_of(index))]


# The calls that change a file system; all but the last are patched in `os`.
CHANGES = ("mkdir", "open", "pwrite", "ftruncate", "fsync", "link", "rename", "unlink")


class Killed(BaseException):
    """Simulates a kill of the process."""


def makes_file(flags):
    """Tell whether these flags of `open` make a file, with a name or without."""
    return bool(flags & os.O_CREAT) or flags & os.O_TMPFILE == os.O_TMPFILE


class Mortality:
    """Kills a job at one of its changes to the file system; later changes fail.

    Args:
        patch: pytest's.
        at: number of changes before the kill.
        part: bytes that the interrupted write still writes.
        end: called at the kill.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at, part=0, end=lambda: None):
        self.left = at
        self._part = part
        self._end = end
        for name in CHANGES:
            patch.setattr(os, name, self._mortal(name, getattr(os, name)))

    def _mortal(self, name, call):
        def dying(*args, **kwargs):
            if name == "open" and not makes_file(args[1]):
                return call(*args, **kwargs)
            self.left -= 1
            if self.left >= 0:
                return call(*args, **kwargs)
            if self.left == -1 and name == "pwrite":
                fd, content, offset = args
                call(fd, content[: self._part], offset)
            self._end()
            raise Killed

        return dying
