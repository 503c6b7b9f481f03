"""Libraries describe files in a process of their own, within bounds, whatever the files are."""

import contextlib
import os
import random
import struct

import pytest
import torch
from gguf_files import content, entry, front, padded, pair
from memory_files import in_memory

from shmload._checkpoints.formats import described, gguf
from shmload._checkpoints.formats.described import (
    Described,
    NotDescribed,
    describe_all,
    read_described,
)

_TENSORS = {"a": ("F32", (2, 3), bytes(24)), "b.weight": ("Q4_0", (64,), bytes(36))}


@pytest.fixture(autouse=True)
def _forgets(monkeypatch):
    """Let this process know no answer."""
    monkeypatch.setattr(described, "_kept", {})


@pytest.fixture
def opened():
    """Return a function that makes a file of some bytes and opens it."""
    with contextlib.ExitStack() as files:
        yield lambda raw: files.enter_context(in_memory(raw))


def test_file_without_an_end_to_read_is_refused_by_a_deadline(opened, configure):
    configure(stall_timeout_s=2)
    endless = front(0, 1) + pair("k", 9, struct.pack("<IQ", 5, 1 << 62))
    with pytest.raises(NotDescribed, match="said nothing for 2 s"):
        read_described(opened(endless), "gguf", "gguf")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gguf", "pytorch"])
def test_damaged_file_is_refused_or_described_within_its_bounds(
    opened, configure, tmp_path, module
):
    configure(stall_timeout_s=20)
    generator, whole = random.Random(0), content(_TENSORS)
    if module == "pytorch":
        torch.save({"a": torch.ones(3), "b": torch.zeros(2, 5).half()}, tmp_path / "a.bin")
        whole = (tmp_path / "a.bin").read_bytes()
    fds = []
    for _ in range(150):
        raw = bytearray(whole[: generator.choice([len(whole), generator.randrange(len(whole))])])
        for _ in range(generator.randint(0, 3) if raw else 0):
            raw[generator.randrange(len(raw))] = generator.choice([0, 1, 127, 255])
        fds.append(opened(raw))
    package = "torch" if module == "pytorch" else "gguf"
    answers = describe_all(fds, module, package)
    assert any(isinstance(each, Described) for each in answers)
    for fd in fds:
        try:
            header = read_described(fd, module, package)
        except NotDescribed:
            continue
        nbytes = os.fstat(fd).st_size
        assert all(0 <= each.begin <= each.end <= nbytes for each in header.tensors)


def test_tensors_that_share_far_more_bytes_than_there_are(opened, monkeypatch):
    monkeypatch.setattr(described, "_ALWAYS_NBYTES", 100)
    monkeypatch.setattr(described, "_MOST_TIMES", 2)
    entries = b"".join(entry(str(each), (64,), "F32", 0) for each in range(9))
    shared = padded(front(9) + entries) + bytes(256)
    with pytest.raises(NotDescribed, match=r"share bytes, and take 2\.25 KiB apart"):
        read_described(opened(shared), "gguf", "gguf")


@pytest.fixture
def asked(monkeypatch, configure, tmp_path):
    """Ask in this process, where the library can be made to fail; return the files asked about."""
    configure(cache_dir=tmp_path)
    fds = []

    def ask(process, module, fd):
        fds.append(fd)
        try:
            return described._answer(module, f"/proc/self/fd/{fd}")
        except RuntimeError as exc:
            raise EOFError from exc  # the process would end

    monkeypatch.setattr(described, "_ask", ask)
    return fds


def failing(says):
    """Return a library's function that raises an error."""

    def describe(path):
        raise RuntimeError(says)

    return describe


@pytest.mark.usefixtures("asked")
def test_refusal_for_a_lack_of_memory_is_not_remembered(opened, monkeypatch):
    fd = opened(content(_TENSORS))
    with monkeypatch.context() as patch:
        says = "unable to mmap 100 bytes from file: Cannot allocate memory (12)"
        patch.setattr(gguf, "describe", failing(says))
        with pytest.raises(NotDescribed, match="the process that reads it ended"):
            read_described(fd, "gguf", "gguf")
    assert len(read_described(fd, "gguf", "gguf").tensors) == 2


def test_refusal_by_a_runtime_error_is_kept_in_this_process_alone(opened, monkeypatch, asked):
    fd = opened(content(_TENSORS))
    monkeypatch.setattr(gguf, "describe", failing("failed reading file"))
    for _ in range(2):
        with pytest.raises(NotDescribed, match="failed reading file"):
            read_described(fd, "gguf", "gguf")
    assert len(asked) == 1
    described._kept.clear()  # as in the next process
    with pytest.raises(NotDescribed, match="failed reading file"):
        read_described(fd, "gguf", "gguf")
    assert len(asked) == 2
